// A trace as text: aligned columns, the heads side by side where they fit.
#include "core/text.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <ostream>
#include <string_view>

#include "core/out_of_memory.h"
#include "core/utf8.h"
#include "headway/printable.h"
#include "headway/trace.h"
#include "trace/layout.h"

namespace headway {
namespace {

using tracing::Layout;

constexpr std::int64_t edge_columns = 5, edge_rows = 6;  // shown at each end of a long axis
constexpr std::int64_t most_matrices = 8;
constexpr std::size_t longest_label = 12;

// The number of digits that all numbers of a step are shown with.
class Digits {
 public:
  explicit Digits(const Tensor& numbers) {
    double largest = 0;
    bool whole = true;
    for (std::int64_t n = 0; n < numbers.elements(); ++n) {
      const double number = numbers.as<double>()[n];
      if (std::isfinite(number)) {
        largest = std::max(largest, std::fabs(number));
        whole = whole && number == std::rint(number);
      }
    }
    if (largest >= 1e7 || (largest > 0 && largest < 1e-3)) {
      form_ = "%.3e";
    } else if (whole) {
      decimals_ = 0;
    } else {
      decimals_ = std::clamp(4 - static_cast<int>(std::floor(std::log10(std::max(largest, 1.0)))), 1, 4);
    }
  }

  std::string operator()(double number) const {
    char buffer[64];
    if (!std::isfinite(number)) {
      return std::isnan(number) ? "nan" : number < 0 ? "-inf" : "inf";
    }
    if (number == 0) {
      return "0";  // exactly 0, not what rounds to it
    }
    if (decimals_ < 0) {
      std::snprintf(buffer, sizeof buffer, form_, number);
    } else {
      std::snprintf(buffer, sizeof buffer, "%.*f", decimals_, number);
    }
    return buffer;
  }

 private:
  const char* form_ = "%.*f";
  int decimals_ = -1;
};

// The indices of an axis that are shown; -1 stands for the dots.
std::vector<std::int64_t> shown(std::int64_t size, std::int64_t edge) {
  std::vector<std::int64_t> indices;
  for (std::int64_t n = 0; n < size; ++n) {
    if (size > 2 * edge && n == edge) {
      indices.push_back(-1);
      n = size - edge;
    }
    indices.push_back(n);
  }
  return indices;
}

// Columns that a text takes on a terminal.
std::size_t width_of(std::string_view text) {
  std::size_t columns = 0;
  while (!text.empty()) {
    const std::size_t length = std::max<std::size_t>(utf8_length(text), 1);
    columns += terminal_columns(code_point(text.substr(0, length)));
    text.remove_prefix(length);
  }
  return columns;
}

// Tokens may contain anything; what is printed stays short and on its line.
std::string shown_label(const std::string& token) {
  if (token.empty()) {
    return "(empty)";
  }
  const std::string label = printable(token);
  if (width_of(label) <= longest_label) {
    return label;
  }
  std::size_t end = 0;
  for (std::size_t columns = 0;;) {
    const std::string_view rest = std::string_view(label).substr(end);
    const std::size_t length = utf8_length(rest);
    columns += terminal_columns(code_point(rest.substr(0, length)));
    if (columns > longest_label - 1) {
      return label.substr(0, end) + "~";
    }
    end += length;
  }
}

std::string padded(const std::string& text, std::size_t width, bool left = false) {
  const std::string space(width - std::min(width, width_of(text)), ' ');
  return left ? text + space : space + text;
}

// One matrix as lines of one width.
struct Block {
  std::vector<std::string> lines;
  std::size_t width = 0;
};

class Writer {
 public:
  Writer(const Trace& trace, const TraceText& form) : trace_(trace), form_(form) {}

  std::string run() {
    text_ += marked(printable(trace_.title), bold) + "\n";
    if (!trace_.options.empty()) {
      text_ += trace_.options + "\n";
    }
    for (std::size_t n = 0; n < trace_.steps.size(); ++n) {
      text_ += "\n";
      write(n);
    }
    return std::move(text_);
  }

  std::string run(std::size_t step) {
    write(step);
    return std::move(text_);
  }

 private:
  static constexpr const char *bold = "\x1b[1m", *dim = "\x1b[2m", *plain = "\x1b[0m";

  std::string marked(const std::string& text, const char* mark) const {
    return form_.colour ? mark + text + plain : text;
  }

  void write(std::size_t number) {
    const TraceStep& step = trace_.steps[number];
    const std::string formula = step.kind == TraceKind::given ? "" : "  " + step.formula;
    text_ += headway::text(padded(std::to_string(number + 1), 2), "  ", marked(step.name, bold), "  ",
                           step.numbers.sizes(), formula, "\n    ", marked(step.why, dim), "\n");
    if (step.numbers.elements() == 0) {
      text_ += "      (no numbers)\n";
      return;
    }
    const Layout layout(step);
    std::vector<Block> blocks;
    for (std::int64_t m = 0; m < std::min(layout.matrices(), most_matrices); ++m) {
      blocks.push_back(block(step, layout, m));
    }
    arrange(blocks);
    if (layout.matrices() > most_matrices) {
      text_ += headway::text("      ... and ", layout.matrices() - most_matrices, " more\n");
    }
  }

