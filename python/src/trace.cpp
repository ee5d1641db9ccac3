// trace: the steps of attention, for headway.trace to wrap.
#include "headway/trace.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <deque>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "arguments.h"
#include "docstrings.h"
#include "functions.h"
#include "method.h"
#include "options.h"
#include "released.h"

namespace headway::python {
namespace {

// The function's own keywords, in this order.
enum Own : std::size_t { heads, kv_heads, weights, tokens, query_tokens, title };

// A trace that Python owns. It moves and is never copied, which a vector of steps would not say.
struct TraceData {
  explicit TraceData(Trace&& made) : trace(std::move(made)) {}
  TraceData(TraceData&&) = default;
  TraceData(const TraceData&) = delete;

  Trace trace;
};

template <class Part, Part Trace::*Member>
const Part& part(const TraceData& self) {
  return self.trace.*Member;
}

std::vector<std::string> read_tokens(const Argument& argument) {
  return is_absent(argument) ? std::vector<std::string>() : nb::cast<std::vector<std::string>>(argument.object);
}

nb::object call_trace(const Arguments& arguments) {
  const Array query(arguments.leading(0)), key(arguments.leading(1)), value(arguments.leading(2));
  const Layout layout = read_layout(arguments);
  const ConstTensorView query_view = heads_second(query.view(), layout), key_view = heads_second(key.view(), layout);
  const ConstTensorView value_view = heads_second(value.view(), layout);
  Options options(arguments);
  TraceRequest request;
  request.heads = read_count(arguments.own(heads), 0);
  request.kv_heads = read_count(arguments.own(kv_heads), 0);
  request.key_tokens = read_tokens(arguments.own(tokens));
  request.query_tokens = read_tokens(arguments.own(query_tokens));
  if (!is_absent(arguments.own(title))) {
    request.title = nb::cast<std::string>(arguments.own(title).object);
  }
  std::deque<Array> arrays;  // as long as their views
  std::map<std::string, nb::object> given;
  if (!is_absent(arguments.own(weights))) {
    for (const auto& [name, array] : nb::cast<nb::dict>(arguments.own(weights).object)) {
      const auto entry = given.emplace(nb::cast<std::string>(name), nb::borrow(array)).first;
      arrays.emplace_back(Argument{arguments.function(), entry->first.c_str(), entry->second});
      request.weights.emplace(entry->first, arrays.back().view());
    }
  }
  std::optional<Trace> made;
  {
    const Released released(options.values);
    made = trace(query_view, key_view, value_view, options.values, request);
  }
  return nb::cast(TraceData(std::move(*made)));
}

// (name, symbol, formula, why, kind, axes, shape, bytes of float64, [(step, part), ...], text) of each step
nb::list steps_of(const TraceData& self) {
  nb::list result;
  for (std::size_t index = 0; index < self.trace.steps.size(); ++index) {
    const TraceStep& step = self.trace.steps[index];
    nb::list axes, shape, sources;
    for (std::size_t n = 0; n < step.axes.size(); ++n) {
      axes.append(nb::str(step.axes[n].c_str()));
      shape.append(nb::int_(step.numbers.size(static_cast<int>(n))));
    }
    for (const TraceSource& source : step.sources) {
      sources.append(nb::make_tuple(source.step, nb::str(name(source.part))));
    }
    const nb::bytes numbers(static_cast<const char*>(step.numbers.data()),
                            static_cast<std::size_t>(step.numbers.elements()) * sizeof(double));
    result.append(nb::make_tuple(nb::str(step.name.c_str()), nb::str(step.symbol.c_str()),
                                 nb::str(step.formula.c_str()), nb::str(step.why.c_str()), nb::str(name(step.kind)),
                                 axes, shape, numbers, sources, nb::str(to_string(self.trace, index).c_str())));
  }
  return result;
}

}  // namespace

void add_trace(nb::module_& module) {
  using Texts = std::vector<std::string>;
  nb::class_<TraceData>(module, "TraceData")
      .def_prop_ro("title", &part<std::string, &Trace::title>)
      .def_prop_ro("options", &part<std::string, &Trace::options>)
      .def_prop_ro("query_tokens", &part<Texts, &Trace::query_tokens>)
      .def_prop_ro("key_tokens", &part<Texts, &Trace::key_tokens>)
      .def("steps", &steps_of)
      .def("text", [](const TraceData& self) { return to_string(self.trace); })
      .def("page", [](const TraceData& self) { return trace_page(self.trace); })
      .def("save", [](const TraceData& self, const nb::bytes& path, bool overwrite) {
        write_trace(std::string(path.c_str(), path.size()), self.trace, overwrite);
      });
  add_method<call_trace>(module,
                         {"trace",
                          {{"query"}, {"key"}, {"value"}},
                          {{"heads"}, {"kv_heads"}, {"weights"}, {"tokens"}, {"query_tokens"}, {"title"}}},
                         docs::trace);
}

}  // namespace headway::python
