// explain(): the plan of a call, without the call.
#include "core/engine.h"
#include "core/out_of_memory.h"
#include "core/plan.h"
#include "core/validate.h"

namespace headway {

namespace {

Plan plan_of(const Call& call, const ExplainRequest& request, const char* forward, const char* backward) {
  Problem problem = inputs_problem(call, request.backward ? Pass::backward : Pass::forward);
  problem.wants_lse = request.lse;
  problem.wants_weights = request.weights;
  const Choice choice = choose(problem);
  Plan plan = choice.plan;
  describe_problem(problem, plan);
  choice.engine->add_passed_kernels(problem, plan);
  plan.operation = request.backward ? backward : forward;
  return plan;
}

}  // namespace

Plan explain(ConstTensorView query, ConstTensorView key, ConstTensorView value, const AttentionOptions& options,
             const ExplainRequest& request) try {
  return plan_of({.operation = "explain", .query = query, .key = key, .value = value, .options = options}, request,
                 "attention", "attention_backward");
} catch (...) {
  throw_own_error("explain");
}

Plan explain_varlen(ConstTensorView query, ConstTensorView key, ConstTensorView value, ConstTensorView cu_seqlens_q,
                    ConstTensorView cu_seqlens_k, const AttentionOptions& options, const ExplainRequest& request) try {
  return plan_of({.operation = "explain_varlen",
                  .query = query,
                  .key = key,
                  .value = value,
                  .cu_seqlens_q = cu_seqlens_q,
                  .cu_seqlens_k = cu_seqlens_k,
                  .options = options},
                 request, "attention_varlen", "attention_varlen_backward");
} catch (...) {
  throw_own_error("explain_varlen");
}

}  // namespace headway
