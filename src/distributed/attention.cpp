// The public calls: agree with the other ranks on the schedule, and run it.
#include "core/engine.h"
#include "core/out_of_memory.h"
#include "distributed/agreed_call.h"
#include "distributed/gradient_sums.h"

namespace headway::distributed {

void attention(ConstTensorView query, ConstTensorView key, ConstTensorView value, TensorView out, Transport& transport,
               const Options& options, const AttentionOutputs& outputs) try {
  constexpr const char* operation = "distributed::attention";
  ForwardProblem problem;
  const auto checked = [&](const Call& call) {
    if (outputs.weights) {
      throw Unsupported(text(operation, ": weights are not stored over a split sequence"));
    }
    problem = forward_problem(call, out, {.lse = outputs.lse});
    return problem;
  };
  const AgreedCall call = agree({.operation = operation,
                                 .query = query,
                                 .key = key,
                                 .value = value,
                                 .transport = transport,
                                 .options = options,
                                 .checked = checked});
  std::optional<Tensor> own_lse;
  if (!problem.lse) {
    own_lse = Tensor::uninitialized({call.query.size(0), call.query.size(1), call.query.size(2)},
                                    problem.dtype() == DType::f64 ? DType::f64 : DType::f32);
    problem.lse = *own_lse;
  }
  const ForwardRun run{call.run(transport), problem.out, *problem.lse};
  switch (call.schedule.scheme) {
    case Scheme::heads:
    case Scheme::hybrid: forward_over_heads(run); break;
    case Scheme::pass_query: forward_over_queries(run); break;
    default: forward_over_keys(run);
  }
} catch (...) {
  throw_own_error("distributed::attention");
}

void attention_backward(ConstTensorView grad_out, ConstTensorView query, ConstTensorView key, ConstTensorView value,
                        ConstTensorView out, ConstTensorView lse, const AttentionGradients& gradients,
                        Transport& transport, const Options& options) try {
  constexpr const char* operation = "distributed::attention_backward";
  BackwardProblem problem;
  const auto checked = [&](const Call& call) {
    if (gradients.dbias && !options.attention.bias) {
      throw InvalidArgument(text(operation, ": dbias was asked for, but the call has no bias"));
    }
    AttentionGradients of_rows = gradients;
    of_rows.dbias.reset();  // its axes are checked with all keys
    problem = backward_problem(call, grad_out, out, lse, of_rows);
    return problem;
  };
  const AgreedCall call = agree({.operation = operation,
                                 .query = query,
                                 .key = key,
                                 .value = value,
                                 .transport = transport,
                                 .options = options,
                                 .backward = true,
                                 .gradients = gradients,
                                 .checked = checked});
  std::optional<Tensor> bias_sums;
  if (call.dbias) {
    bias_sums.emplace(call.dbias->sizes(), DType::f64);
  }
  const BackwardRun run{
      call.run(transport), problem.grad_out, problem.out, problem.lse,
      problem.dq,          problem.dk,       problem.dv,  bias_sums ? std::optional(bias_sums->view()) : std::nullopt};
  switch (call.schedule.scheme) {
    case Scheme::heads:
    case Scheme::hybrid: backward_over_heads(run); break;
    default: backward_over_keys(run);
  }
  if (call.dbias) {
    store_bias_gradient(transport, *bias_sums, call.bias_is_shared, *call.dbias);
  }
  if (problem.dsinks) {
    store_sink_gradient(run, *problem.sinks, *problem.dsinks);
  }
} catch (...) {
  throw_own_error("distributed::attention_backward");
}

}  // namespace headway::distributed
