#include "functions.h"

#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "calls.h"
#include "docstrings.h"
#include "method.h"
#include "options.h"
#include "output.h"
#include "released.h"
#include "shapes.h"

namespace headway::python {
namespace {

// ---- What the functions share ----

// Memory on a GPU cannot be given to an engine that is not there: the reason, in the engine list's own words, before
// anything is allocated.
void require_engine(const char* operation, ConstTensorView query, ConstTensorView key, ConstTensorView value,
                    const AttentionOptions& options) {
  static const bool has_cuda = [] {
    const std::vector<Engine> there = engines();
    return std::find(there.begin(), there.end(), Engine::cuda) != there.end();
  }();
  if (has_cuda || query.device().type == DeviceType::cpu) {
    return;
  }
  try {
    explain(query, key, value, options);
  } catch (const Unsupported& error) {
    const std::string reason = error.what();
    throw Unsupported(text(operation, reason.substr(reason.find(':'))));
  }
}

// query, key, value and the packed sequences' bounds, as they come among the arguments.
struct Inputs {
  // query and key are the arguments from `first` on.
  Inputs(const Arguments& arguments, std::size_t first)
      : layout(read_layout(arguments)), query(arguments.leading(first)), key(arguments.leading(first + 1)) {}
  // The same, then value, and the bounds from `bounds` on where there are any.
  Inputs(const Arguments& arguments, std::size_t first, std::optional<std::size_t> bounds) : Inputs(arguments, first) {
    value.emplace(arguments.leading(first + 2));
    if (bounds) {
      read_bounds(arguments, *bounds);
    }
  }

  void read_bounds(const Arguments& arguments, std::size_t first) {
    if (layout != Layout::bhsd) {
      refuse<InvalidArgument>(arguments.option(Option::layout),
                              "is 'bshd', expected none: packed sequences are (total, H, D)");
    }
    starts_q = read_integers(arguments.leading(first), bounds_q);
    starts_k = read_integers(arguments.leading(first + 1), bounds_k);
  }

  bool packed() const { return bounds_q.has_value(); }

  // As (B, H, S, D).
  ConstTensorView query_view() const { return ordered(query.view()); }
  ConstTensorView key_view() const { return ordered(key.view()); }
  ConstTensorView value_view() const { return ordered(value->view()); }
  template <class View>
  View ordered(const View& view) const {
    return heads_second(view, layout);
  }
  // (B, H, S, D) sizes in the order of the caller's arrays.
  Dims stored(Dims sizes) const {
    if (layout == Layout::bshd && sizes.size() == 4) {
      std::swap(sizes[1], sizes[2]);
    }
    return sizes;
  }

  Layout layout;
  Array query, key;
  std::optional<Array> value, bounds_q, bounds_k;
  ConstTensorView starts_q, starts_k;
};

// ---- Forward ----

nb::object as_asked_for(const Results& found) {
  if (!found.weights.is_valid() && !found.lse.is_valid()) {
    return found.out;
  }
  if (found.weights.is_valid() && found.lse.is_valid()) {
    return nb::make_tuple(found.out, found.weights, found.lse);
  }
  return nb::make_tuple(found.out, found.weights.is_valid() ? found.weights : found.lse);
}

Results forward(const Arguments& arguments, const Inputs& inputs) {
  const char* operation = arguments.function();
  const Argument return_weights = arguments.own(0), return_lse = arguments.own(1), given_out = arguments.own(2);
  const ConstTensorView query = inputs.query_view(), key = inputs.key_view(), value = inputs.value_view();
  Options options(arguments);
  require_engine(operation, query, key, value, options.values);

  const Dims matrix = inputs.packed() ? Dims{0} : matrix_sizes(query.sizes(), key.sizes());
  if (is_true(return_weights)) {
    // Before out is allocated: a matrix that cannot exist is not the memory's fault.
    bytes_of_result(arguments.made("weights"), query.dtype(), matrix);
  }
  std::optional<Output> out, weights, lse;
  if (is_absent(given_out)) {
    out.emplace(arguments.made("out"), inputs.query, query.dtype(),
                inputs.stored(out_sizes(query.sizes(), value.sizes())));
  } else {
    out.emplace(given_out);
  }
  AttentionOutputs outputs;
  if (is_true(return_weights)) {
    weights.emplace(arguments.made("weights"), inputs.query, query.dtype(), matrix);
    outputs.weights = weights->view();
  }
  if (is_true(return_lse)) {
    lse.emplace(arguments.made("lse"), inputs.query, statistics_type(query.dtype()),
                lse_sizes(query.sizes(), inputs.packed()));
    outputs.lse = lse->view();
  }
  {
    const Released released(options.values);
    if (inputs.packed()) {
      attention_varlen(query, key, value, inputs.starts_q, inputs.starts_k, out->view(), options.values, outputs);
    } else {
      attention(query, key, value, inputs.ordered(out->view()), options.values, outputs);
    }
  }
  const auto finished = [](std::optional<Output>& output) { return output ? output->finish() : nb::object(); };
  return {finished(out), finished(weights), finished(lse)};
}

template <bool packed>
nb::object call_forward(const Arguments& arguments) {
  return as_asked_for(python::forward(arguments, packed));
}

// ---- Backward ----

// gradients=: a Gradients, or a sequence of its first arrays, to write to; None where one is to be made.
class GivenGradients {
 public:
  explicit GivenGradients(const Argument& argument) : argument_(argument) {
    if (is_absent(argument)) {
      return;
    }
    if (PySequence_Check(argument.object.ptr()) == 0 || is_array(argument.object) || nb::len(argument.object) > 5) {
      refuse<TypeMismatch>(argument, "is a ", class_name(argument.object),
                           ", expected a headway.Gradients or a sequence of at most its 5 arrays");
    }
    for (std::size_t i = 0; i < nb::len(argument.object); ++i) {
      objects_.push_back(argument.object[i]);
    }
  }

