#include "engines/cuda/forward.h"

#include "core/text.h"
#include "engines/cuda/decode.h"
#include "engines/cuda/hopper_forward.h"
#include "engines/cuda/plan_text.h"
#include "engines/cuda/problem_arguments.h"
#include "engines/cuda/scores.h"

namespace headway::cuda {
namespace {

// A plan that is only explained has no output yet: it will have one that suits.
bool takes_hopper(const Problem& problem, const TensorView* out) {
  return !is_decoding(problem) && !hopper_refusal(problem) && (out == nullptr || !hopper_refusal(*out));
}

// Whether a running sum over the keys could drift, or avoiding it costs nothing. An invariant call has one kernel for
// all lengths: those of a pack depend on the others.
bool needs_compensation(const Problem& problem) {
  constexpr std::int64_t few_queries = 64;
  const std::int64_t many_keys = problem.dtype() == DType::f64 ? 1024 : 16384;
  return !is_half_type(problem.dtype()) &&
         (problem.key_len > many_keys || problem.query_len <= few_queries || problem.batch_invariant);
}

Launch choose_launch(const Problem& problem, const ForwardArguments& arguments, const TensorView* out) {
  if (is_decoding(problem)) {
    return choose_decode(problem, arguments);
  }
  if (takes_hopper(problem, out)) {
    return hopper_launch(problem);
  }
  if (fits_tensor_cores(problem)) {
    return mma_forward_launch(arguments, problem.dtype());
  }
  return needs_compensation(problem) ? simt_compensated_launch(arguments, problem.dtype())
                                     : simt_forward_launch(arguments, problem.dtype());
}

std::size_t workspace_bytes(const Problem& problem, const Launch& launch, const TensorView* out) {
  return lengths_bytes(problem) + (is_decoding(problem) ? decode_bytes(problem, launch) : 0) +
         (takes_hopper(problem, out) ? hopper_bytes(problem) : 0);
}

}  // namespace

void describe_forward(const Problem& problem, Plan& plan) {
  ForwardArguments arguments{};
  static_cast<Arguments&>(arguments) = arguments_of(problem);
  const Launch launch = choose_launch(problem, arguments, nullptr);
  describe_launch(launch, plan);
  plan.scratch_bytes = static_cast<double>(workspace_bytes(problem, launch, nullptr));
}

void forward(const ForwardProblem& problem) {
  ForwardArguments arguments{};
  static_cast<Arguments&>(arguments) = arguments_of(problem);
  arguments.out = rows_of(problem.out);
  if (problem.lse) {
    arguments.lse = row_values_of(*problem.lse);
  }
  const Launch launch = choose_launch(problem, arguments, &problem.out);
  if (launch.tasks == 0) {
    return;
  }
  auto* stream = static_cast<cudaStream_t>(problem.stream);
  Workspace workspace(workspace_bytes(problem, launch, &problem.out), problem.query.device().index, stream,
                      problem.operation);
  place_lengths(problem, arguments, workspace, stream);
  allow_shared(launch.kernel, launch.shared_bytes, problem.operation);
  const cudaError_t result = is_decoding(problem)                  ? queue_decode(problem, launch, arguments, workspace)
                             : takes_hopper(problem, &problem.out) ? queue_hopper(problem, launch, arguments, workspace)
                                                                   : launch_forward(launch, arguments, stream);
  check(result, problem.operation, text("launching ", launch.name));
  if (problem.weights) {
    queue_scores(problem, arguments, *problem.weights, headway::Stage::weights);
  }
}

}  // namespace headway::cuda
