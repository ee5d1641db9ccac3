// The layer: three projections, attention over their output in place, one projection back; and the same way backward.
#include <string_view>
#include <utility>

#include "core/engine.h"
#include "core/linear.h"
#include "core/out_of_memory.h"
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

// Which projections are one product, by their letters: those of one input whose parameters lie side by side.
std::vector<std::string> product_groups(const Parameters& parameters, const LayerInputs& inputs) {
  const auto same = [](const ConstTensorView& a, const ConstTensorView& b) {
    return a.data() == b.data() && a.sizes() == b.sizes() && a.strides() == b.strides();
  };
  if (same(inputs.keys, inputs.values)) {
    if (same(inputs.queries, inputs.keys) && parameters.joined("qkv")) {
      return {"qkv"};
    }
    if (parameters.joined("kv")) {
      return {"q", "kv"};
    }
  }
  return {"q", "k", "v"};
}

const ConstTensorView& input_of(const LayerInputs& inputs, char letter) {
  return letter == 'q' ? inputs.queries : letter == 'k' ? inputs.keys : inputs.values;
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
  const auto split = [&](ConstTensorView x, std::int64_t heads) { return split_heads(x, heads, config.head_dim); };
  return {split(a.q, config.heads), split(a.k, config.kv_heads), split(a.v, config.kv_heads),
          split(a.context, config.heads)};
}

// Everything but the last projection. Options and outputs are checked, and an engine is chosen, before anything is
// computed, which is why memory for the projections comes first.
Activations attend(std::string_view operation, const MultiHeadAttentionConfig& config, const Parameters& parameters,
                   const LayerInputs& inputs, const AttentionOptions& options, const AttentionOutputs& outputs,
                   Stages& stages) {
  Activations result;
  const std::vector<std::string> groups = product_groups(parameters, inputs);
  for (const std::string& letters : groups) {
    const ConstTensorView& x = input_of(inputs, letters[0]);
    const std::int64_t width = parameters.joined(letters)->weight.size(1);
    result.memory.push_back(
        Tensor::uninitialized({x.size(0), x.size(1), width}, x.dtype(), x.device(), options.stream));
    std::int64_t at = 0;
    for (const char letter : letters) {
      const std::int64_t own = parameters.projection(letter).weight.size(1);
      (letter == 'q'   ? result.q
       : letter == 'k' ? result.k
                       : result.v) = result.memory.back().view().slice(2, at, at + own);
      at += own;
    }
  }
  result.context = Tensor::uninitialized(result.q.sizes(), config.dtype, inputs.queries.device(), options.stream);
  const Heads heads = heads_of(result, config);
  const TensorView context = split_heads(result.context.view(), config.heads, config.head_dim);
  ForwardProblem problem =
      forward_problem({.operation = operation, .query = heads.q, .key = heads.k, .value = heads.v, .options = options},
                      context, outputs);
  const Choice choice = choose(problem);

  const StageFlops flops(config, inputs);
  for (std::size_t n = 0; n < groups.size(); ++n) {
    const auto [weight, bias] = *parameters.joined(groups[n]);
    linear(options.engine, input_of(inputs, groups[n][0]), weight, bias, result.memory[n],
           stages.next_linear(flops.of(groups[n])));
  }
  problem.progress = stages.next(flops.attention);
  run(problem, choice, &EngineBase::forward);
  return result;
}

// y = context W_o + b_o, in the rank of the caller's queries.
Tensor output_of(const AttentionOptions& options, const MultiHeadAttentionConfig& config, const Parameters& parameters,
                 const LayerInputs& inputs, const Tensor& context, Stages& stages) {
  Tensor y = Tensor::uninitialized(callers_sizes(inputs, inputs.queries.size(1), config.model_dim), config.dtype,
                                   context.device(), options.stream);
  const auto [weight, bias] = parameters.projection('o');
  linear(options.engine, context, weight, bias, with_batch(y.view(), inputs.batched),
         stages.next_linear(StageFlops(config, inputs).output));
  return y;
}

Stages forward_stages(std::string_view operation, const MultiHeadAttentionConfig& config, const LayerInputs& inputs,
                      const AttentionOptions& options) {
  const StageFlops flops(config, inputs);
  return {operation, options, flops.projections() + flops.attention};
}