  static std::string heading(const Layout& layout, std::int64_t matrix) {
    const std::int64_t item = matrix / layout.heads, head = matrix % layout.heads;
    std::string result = layout.items > 1 ? text("item ", item) : "";
    if (layout.has_heads) {
      result += text(result.empty() ? "" : ", ", "head ", head);
    }
    return result;
  }

  Block block(const TraceStep& step, const Layout& layout, std::int64_t matrix) const {
    const Digits digits(step.numbers);
    const double* numbers = step.numbers.as<double>() + matrix * layout.rows * layout.columns;
    const auto rows = shown(layout.rows, edge_rows), columns = shown(layout.columns, edge_columns);
    // Columns of texts: first the row labels, then the numbers, each with its label on top.
    std::vector<std::vector<std::string>> table(columns.size() + 1);
    table[0].emplace_back();
    for (const std::int64_t i : rows) {
      table[0].push_back(i < 0 ? "..." : layout.row_axis.empty() ? "" : row_label(layout, i));
    }
    for (std::size_t c = 0; c < columns.size(); ++c) {
      const std::int64_t j = columns[c];
      table[c + 1].push_back(j < 0 ? "..." : layout.column_axis.empty() ? "" : column_label(layout, j));
      for (const std::int64_t i : rows) {
        table[c + 1].push_back(i < 0 || j < 0 ? "..." : digits(numbers[i * layout.columns + j]));
      }
    }
    return lines_of(table, heading(layout, matrix), layout.column_axis.empty());
  }

  std::string row_label(const Layout& layout, std::int64_t i) const {
    return shown_label(tracing::label(trace_, layout.row_axis, i));
  }
  std::string column_label(const Layout& layout, std::int64_t j) const {
    return shown_label(tracing::label(trace_, layout.column_axis, j));
  }

  Block lines_of(const std::vector<std::vector<std::string>>& table, const std::string& heading,
                 bool no_column_labels) const {
    Block block;
    std::vector<std::size_t> widths;
    for (const auto& column : table) {
      std::size_t width = 0;
      for (const std::string& cell : column) {
        width = std::max(width, width_of(cell));
      }
      widths.push_back(width);
      block.width += width + (widths.size() == 1 ? 0 : 2);
    }
    block.width = std::max(block.width, width_of(heading));
    if (!heading.empty()) {
      block.lines.push_back(marked(padded(heading, block.width, true), dim));
    }
    for (std::size_t line = no_column_labels ? 1 : 0; line < table[0].size(); ++line) {
      std::string text = marked(padded(table[0][line], widths[0], true), dim);
      std::size_t used = widths[0];
      for (std::size_t c = 1; c < table.size(); ++c) {
        const std::string cell = padded(table[c][line], widths[c]);
        text += "  " + (line == 0 || table[c][line] == "-inf" ? marked(cell, dim) : cell);
        used += 2 + widths[c];
      }
      block.lines.push_back(text + std::string(block.width - used, ' '));
    }
    return block;
  }

  // As many side by side as the width takes.
  void arrange(const std::vector<Block>& blocks) {
    constexpr std::size_t indent = 6, gap = 4;
    std::size_t begin = 0;
    while (begin < blocks.size()) {
      std::size_t end = begin, width = indent;
      while (end < blocks.size() &&
             (end == begin || width + gap + blocks[end].width <= static_cast<std::size_t>(std::max(form_.width, 0)))) {
        width += blocks[end].width + (end == begin ? 0 : gap);
        ++end;
      }
      for (std::size_t line = 0; line < blocks[begin].lines.size(); ++line) {
        std::string text(indent, ' ');
        for (std::size_t n = begin; n < end; ++n) {
          text += (n == begin ? "" : std::string(gap, ' ')) + blocks[n].lines[line];
        }
        text.erase(text.find_last_not_of(' ') + 1);
        text_ += text + "\n";
      }
      begin = end;
    }
  }

  const Trace& trace_;
  const TraceText& form_;
  std::string text_;
};

}  // namespace

std::string to_string(const Trace& trace, const TraceText& form) try { return Writer(trace, form).run(); } catch (...) {
  throw_own_error("to_string");
}

std::string to_string(const Trace& trace, std::size_t step, const TraceText& form) try {
  if (step >= trace.steps.size()) {
    throw InvalidArgument(text("to_string: step is ", step, ", expected less than ", trace.steps.size()));
  }
  return Writer(trace, form).run(step);
} catch (...) {
  throw_own_error("to_string");
}

std::ostream& operator<<(std::ostream& stream, const Trace& trace) { return stream << to_string(trace); }

}  // namespace headway
