// The layer: three projections, attention over their output in place, one projection back; and the same way backward.
#include <algorithm>
#include <string_view>
#include <utility>

#include "core/linear.h"
#include "core/text.h"
#include "core/validate.h"
#include "headway/layer.h"
#include "layer/config.h"
#include "layer/initialize.h"
#include "layer/inputs.h"
#include "layer/stages.h"
#include "layer/state.h"

namespace headway {
namespace {

using Parameters = std::vector<std::pair<std::string, Tensor>>;

// Parameters are few and in a fixed order: a search by name is as good as an index.
template <class Pairs>
auto* find(Pairs& parameters, const std::string& name) {
  const auto found =
      std::find_if(parameters.begin(), parameters.end(), [&](const auto& entry) { return entry.first == name; });
  return found == parameters.end() ? nullptr : &found->second;
}

template <class Pairs>
auto& required(Pairs& parameters, const std::string& name) {
  if (auto* found = find(parameters, name)) {
    return *found;
  }
  std::string names;
  for (const auto& entry : parameters) {
    names += (names.empty() ? "" : ", ") + entry.first;
  }
  throw InvalidArgument(text("MultiHeadAttention::parameter: expected one of ", names, ", found ", name));
}

// One projection's parameters; `letter` is q, k, v or o.
struct Projection {
  ConstTensorView weight;
  std::optional<ConstTensorView> bias;
};

Projection projection(const Parameters& parameters, const std::string& letter) {
  Projection result{required(parameters, "W_" + letter), {}};
  if (const Tensor* bias = find(parameters, "b_" + letter)) {
    result.bias = *bias;
  }
  return result;
}

// Memory for x W  [B,S,out]
Tensor projected_like(const Parameters& parameters, const std::string& letter, ConstTensorView x) {
  return Tensor::uninitialized({x.size(0), x.size(1), projection(parameters, letter).weight.size(1)}, x.dtype());
}

// y = x W + b  [B,S,out]
void project(Engine engine, const Parameters& parameters, const std::string& letter, ConstTensorView x, TensorView y,
             const LinearReports& reports) {
  const auto [weight, bias] = projection(parameters, letter);
  linear(engine, x, weight, bias, y, reports);
}

// [B,S,heads*hd] seen as [B,heads,S,hd]: the same memory, other strides.
template <class Void>
BasicTensorView<Void> split_heads(BasicTensorView<Void> x, std::int64_t heads, std::int64_t head_dim) {
  return x.unflatten(2, {heads, head_dim}).transpose(1, 2);
}

// Attention's views of what the projections wrote.
struct Heads {
  ConstTensorView q, k, v, context;
};

Heads heads_of(const Activations& a, const MultiHeadAttentionConfig& config) {
  const auto split = [&](const Tensor& x, std::int64_t heads) { return split_heads(x.view(), heads, config.head_dim); };
  return {split(a.q, config.heads), split(a.k, config.kv_heads), split(a.v, config.kv_heads),
          split(a.context, config.heads)};
}

// Everything but the last projection. Options and outputs are checked before anything is computed, which is why memory
// for the projections comes first.
Activations attend(std::string_view operation, const MultiHeadAttentionConfig& config, const Parameters& parameters,
                   const LayerInputs& inputs, const AttentionOptions& options, const AttentionOutputs& outputs,
                   Stages& stages) {
  Activations result;
  result.q = projected_like(parameters, "q", inputs.queries);
  result.k = projected_like(parameters, "k", inputs.keys);
  result.v = projected_like(parameters, "v", inputs.values);
  result.context = Tensor::uninitialized(result.q.sizes(), config.dtype);
  const Heads heads = heads_of(result, config);
  const TensorView context = split_heads(result.context.view(), config.heads, config.head_dim);
  forward_problem({.operation = operation, .query = heads.q, .key = heads.k, .value = heads.v, .options = options},
                  context, outputs);

  const StageFlops flops(config, inputs);
  project(options.engine, parameters, "q", inputs.queries, result.q, stages.next_linear(flops.query));
  project(options.engine, parameters, "k", inputs.keys, result.k, stages.next_linear(flops.key));
  project(options.engine, parameters, "v", inputs.values, result.v, stages.next_linear(flops.value));
  AttentionOptions staged = options;
  staged.progress = stages.next(flops.attention);
  attention(heads.q, heads.k, heads.v, context, staged, outputs);
  return result;
}

// y = context W_o + b_o, in the rank of the caller's queries.
Tensor output_of(Engine engine, const MultiHeadAttentionConfig& config, const Parameters& parameters,
                 const LayerInputs& inputs, const Tensor& context, Stages& stages) {
  Tensor y = Tensor::uninitialized(callers_sizes(inputs, inputs.queries.size(1), config.model_dim), config.dtype);
  project(engine, parameters, "o", context, with_batch(y.view(), inputs.batched),
          stages.next_linear(StageFlops(config, inputs).output));
  return y;
}

Stages forward_stages(std::string_view operation, const MultiHeadAttentionConfig& config, const LayerInputs& inputs,
                      const Progress& progress) {
  const StageFlops flops(config, inputs);
  return {operation, progress, flops.projections() + flops.attention};
}

// The gradients of one projection: of its parameters into `gradients`, of its input into dx.
void project_backward(Engine engine, const Parameters& parameters, const std::string& letter, ConstTensorView dy,
                      ConstTensorView x, TensorView dx, Gradients& gradients, const LinearReports& reports) {
  const auto [weight, bias] = projection(parameters, letter);
  LinearGradients wanted;
  wanted.dx = dx;
  wanted.dweight = gradients.parameters["W_" + letter] = Tensor::uninitialized(weight.sizes(), weight.dtype());
  if (bias) {
    wanted.dbias = gradients.parameters["b_" + letter] = Tensor::uninitialized(bias->sizes(), bias->dtype());
  }
  linear_backward(engine, dy, x, weight, wanted, reports);
}

}  // namespace

MultiHeadAttention::MultiHeadAttention(const MultiHeadAttentionConfig& config) : state_(std::make_unique<State>()) {
  state_->config = resolved(config);
  for (const ParameterSpec& spec : parameter_specs(state_->config)) {
    try {
      state_->parameters.emplace_back(spec.name, draw_parameter(spec, state_->config));
    } catch (const OutOfMemory&) {
      throw OutOfMemory(text("MultiHeadAttention: could not allocate ", spec.name, " of shape ", spec.sizes, " ",
                             state_->config.dtype));
    }
  }
}

MultiHeadAttention::MultiHeadAttention(std::unique_ptr<State> state) : state_(std::move(state)) {}
MultiHeadAttention::~MultiHeadAttention() = default;
MultiHeadAttention::MultiHeadAttention(MultiHeadAttention&&) noexcept = default;
MultiHeadAttention& MultiHeadAttention::operator=(MultiHeadAttention&&) noexcept = default;

const MultiHeadAttentionConfig& MultiHeadAttention::config() const { return state_->config; }

std::vector<std::pair<std::string, TensorView>> MultiHeadAttention::parameters() {
  std::vector<std::pair<std::string, TensorView>> views;
  for (auto& [name, tensor] : state_->parameters) {
    views.emplace_back(name, tensor.view());
  }
  return views;
}

std::vector<std::pair<std::string, ConstTensorView>> MultiHeadAttention::parameters() const {
  return {state_->parameters.begin(), state_->parameters.end()};
}

TensorView MultiHeadAttention::parameter(const std::string& name) { return required(state_->parameters, name); }

ConstTensorView MultiHeadAttention::parameter(const std::string& name) const {
  return required(std::as_const(state_->parameters), name);
}

Tensor MultiHeadAttention::infer(ConstTensorView queries, ConstTensorView keys, ConstTensorView values,
                                 const AttentionOptions& options, const AttentionOutputs& outputs) const {
  constexpr std::string_view operation = "MultiHeadAttention::infer";
  const auto& [config, parameters, remembered] = *state_;
  const LayerInputs inputs = checked_inputs(operation, config, queries, keys, values);
  const AttentionOutputs asked = checked_outputs(operation, *this, inputs, outputs);
  Stages stages = forward_stages(operation, config, inputs, options.progress);
  const Activations activations =
      attend(operation, config, parameters, inputs, with_batch(options, inputs.batched), asked, stages);
  return output_of(options.engine, config, parameters, inputs, activations.context, stages);
}

Tensor MultiHeadAttention::forward(ConstTensorView queries, ConstTensorView keys, ConstTensorView values,
                                   const AttentionOptions& options, const AttentionOutputs& outputs) {
  constexpr std::string_view operation = "MultiHeadAttention::forward";
  const auto& [config, parameters, remembered] = *state_;
  state_->remembered.reset();
  Remembered pass;
  pass.inputs = checked_inputs(operation, config, queries, keys, values);
  pass.options = with_batch(options, pass.inputs.batched);
  AttentionOutputs asked = checked_outputs(operation, *this, pass.inputs, outputs);
  // Backward needs the lse whether or not the caller does; a caller's own view is filled, then copied.
  pass.lse = Tensor::uninitialized({pass.inputs.queries.size(0), config.heads, pass.inputs.queries.size(1)},
                                   config.dtype == DType::f64 ? DType::f64 : DType::f32);
  const bool callers_lse = asked.lse.has_value();
  if (!callers_lse) {
    asked.lse = pass.lse;
  }
  Stages stages = forward_stages(operation, config, pass.inputs, options.progress);
  pass.activations = attend(operation, config, parameters, pass.inputs, pass.options, asked, stages);
  if (callers_lse) {
    copy(*asked.lse, pass.lse);
  }
  Tensor y = output_of(options.engine, config, parameters, pass.inputs, pass.activations.context, stages);
  state_->remembered = std::move(pass);
  return y;
}

Gradients MultiHeadAttention::backward(ConstTensorView grad_output, const OptionGradients& option_gradients) {
  if (!state_->remembered) {
    throw InvalidArgument("MultiHeadAttention::backward: expected a forward before it, found none");
  }
  const auto& [inputs, options, activations, lse] = *state_->remembered;
  const MultiHeadAttentionConfig& config = state_->config;
  const Parameters& parameters = state_->parameters;
  const ConstTensorView dy = checked_grad_output(config, inputs, grad_output);
  check_option_gradients(*this, inputs, option_gradients);

  const StageFlops flops(config, inputs);
  Stages stages("MultiHeadAttention::backward", options.progress, 2 * flops.projections() + 2.5 * flops.attention);
  Gradients gradients;
  // dcontext = dy W_o^T  [B,Sq,H*hd]
  Tensor dcontext = Tensor::uninitialized(activations.context.sizes(), config.dtype);
  project_backward(options.engine, parameters, "o", dy, activations.context, dcontext, gradients,
                   stages.next_linear(2 * flops.output));

  const Heads heads = heads_of(activations, config);
  Tensor dq = Tensor::uninitialized(activations.q.sizes(), config.dtype);
  Tensor dk = Tensor::uninitialized(activations.k.sizes(), config.dtype);
  Tensor dv = Tensor::uninitialized(activations.v.sizes(), config.dtype);
  AttentionOptions staged = options;
  staged.progress = stages.next(2.5 * flops.attention);
  attention_backward(split_heads(std::as_const(dcontext).view(), config.heads, config.head_dim), heads.q, heads.k,
                     heads.v, heads.context, lse,
                     {.dq = split_heads(dq.view(), config.heads, config.head_dim),
                      .dk = split_heads(dk.view(), config.kv_heads, config.head_dim),
                      .dv = split_heads(dv.view(), config.kv_heads, config.head_dim),
                      .dbias = option_gradients.bias,
                      .dsinks = option_gradients.sinks},
                     staged);

  const auto through = [&](const char* letter, const Tensor& dprojected, ConstTensorView x, double projection_flops) {
    Tensor dx = Tensor::uninitialized(callers_sizes(inputs, x.size(1), x.size(2)), config.dtype);
    project_backward(options.engine, parameters, letter, dprojected, x, with_batch(dx.view(), inputs.batched),
                     gradients, stages.next_linear(2 * projection_flops));
    return dx;
  };
  gradients.queries = through("q", dq, inputs.queries, flops.query);
  gradients.keys = through("k", dk, inputs.keys, flops.key);
  gradients.values = through("v", dv, inputs.values, flops.value);
  return gradients;
}

}  // namespace headway
