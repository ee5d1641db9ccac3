#include "engines/cuda/forward.h"

#include <algorithm>

#include "core/text.h"
#include "engines/cuda/hopper_forward.h"
#include "engines/cuda/kernels/hopper_kernels.h"
#include "engines/cuda/kernels/kernels.h"
#include "engines/cuda/plan_text.h"
#include "engines/cuda/problem_arguments.h"
#include "engines/cuda/scores.h"

namespace headway::cuda {
namespace {

// ---- Decoding ----

// A split of this many keys does not depend on what else is in the batch.
constexpr std::int64_t invariant_split = 1024;

bool is_decoding(const Problem& problem) {
  const std::int64_t group = problem.kv_heads > 0 ? problem.heads / problem.kv_heads : 0;
  const bool few_rows = group > 0 && problem.query_len > 0 && problem.query_len <= decode_rows / group;
  // The longest sequence of a pack depends on the others.
  const bool fixed = !(problem.batch_invariant && problem.packed());
  return fits_tensor_cores(problem) && few_rows && fixed && !problem.mask && !problem.bias && !problem.alibi_slopes &&
         !problem.dropout.active();
}

// The smallest number of splits whose last wave of blocks is nearly as full as the best number's.
std::int64_t balanced_splits(std::int64_t heads, std::int64_t tiles, std::int64_t slots) {
  constexpr std::int64_t fewest_tiles = 2, most = 256;
  const std::int64_t limit = std::clamp<std::int64_t>(tiles / fewest_tiles, 1, most);
  const auto efficiency = [&](std::int64_t splits) {
    // Steps that the slowest slot takes, against what an even share would be.
    const std::int64_t waves = (heads * splits + slots - 1) / slots, steps = (tiles + splits - 1) / splits;
    return static_cast<double>(heads * tiles) / static_cast<double>(waves * steps * slots);
  };
  double best = 0;
  for (std::int64_t splits = 1; splits <= limit; ++splits) {
    best = std::max(best, efficiency(splits));
  }
  std::int64_t splits = 1;
  while (splits < limit && efficiency(splits) < 0.9 * best) {
    ++splits;
  }
  return splits;
}

std::int64_t decode_splits(const Problem& problem) {
  if (problem.batch_invariant) {
    return std::max<std::int64_t>(1, (problem.key_len + invariant_split - 1) / invariant_split);
  }
  const std::int64_t tiles = (problem.key_len + decode_keys - 1) / decode_keys;
  const int multiprocessors = device_properties(problem.query.device().index).multiprocessors;
  const std::int64_t blocks_each = std::max(problem.head_dim, problem.value_dim) <= 128 ? 2 : 1;
  return balanced_splits(problem.batch * problem.kv_heads, std::max<std::int64_t>(tiles, 1),
                         blocks_each * multiprocessors);
}

// ---- All kernels ----

// A plan that is only explained has no output yet: it will have one that suits.
bool takes_hopper(const Problem& problem, const TensorView* out) {
  return !is_decoding(problem) && !hopper_refusal(problem) && (out == nullptr || !hopper_refusal(*out));
}

Launch choose_launch(const Problem& problem, const ForwardArguments& arguments, const TensorView* out) {
  if (is_decoding(problem)) {
    const std::int64_t splits = decode_splits(problem);
    return decodes_on_hopper(problem) ? hopper_decode_launch(arguments, problem.dtype(), splits)
                                      : decode_launch(arguments, problem.dtype(), splits);
  }
  if (takes_hopper(problem, out)) {
    return hopper_launch(problem);
  }
  if (fits_tensor_cores(problem)) {
    return mma_forward_launch(arguments, problem.dtype());
  }
  return simt_forward_launch(arguments, problem.dtype());
}

// The sums and statistics of splits that wait to be merged.
struct SplitBytes {
  std::size_t sums = 0, statistics = 0;
};

SplitBytes split_bytes(const Problem& problem, const Launch& launch) {
  if (launch.splits == 1) {
    return {};
  }
  const auto rows = static_cast<std::size_t>(launch.tasks * decode_rows);
  return {Workspace::rounded(rows * static_cast<std::size_t>(problem.value_dim) * sizeof(float)),
          Workspace::rounded(rows * 2 * sizeof(float))};
}

std::size_t workspace_bytes(const Problem& problem, const Launch& launch, const TensorView* out) {
  const SplitBytes split = split_bytes(problem, launch);
  return lengths_bytes(problem) + split.sums + split.statistics +
         (takes_hopper(problem, out) ? hopper_bytes(problem) : 0);
}

cudaError_t queue_decode(const ForwardProblem& problem, const Launch& launch, const ForwardArguments& arguments,
                         Workspace& workspace) {
  DecodeArguments all{};
  static_cast<ForwardArguments&>(all) = arguments;
  const SplitBytes split = split_bytes(problem, launch);
  all.splits = launch.splits;
  all.split_keys = problem.batch_invariant ? invariant_split : 0;
  all.sums = static_cast<float*>(workspace.take(split.sums));
  all.statistics = static_cast<float*>(workspace.take(split.statistics));
  return decodes_on_hopper(problem)
             ? queue_hopper_decode(problem, launch, all)
             : launch_decode(launch, all, problem.dtype(), static_cast<cudaStream_t>(problem.stream));
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
