// A step's numbers as matrices: one for each batch item and head, of rows and columns with labels.
#pragma once

#include <cstdint>
#include <string>

#include "headway/trace.h"

namespace headway::tracing {

struct Layout {
  std::int64_t items = 1, heads = 1, rows = 1, columns = 1;
  bool has_items = false, has_heads = false;
  std::string row_axis, column_axis;  // empty where there is none

  explicit Layout(const TraceStep& step) {
    for (std::size_t n = 0; n < step.axes.size(); ++n) {
      const std::string& axis = step.axes[n];
      const std::int64_t size = step.numbers.size(static_cast<int>(n));
      const bool last = n + 1 == step.axes.size();
      if (axis == "batch") {
        items = size;
        has_items = true;
      } else if (axis == "head") {
        heads = size;
        has_heads = true;
      } else if (last && (row_axis != "" || axis == "out")) {
        columns = size;
        column_axis = axis;
      } else {
        rows = size;
        row_axis = axis;
      }
    }
  }

  std::int64_t matrices() const { return items * heads; }
};

// The label of row or column n of an axis: a token, or q0, k0, t0 and plain numbers.
inline std::string label(const Trace& trace, const std::string& axis, std::int64_t n) {
  const auto at = static_cast<std::size_t>(n);
  const bool query = axis == "query", key = axis == "key" || axis == "token";
  const std::vector<std::string>& tokens = query ? trace.query_tokens : trace.key_tokens;
  if ((query || key) && !tokens.empty()) {
    return tokens[at];
  }
  return (query || key ? axis.substr(0, 1) : std::string()) + std::to_string(n);
}

}  // namespace headway::tracing
