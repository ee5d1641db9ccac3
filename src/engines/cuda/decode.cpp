#include "engines/cuda/decode.h"

#include <algorithm>

#include "engines/cuda/hopper_forward.h"
#include "engines/cuda/kernels/decode_kernels.h"
#include "engines/cuda/problem_arguments.h"
#include "engines/cuda/splits.h"
#include "engines/cuda/tensor_map.h"

namespace headway::cuda {
namespace {

// A split of this many keys does not depend on what else is in the batch.
constexpr std::int64_t invariant_split = 1024;

// Query rows of all heads that share a kv head, in tiles.
std::int64_t row_tiles(const Problem& problem) {
  const std::int64_t rows = problem.query_len * (problem.heads / problem.kv_heads);
  return (rows + decode_rows - 1) / decode_rows;
}

std::int64_t splits_of(const Problem& problem) {
  if (problem.batch_invariant) {
    return std::max<std::int64_t>(1, (problem.key_len + invariant_split - 1) / invariant_split);
  }
  const std::int64_t heads = problem.batch * problem.kv_heads * row_tiles(problem);
  const std::int64_t tiles = std::max<std::int64_t>(1, (problem.key_len + decode_keys - 1) / decode_keys);
  const std::int64_t multiprocessors = device_of(problem).multiprocessors;
  // One block keeps a multiprocessor's share of the memory busy; two are done sooner where there is little to read.
  constexpr std::int64_t little = 64;
  const bool two = std::max(problem.head_dim, problem.value_dim) <= 128 && heads * tiles < little * multiprocessors;
  constexpr std::int64_t fewest_tiles = 2, most = 256;
  return balanced_splits(heads, tiles, std::min(tiles / fewest_tiles, most), (two ? 2 : 1) * multiprocessors);
}

// Whether the copy engine can read keys and values.
bool reads_boxes(const Problem& problem) {
  return device_of(problem).major == 9 && problem.head_dim > 0 && problem.value_dim > 0 && problem.key_len > 0 &&
         problem.key.size(2) <= longest_axis && problem.batch * problem.heads <= longest_axis &&
         !map_refusal("key", problem.key) && !map_refusal("value", problem.value);
}

SplitShape split_shape(const Problem& problem, const Launch& launch) {
  return {problem.batch * problem.kv_heads, launch.splits, launch.row_tiles * decode_rows, problem.value_dim};
}

// Whether tiles of 16 rows serve: one, or for few queries of large groups of heads up to four, which read keys no
// oftener than the heads would by themselves.
bool has_few_rows(const Problem& problem) {
  const std::int64_t group = problem.kv_heads > 0 ? problem.heads / problem.kv_heads : 0;
  if (group == 0 || problem.query_len == 0 || problem.query_len > decode_rows) {
    return false;
  }
  constexpr std::int64_t most_tiles = 4;
  return row_tiles(problem) <= std::max<std::int64_t>(1, std::min(most_tiles, group / 2));
}

}  // namespace

bool is_decoding(const Problem& problem) {
  // The longest sequence of a pack depends on the others.
  const bool fixed = !(problem.batch_invariant && problem.packed());
  return fits_tensor_cores(problem) && has_few_rows(problem) && fixed && !problem.mask && !problem.bias &&
         !problem.alibi_slopes && !problem.dropout.active();
}

Launch choose_decode(const Problem& problem, const ForwardArguments& arguments) {
  const std::int64_t splits = splits_of(problem);
  return reads_boxes(problem) ? hopper_decode_launch(arguments, problem.dtype(), splits)
                              : decode_launch(arguments, problem.dtype(), splits);
}

std::size_t decode_bytes(const Problem& problem, const Launch& launch) { return split_shape(problem, launch).bytes(); }

cudaError_t queue_decode(const ForwardProblem& problem, const Launch& launch, const ForwardArguments& arguments,
                         Workspace& workspace) {
  DecodeArguments all{};
  static_cast<ForwardArguments&>(all) = arguments;
  all.split = place_splits(split_shape(problem, launch), 1.0f, workspace);
  all.split_keys = problem.batch_invariant ? invariant_split : 0;
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
