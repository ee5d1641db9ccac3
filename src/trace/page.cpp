// A trace as a page to step through.
#include <cmath>
#include <span>

#include "core/out_of_memory.h"
#include "core/text.h"
#include "headway/trace.h"
#include "io/json_text.h"
#include "io/output_file.h"
#include "trace/layout.h"
#include "trace_texts.h"
#include "view/html.h"

namespace headway {
namespace {

std::string number_text(double number) {
  if (std::isfinite(number)) {
    return io::json_text(number);
  }
  return io::json_text(std::isnan(number) ? "NaN" : number < 0 ? "-Infinity" : "Infinity");
}

std::string source_text(const TraceSource& source) {
  return io::JsonObject().set("step", source.step).set("part", name(source.part)).text();
}

std::string step_text(const TraceStep& step) {
  const tracing::Layout layout(step);
  const std::span numbers(step.numbers.as<double>(), static_cast<std::size_t>(step.numbers.elements()));
  io::JsonObject object;
  object.set("name", step.name).set("symbol", step.symbol).set("formula", step.formula).set("why", step.why);
  object.set("kind", name(step.kind)).set("shape", text(step.numbers.sizes()));
  object.set("items", layout.items).set("hasItems", layout.has_items);
  object.set("heads", layout.heads).set("hasHeads", layout.has_heads);
  object.set("rows", layout.rows).set("columns", layout.columns);
  object.set("rowAxis", layout.row_axis).set("columnAxis", layout.column_axis);
  object.add("numbers", io::json_array(numbers, number_text)).add("sources", io::json_array(step.sources, source_text));
  return object.text();
}

}  // namespace

std::string trace_page(const Trace& trace) try {
  io::JsonObject data;
  data.set("title", trace.title).set("options", trace.options);
  data.add("queryTokens", io::json_array(trace.query_tokens)).add("keyTokens", io::json_array(trace.key_tokens));
  data.add("steps", io::json_array(trace.steps, step_text));
  return view::assembled({trace_page_markup, trace_style, trace_script}, data.text(), view::Connect::nowhere);
} catch (...) {
  throw_own_error("trace_page");
}

void write_trace(const std::filesystem::path& path, const Trace& trace, bool overwrite) try {
  const std::string page = trace_page(trace);
  io::OutputFile file("write_trace", path, overwrite);
  file.write(std::as_bytes(std::span(page)));
  file.commit();
} catch (...) {
  throw_own_error("write_trace");
}

}  // namespace headway
