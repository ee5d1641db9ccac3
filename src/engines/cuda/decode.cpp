#include "engines/cuda/decode.h"

#include <algorithm>

#include "engines/cuda/hopper_forward.h"
#include "engines/cuda/kernels/decode_kernels.h"
#include "engines/cuda/problem_arguments.h"
#include "engines/cuda/tensor_map.h"

namespace headway::cuda {
namespace {

// A split of this many keys does not depend on what else is in the batch.
constexpr std::int64_t invariant_split = 1024;

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

std::int64_t splits_of(const Problem& problem) {
  if (problem.batch_invariant) {
    return std::max<std::int64_t>(1, (problem.key_len + invariant_split - 1) / invariant_split);
  }
  const std::int64_t heads = problem.batch * problem.kv_heads;
  const std::int64_t tiles = std::max<std::int64_t>(1, (problem.key_len + decode_keys - 1) / decode_keys);
  const std::int64_t multiprocessors = device_of(problem).multiprocessors;
  // One block keeps a multiprocessor's share of the memory busy; two are done sooner where there is little to read.
  constexpr std::int64_t little = 64;
  const bool two = std::max(problem.head_dim, problem.value_dim) <= 128 && heads * tiles < little * multiprocessors;
  return balanced_splits(heads, tiles, (two ? 2 : 1) * multiprocessors);
}

// Whether the copy engine can read keys and values.
bool reads_boxes(const Problem& problem) {
  return device_of(problem).major == 9 && problem.head_dim > 0 && problem.value_dim > 0 && problem.key_len > 0 &&
         problem.key.size(2) <= longest_axis && problem.batch * problem.heads <= longest_axis &&
         !map_refusal("key", problem.key) && !map_refusal("value", problem.value);
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
  return {Workspace::rounded(rows * static_cast<std::size_t>(sum_width(problem.value_dim)) * sizeof(float)),
          Workspace::rounded(rows * 2 * sizeof(float))};
}

}  // namespace

bool is_decoding(const Problem& problem) {
  const std::int64_t group = problem.kv_heads > 0 ? problem.heads / problem.kv_heads : 0;
  const bool few_rows = group > 0 && problem.query_len > 0 && problem.query_len <= decode_rows / group;
  // The longest sequence of a pack depends on the others.
  const bool fixed = !(problem.batch_invariant && problem.packed());
  return fits_tensor_cores(problem) && few_rows && fixed && !problem.mask && !problem.bias && !problem.alibi_slopes &&
         !problem.dropout.active();
}

Launch choose_decode(const Problem& problem, const ForwardArguments& arguments) {
  const std::int64_t splits = splits_of(problem);
  return reads_boxes(problem) ? hopper_decode_launch(arguments, problem.dtype(), splits)
                              : decode_launch(arguments, problem.dtype(), splits);
}

std::size_t decode_bytes(const Problem& problem, const Launch& launch) {
  const SplitBytes split = split_bytes(problem, launch);
  return split.sums + split.statistics;
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
  if (reads_boxes(problem)) {
    all.key_map = stream_map(problem.key, static_cast<int>(decode_keys), problem.operation);
    all.value_map = stream_map(problem.value, static_cast<int>(decode_keys), problem.operation);
    all.key_steps = steps_of(problem.key);
    all.value_steps = steps_of(problem.value);
  }
  return launch_decode(launch, all, problem.dtype(), device_of(problem).major >= 9,
                       static_cast<cudaStream_t>(problem.stream));
}

}  // namespace headway::cuda