// The gradients of one projection: of its parameters into `gradients`, of its input into dx.
void project_backward(const AttentionOptions& options, const Parameters& parameters, char letter, ConstTensorView dy,
                      ConstTensorView x, TensorView dx, Gradients& gradients, const LinearCall& call) {
  const auto [weight, bias] = parameters.projection(letter);
  const auto memory_like = [&](const ConstTensorView& view) {
    return Tensor::uninitialized(view.sizes(), view.dtype(), view.device(), options.stream);
  };
  LinearGradients wanted;
  wanted.dx = dx;
  wanted.dweight = gradients.parameters[std::string("W_") + letter] = memory_like(weight);
  if (bias) {
    wanted.dbias = gradients.parameters[std::string("b_") + letter] = memory_like(*bias);
  }
  linear_backward(options.engine, dy, x, weight, wanted, call);
}

}  // namespace

MultiHeadAttention::MultiHeadAttention(const MultiHeadAttentionConfig& config) try : state_(std::make_unique<State>()) {
  state_->config = resolved(config);
  for (const ParameterSpec& spec : parameter_specs(state_->config)) {
    try {
      state_->parameters.add(spec.name, draw_parameter(spec, state_->config));
    } catch (const OutOfMemory&) {
      throw OutOfMemory(text("MultiHeadAttention: could not allocate ", spec.name, " of shape ", spec.sizes, " ",
                             state_->config.dtype));
    }
  }
} catch (...) {
  throw_own_error("MultiHeadAttention");
}

MultiHeadAttention::MultiHeadAttention(Loaded, std::unique_ptr<State> state) : state_(std::move(state)) {}
MultiHeadAttention::~MultiHeadAttention() = default;
MultiHeadAttention::MultiHeadAttention(MultiHeadAttention&&) noexcept = default;
MultiHeadAttention& MultiHeadAttention::operator=(MultiHeadAttention&&) noexcept = default;

MultiHeadAttention::State& MultiHeadAttention::state() const {
  if (!state_) {
    throw InvalidArgument("MultiHeadAttention: expected a layer with parameters, found one that was moved from");
  }
  return *state_;
}

const MultiHeadAttentionConfig& MultiHeadAttention::config() const { return state().config; }

Device MultiHeadAttention::device() const { return state().device; }

void MultiHeadAttention::to(Device device, void* stream) try {
  state().remembered.reset();
  if (device != state().device) {
    state().parameters = state().parameters.copied_to(device, stream);
    state().device = device;
  }
} catch (...) {
  throw_own_error("MultiHeadAttention::to");
}

std::vector<std::pair<std::string, TensorView>> MultiHeadAttention::parameters() try {
  return state().parameters.views();
} catch (...) {
  throw_own_error("MultiHeadAttention::parameters");
}

std::vector<std::pair<std::string, ConstTensorView>> MultiHeadAttention::parameters() const try {
  const auto& views = state().parameters.views();
  return {views.begin(), views.end()};
} catch (...) {
  throw_own_error("MultiHeadAttention::parameters");
}

TensorView MultiHeadAttention::parameter(const std::string& name) { return state().parameters.required(name); }

ConstTensorView MultiHeadAttention::parameter(const std::string& name) const {
  return state().parameters.required(name);
}

Tensor MultiHeadAttention::infer(ConstTensorView queries, ConstTensorView keys, ConstTensorView values,
                                 const AttentionOptions& options, const AttentionOutputs& outputs) const try {
  constexpr std::string_view operation = "MultiHeadAttention::infer";
  const auto& [config, device, parameters, remembered] = state();
  const LayerInputs inputs = checked_inputs(operation, *this, queries, keys, values);
  const AttentionOutputs asked = checked_outputs(operation, *this, inputs, outputs);
  Stages stages = forward_stages(operation, config, inputs, options);
  const Activations activations =
      attend(operation, config, parameters, inputs, with_batch(options, inputs.batched), asked, stages);
  return output_of(options, config, parameters, inputs, activations.context, stages);
} catch (...) {
  throw_own_error("MultiHeadAttention::infer");
}