  // The one at `index`, or none; `name` for error texts.
  Argument at(std::size_t index, const char* name) const {
    return {argument_.operation, name, index < objects_.size() ? nb::handle(objects_[index]) : nb::handle(),
            argument_.stream};
  }

 private:
  Argument argument_;
  std::vector<nb::object> objects_;
};

struct GradientOutputs {
  std::optional<Output> query, key, value, bias, sinks;

  static void add(std::optional<Output>& output, const Argument& given, const Array& like) {
    if (is_absent(given)) {
      const ConstTensorView view = like.view();
      output.emplace(given, like, view.dtype(), view.sizes());
    } else {
      output.emplace(given);
    }
  }
  AttentionGradients views(const Inputs& inputs) const {
    const auto view = [](const std::optional<Output>& output) {
      return output ? std::optional(output->view()) : std::nullopt;
    };
    const auto ordered = [&](const std::optional<Output>& output) {
      return output ? std::optional(inputs.ordered(output->view())) : std::nullopt;
    };
    return {.dq = ordered(query), .dk = ordered(key), .dv = ordered(value), .dbias = view(bias), .dsinks = view(sinks)};
  }
  nb::tuple finish() {
    const auto object = [](std::optional<Output>& output) { return output ? output->finish() : nb::none(); };
    return nb::make_tuple(object(query), object(key), object(value), object(bias), object(sinks));
  }
};

nb::tuple backward(const Arguments& arguments, const Inputs& inputs) {
  const char* operation = arguments.function();
  const Array grad_out(arguments.leading(0)), out(arguments.leading(4)), lse(arguments.leading(5));
  const ConstTensorView query = inputs.query_view(), key = inputs.key_view(), value = inputs.value_view();
  const ConstTensorView grad_out_view = inputs.ordered(grad_out.view()), out_view = inputs.ordered(out.view());
  const ConstTensorView lse_view = lse.view("f32 or f64");
  Options options(arguments);
  require_engine(operation, query, key, value, options.values);

  const GivenGradients given(arguments.own(0));
  GradientOutputs outputs;
  outputs.add(outputs.query, given.at(0, "the query's gradient"), inputs.query);
  outputs.add(outputs.key, given.at(1, "the key's gradient"), inputs.key);
  outputs.add(outputs.value, given.at(2, "the value's gradient"), *inputs.value);
  const Argument wanted = arguments.own(1);
  const bool wants_bias = !wanted.object.is_valid() || is_true(wanted);
  if (options.bias() && (wants_bias || !is_absent(given.at(3, "the bias's gradient")))) {
    outputs.add(outputs.bias, given.at(3, "the bias's gradient"), *options.bias());
  }
  if (options.sinks()) {
    outputs.add(outputs.sinks, given.at(4, "the sinks' gradient"), *options.sinks());
  }
  {
    const AttentionGradients views = outputs.views(inputs);
    const Released released(options.values);
    if (inputs.packed()) {
      attention_varlen_backward(grad_out_view, query, key, value, out_view, lse_view, inputs.starts_q, inputs.starts_k,
                                views, options.values);
    } else {
      attention_backward(grad_out_view, query, key, value, out_view, lse_view, views, options.values);
    }
  }
  return outputs.finish();
}

template <bool packed>
nb::object call_backward(const Arguments& arguments) {
  static const nb::object& gradients = *new nb::object(nb::module_::import_("headway._results").attr("Gradients"));
  return gradients(*python::backward(arguments, packed));
}

// ---- Scores and plans ----

nb::object call_scores(const Arguments& arguments) {
  const char* operation = arguments.function();
  const Inputs inputs(arguments, 0);
  const Argument given_out = arguments.own(1);
  const Stage stage = read_stage(arguments.own(0));
  const ConstTensorView query = inputs.query_view(), key = inputs.key_view();
  Options options(arguments);
  require_engine(operation, query, key, key, options.values);

  std::optional<Output> scores;
  if (is_absent(given_out)) {
    scores.emplace(arguments.made("scores"), inputs.query, query.dtype(), matrix_sizes(query.sizes(), key.sizes()));
  } else {
    scores.emplace(given_out);
  }
  {
    const Released released(options.values);
    attention_scores(query, key, scores->view(), stage, options.values);
  }
  return scores->finish();
}

nb::object call_explain(const Arguments& arguments) {
  const Inputs inputs(arguments, 0, std::nullopt);
  const Options options(arguments);
  const ExplainRequest request{
      .lse = is_true(arguments.own(1)), .weights = is_true(arguments.own(0)), .backward = is_true(arguments.own(3))};
  return nb::cast(explain(inputs.query_view(), inputs.key_view(), inputs.value_view(), options.values, request));
}

// ---- Engines ----

std::vector<std::string> engine_names() {
  std::vector<std::string> names;
  for (const Engine engine : engines()) {
    names.emplace_back(name(engine));
  }
  return names;
}

}  // namespace

Signature forward_signature(bool packed) {
  std::vector<Parameter> leading = {{"query"}, {"key"}, {"value"}};
  if (packed) {
    leading.insert(leading.end(), {{"cu_seqlens_q"}, {"cu_seqlens_k"}});
  }
  return {packed ? "attention_varlen" : "attention",
          leading,
          {{"return_weights", "False"}, {"return_lse", "False"}, {"out"}}};
}

Results forward(const Arguments& arguments, bool packed) {
  return forward(arguments, Inputs(arguments, 0, packed ? std::optional<std::size_t>(3) : std::nullopt));
}

Signature backward_signature(bool packed) {
  std::vector<Parameter> leading = {{"grad_out"}, {"query"}, {"key"}, {"value"}, {"out"}, {"lse"}};
  if (packed) {
    leading.insert(leading.end(), {{"cu_seqlens_q"}, {"cu_seqlens_k"}});
  }
  return {
      packed ? "attention_varlen_backward" : "attention_backward", leading, {{"gradients"}, {"bias_gradient", "True"}}};
}

nb::tuple backward(const Arguments& arguments, bool packed) {
  return backward(arguments, Inputs(arguments, 1, packed ? std::optional<std::size_t>(6) : std::nullopt));
}

void add_functions(nb::module_& module) {
  add_method<call_forward<false>>(module, forward_signature(false), docs::attention);
  add_method<call_backward<false>>(module, backward_signature(false), docs::attention_backward);
  add_method<call_scores>(module, {"attention_scores", {{"query"}, {"key"}}, {{"stage", "'weights'"}, {"out"}}},
                          docs::attention_scores);
  add_method<call_forward<true>>(module, forward_signature(true), docs::attention_varlen);
  add_method<call_backward<true>>(module, backward_signature(true), docs::attention_varlen_backward);
  const std::vector<Parameter> explained = {
      {"return_weights", "False"}, {"return_lse", "False"}, {"out"}, {"backward", "False"}};
  add_method<call_explain>(module, {"explain", {{"query"}, {"key"}, {"value"}}, explained}, docs::explain);
  module.def("engines", &engine_names);
}

}  // namespace headway::python
