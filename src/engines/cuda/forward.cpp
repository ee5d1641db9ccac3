#include "engines/cuda/forward.h"

#include <cmath>

#include "core/text.h"
#include "engines/cuda/decode.h"
#include "engines/cuda/hopper_forward.h"
#include "engines/cuda/kernels/forward_kernels.h"
#include "engines/cuda/plan_text.h"
#include "engines/cuda/problem_arguments.h"
#include "engines/cuda/scores.h"

namespace headway::cuda {
namespace {

// What runs a call.
enum class Way : std::uint8_t { plain, decode, hopper, tiles };

// Whether products may overflow or vanish where scores are ordinary, whatever the inputs.
bool has_extreme_scale(const Problem& problem) {
  const double size = std::abs(problem.scale), limit = problem.dtype() == DType::f64 ? 1e150 : 1e20;
  return size > limit || size < 1 / limit;
}

// A plan that is only explained has no output yet: it will have one that suits.
Way way_of(const Problem& problem, const TensorView* out) {
  if (has_extreme_scale(problem)) {
    return Way::plain;
  }
  if (is_decoding(problem)) {
    return Way::decode;
  }
  return !hopper_refusal(problem) && (out == nullptr || !hopper_refusal(*out)) ? Way::hopper : Way::tiles;
}

// Whether a running sum over the keys could drift, or avoiding it costs nothing. An invariant call has one kernel for
// all lengths: those of a pack depend on the others.
bool needs_compensation(const Problem& problem) {
  constexpr std::int64_t few_queries = 64;
  const std::int64_t many_keys = problem.dtype() == DType::f64 ? 1024 : 16384;
  return !is_half_type(problem.dtype()) &&
         (problem.key_len > many_keys || problem.query_len <= few_queries || problem.batch_invariant);
}

Launch choose_launch(const Problem& problem, const ForwardArguments& arguments, Way way) {
  switch (way) {
    case Way::plain: return plain_forward_launch(arguments, problem.dtype());
    case Way::decode: return choose_decode(problem, arguments);
    case Way::hopper: return hopper_launch(problem);
    case Way::tiles: break;
  }
  if (fits_tensor_cores(problem)) {
    return mma_forward_launch(arguments, problem.dtype());
  }
  if (!needs_compensation(problem)) {
    return simt_forward_launch(arguments, problem.dtype());
  }
  return problem.dtype() == DType::f64 ? simt_compensated_f64_launch(arguments) : simt_compensated_launch(arguments);
}

std::size_t workspace_bytes(const Problem& problem, const Launch& launch, Way way) {
  return lengths_bytes(problem) + (way == Way::decode ? decode_bytes(problem, launch) : 0) +
         (way == Way::hopper ? hopper_bytes(problem) : 0);
}

}  // namespace

void describe_forward(const Problem& problem, Plan& plan) {
  ForwardArguments arguments{};
  static_cast<Arguments&>(arguments) = arguments_of(problem);
  const Way way = way_of(problem, nullptr);
  const Launch launch = choose_launch(problem, arguments, way);
  describe_launch(launch, plan);
  plan.scratch_bytes = static_cast<double>(workspace_bytes(problem, launch, way));
}

void forward(const ForwardProblem& problem) {
  ForwardArguments arguments{};
  static_cast<Arguments&>(arguments) = arguments_of(problem);
  arguments.out = rows_of(problem.out);
  if (problem.lse) {
    arguments.lse = row_values_of(*problem.lse);
  }
  const Way way = way_of(problem, &problem.out);
  const Launch launch = choose_launch(problem, arguments, way);
  if (launch.tasks == 0) {
    return;
  }
  auto* stream = static_cast<cudaStream_t>(problem.stream);
  Workspace workspace(workspace_bytes(problem, launch, way), problem.query.device().index, stream, problem.operation);
  place_lengths(problem, arguments, workspace, stream);
  allow_shared(launch.kernel, launch.shared_bytes, problem.operation);
  const cudaError_t result = way == Way::decode   ? queue_decode(problem, launch, arguments, workspace)
                             : way == Way::hopper ? queue_hopper(problem, launch, arguments, workspace)
                             : way == Way::plain  ? launch_plain_forward(launch, arguments, problem.dtype(), stream)
                                                  : launch_forward(launch, arguments, stream);
  check(result, problem.operation, text("launching ", launch.name));
  if (problem.weights) {
    queue_scores(problem, arguments, *problem.weights, headway::Stage::weights);
  }
}

}  // namespace headway::cuda
