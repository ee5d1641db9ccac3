// explain(): the plan of a call, without the call.
#include "core/engine.h"
#include "core/out_of_memory.h"
#include "core/plan.h"
#include "core/validate.h"

namespace headway {

Plan explain(ConstTensorView query, ConstTensorView key, ConstTensorView value, const AttentionOptions& options,
             const ExplainRequest& request) try {
  Problem problem =
      inputs_problem({.operation = "explain", .query = query, .key = key, .value = value, .options = options},
                     request.backward ? Pass::backward : Pass::forward);
  problem.wants_lse = request.lse;
  problem.wants_weights = request.weights;
  Plan plan = choose(problem).plan;
  describe_problem(problem, plan);
  plan.operation = request.backward ? "attention_backward" : "attention";
  return plan;
} catch (...) {
  throw_own_error("explain");
}

}  // namespace headway