Tensor MultiHeadAttention::forward(ConstTensorView queries, ConstTensorView keys, ConstTensorView values,
                                   const AttentionOptions& options, const AttentionOutputs& outputs) try {
  constexpr std::string_view operation = "MultiHeadAttention::forward";
  const auto& [config, device, parameters, remembered] = state();
  state().remembered.reset();
  Remembered pass;
  pass.inputs = checked_inputs(operation, *this, queries, keys, values);
  pass.options = with_batch(options, pass.inputs.batched);
  AttentionOutputs asked = checked_outputs(operation, *this, pass.inputs, outputs);
  // Backward needs the lse whether or not the caller does; a caller's own view is filled, then copied.
  pass.lse = Tensor::uninitialized({pass.inputs.queries.size(0), config.heads, pass.inputs.queries.size(1)},
                                   config.dtype == DType::f64 ? DType::f64 : DType::f32, device, options.stream);
  const bool callers_lse = asked.lse.has_value();
  if (!callers_lse) {
    asked.lse = pass.lse;
  }
  Stages stages = forward_stages(operation, config, pass.inputs, options);
  pass.activations = attend(operation, config, parameters, pass.inputs, pass.options, asked, stages);
  if (callers_lse) {
    copy(*asked.lse, pass.lse, options.stream);
  }
  Tensor y = output_of(options, config, parameters, pass.inputs, pass.activations.context, stages);
  state().remembered = std::move(pass);
  return y;
} catch (...) {
  throw_own_error("MultiHeadAttention::forward");
}

Gradients MultiHeadAttention::backward(ConstTensorView grad_output, const OptionGradients& option_gradients) try {
  constexpr std::string_view operation = "MultiHeadAttention::backward";
  if (!state().remembered) {
    throw InvalidArgument(text(operation, ": expected a forward before it, found none"));
  }
  const LayerInputs& inputs = state().remembered->inputs;
  const AttentionOptions& options = state().remembered->options;
  const Activations& activations = state().remembered->activations;
  const MultiHeadAttentionConfig& config = state().config;
  const Parameters& parameters = state().parameters;
  const ConstTensorView dy = checked_grad_output(*this, inputs, grad_output);
  check_option_gradients(*this, inputs, option_gradients);

  const StageFlops flops(config, inputs);
  Stages stages(operation, options, 2 * flops.projections() + 2.5 * flops.attention);
  Gradients gradients;
  // dcontext = dy W_o^T  [B,Sq,H*hd]
  const auto memory = [&](const Dims& sizes) {
    return Tensor::uninitialized(sizes, config.dtype, state().device, options.stream);
  };
  Tensor dcontext = memory(activations.context.sizes());
  const Heads heads = heads_of(activations, config);
  Tensor dq = memory(activations.q.sizes());
  Tensor dk = memory(activations.k.sizes());
  Tensor dv = memory(activations.v.sizes());
  // As in attend(): what attention would refuse is refused before anything is computed.
  BackwardProblem problem =
      backward_problem({.operation = operation, .query = heads.q, .key = heads.k, .value = heads.v, .options = options},
                       split_heads(std::as_const(dcontext).view(), config.heads, config.head_dim), heads.context,
                       state().remembered->lse,
                       {.dq = split_heads(dq.view(), config.heads, config.head_dim),
                        .dk = split_heads(dk.view(), config.kv_heads, config.head_dim),
                        .dv = split_heads(dv.view(), config.kv_heads, config.head_dim),
                        .dbias = option_gradients.bias,
                        .dsinks = option_gradients.sinks});
  const Choice choice = choose(problem);
  project_backward(options, parameters, 'o', dy, activations.context, dcontext, gradients,
                   stages.next_linear(2 * flops.output));
  problem.progress = stages.next(2.5 * flops.attention);
  run(problem, choice, &EngineBase::backward);

  const auto through = [&](char letter, const Tensor& dprojected, ConstTensorView x, double projection_flops) {
    Tensor dx = memory(callers_sizes(inputs, x.size(1), x.size(2)));
    project_backward(options, parameters, letter, dprojected, x, with_batch(dx.view(), inputs.batched), gradients,
                     stages.next_linear(2 * projection_flops));
    return dx;
  };
  gradients.queries = through('q', dq, inputs.queries, flops.query);
  gradients.keys = through('k', dk, inputs.keys, flops.key);
  gradients.values = through('v', dv, inputs.values, flops.value);
  return gradients;
} catch (...) {
  throw_own_error("MultiHeadAttention::backward");
}

}  // namespace headway
