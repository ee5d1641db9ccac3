// A trace as a page to step through.
#include <cmath>
#include <nlohmann/json.hpp>

#include "core/text.h"
#include "headway/trace.h"
#include "io/output_file.h"
#include "trace/layout.h"
#include "trace_texts.h"
#include "view/html.h"

namespace headway {
namespace {

using nlohmann::json;

json number_of(double number) {
  if (std::isfinite(number)) {
    return number;
  }
  return std::isnan(number) ? "NaN" : number < 0 ? "-Infinity" : "Infinity";
}

json data_of(const TraceStep& step) {
  const tracing::Layout layout(step);
  json numbers = json::array(), sources = json::array();
  for (std::int64_t n = 0; n < step.numbers.elements(); ++n) {
    numbers.push_back(number_of(step.numbers.as<double>()[n]));
  }
  for (const TraceSource& source : step.sources) {
    sources.push_back({{"step", source.step}, {"part", name(source.part)}});
  }
  return {{"name", step.name},          {"symbol", step.symbol},
          {"formula", step.formula},    {"why", step.why},
          {"kind", name(step.kind)},    {"shape", text(step.numbers.sizes())},
          {"items", layout.items},      {"hasItems", layout.has_items},
          {"heads", layout.heads},      {"hasHeads", layout.has_heads},
          {"rows", layout.rows},        {"columns", layout.columns},
          {"rowAxis", layout.row_axis}, {"columnAxis", layout.column_axis},
          {"numbers", numbers},         {"sources", sources}};
}

}  // namespace

std::string trace_page(const Trace& trace) {
  json data = {{"title", trace.title},
               {"options", trace.options},
               {"queryTokens", trace.query_tokens},
               {"keyTokens", trace.key_tokens},
               {"steps", json::array()}};
  for (const TraceStep& step : trace.steps) {
    data["steps"].push_back(data_of(step));
  }
  // Bytes that are no UTF-8 are replaced.
  const std::string written = data.dump(-1, ' ', false, json::error_handler_t::replace);
  return view::assembled({trace_page_markup, trace_style, trace_script}, written, view::Connect::nowhere);
}

void write_trace(const std::filesystem::path& path, const Trace& trace, bool overwrite) {
  const std::string page = trace_page(trace);
  io::OutputFile file("write_trace", path, overwrite);
  file.write(std::as_bytes(std::span(page)));
  file.commit();
}

}  // namespace headway
