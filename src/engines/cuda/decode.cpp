#include "engines/cuda/decode.h"

#include <algorithm>

#include "engines/cuda/hopper_forward.h"
#include "engines/cuda/kernels/decode_kernels.h"
#include "engines/cuda/kernels/paged_kernels.h"
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

std::int64_t key_tiles(const Problem& problem) {
  return std::max<std::int64_t>(1, (problem.key_len + decode_keys - 1) / decode_keys);
}

std::int64_t invariant_splits(const Problem& problem) {
  return std::max<std::int64_t>(1, (problem.key_len + invariant_split - 1) / invariant_split);
}

std::int64_t splits_of(const Problem& problem) {
  if (problem.batch_invariant) {
    return invariant_splits(problem);
  }
  const std::int64_t heads = problem.batch * problem.kv_heads * row_tiles(problem), tiles = key_tiles(problem);
  const std::int64_t multiprocessors = device_of(problem).multiprocessors;
  // One block keeps a multiprocessor's share of the memory busy; two are done sooner where there is little to read.
  constexpr std::int64_t little = 64;
  const bool two = std::max(problem.head_dim, problem.value_dim) <= 128 && heads * tiles < little * multiprocessors;
  constexpr std::int64_t fewest_tiles = 2, most = 256;
  const std::int64_t splits =
      balanced_splits(heads, tiles, std::min(tiles / fewest_tiles, most), (two ? 2 : 1) * multiprocessors);
  // What a block takes besides its tiles, and the merge, in times of a tile.
  constexpr std::int64_t block_cost = 1, merge_cost = 2;
  const auto cost = [&](std::int64_t count) {
    const std::int64_t waves =
        (heads * count + multiprocessors * (two ? 2 : 1) - 1) / (multiprocessors * (two ? 2 : 1));
    return waves * ((tiles + count - 1) / count + block_cost);
  };
  return cost(splits) + merge_cost < cost(1) ? splits : 1;
}

// On Hopper: into how many splits a call's keys go, and whether their blocks are clusters, which merge them and need
// neither workspace nor another kernel.
struct Splits {
  std::int64_t count = 1;
  bool cluster = false;
};

// How long a call takes, in microseconds, as measured on an H200: a block's tiles take their products, or what memory
// needs to bring them to all blocks of a multiprocessor. Clusters cannot have every last place.
double time_in_splits(const Problem& problem, Splits splits) {
  constexpr double start = 5.0, block = 1.0, merge_in_cluster = 0.6, merge_by_kernel = 4.5;
  constexpr double bytes_a_microsecond = 32e3;  // to one multiprocessor
  const std::int64_t heads = problem.batch * problem.kv_heads * row_tiles(problem), blocks = heads * splits.count;
  const std::int64_t multiprocessors = device_of(problem).multiprocessors;
  const std::int64_t width = std::max(problem.head_dim, problem.value_dim);
  const std::int64_t resident = width <= 192 ? 2 : 1;
  const std::int64_t places = resident * multiprocessors * (splits.cluster ? 7 : 8) / 8;
  const std::int64_t together = std::min(resident, (blocks + multiprocessors - 1) / multiprocessors);
  const double products = width <= 192 ? 0.45 + 0.004 * static_cast<double>(width) : 2.5;
  const double bytes = static_cast<double>(2 * decode_keys * (problem.head_dim + problem.value_dim));
  const double tile = std::max(products, static_cast<double>(together) * bytes / bytes_a_microsecond);
  const auto waves = static_cast<double>((blocks + places - 1) / places);
  const auto tiles = static_cast<double>((key_tiles(problem) + splits.count - 1) / splits.count);
  return start + waves * (block + tiles * tile) +
         (splits.count == 1 ? 0.0
          : splits.cluster  ? merge_in_cluster
                            : merge_by_kernel);
}

Splits hopper_splits_of(const Problem& problem) {
  if (problem.batch_invariant) {
    return {invariant_splits(problem)};
  }
  Splits best;
  double least = time_in_splits(problem, best);
  const std::int64_t tiles = key_tiles(problem), heads = problem.batch * problem.kv_heads * row_tiles(problem);
  const auto consider = [&](std::int64_t most, bool cluster) {
    // More than two blocks for each place would not be done sooner.
    const std::int64_t useful =
        std::min(most, 4 * device_of(problem).multiprocessors / std::max<std::int64_t>(heads, 1));
    for (std::int64_t count = 2; count <= useful; ++count) {
      if (const double time = time_in_splits(problem, {count, cluster}); time < least) {
        best = {count, cluster}, least = time;
      }
    }
  };
  constexpr std::int64_t fewest_tiles = 2, most = 256;
  const std::int64_t in_order = std::min<std::int64_t>(decode_most_cluster, splits_in_order(problem.value_dim));
  consider(std::min(tiles, in_order), true);
  consider(std::min(tiles / fewest_tiles, most), false);
  return best;
}

// Of keys that threads copy: on Hopper as many as if the copy engine could read them, so that a call has the same bits
// in any layout.
std::int64_t copied_splits_of(const Problem& problem) {
  return device_of(problem).major == 9 ? hopper_splits_of(problem).count : splits_of(problem);
}

// Whether keys and values are 8-bit rows of whole chunks beside half queries.
bool fits_byte_decode(const Problem& problem) {
  return problem.pages && problem.pages->key_scales && is_half_type(problem.dtype()) &&
         std::max(problem.head_dim, problem.value_dim) <= mma_widest && rows_of(problem.key).chunks &&
         rows_of(problem.value).chunks;
}

// Whether the copy engine can read keys and values.
bool reads_boxes(const Problem& problem) {
  return problem.key_dtype() == problem.dtype() && device_of(problem).major == 9 && problem.head_dim > 0 &&
         problem.value_dim > 0 && problem.key_len > 0 && problem.key_len <= longest_axis &&
         problem.key.size(2) <= longest_axis && problem.batch * problem.heads <= longest_axis &&
         box_rows(problem, decode_keys) >= fewest_box_rows && !map_refusal("key", problem.key) &&
         !map_refusal("value", problem.value);
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

// Of every kernel here.
std::optional<std::string> common_refusal(const Problem& problem) {
  if (!has_few_rows(problem)) {
    return "more query rows to a kv head than its tiles of 16 are for";
  }
  if (problem.spans || problem.dropout.active()) {
    return "spans or dropout";
  }
  // One block of a multiprocessor has nobody beside it that works while a bias is read; a mask comes ahead.
  const bool waits = problem.bias || (problem.mask && problem.key_dtype() != problem.dtype());
  if (waits && std::max(problem.head_dim, problem.value_dim) > 128) {
    return problem.bias ? "a bias beside head dims above 128" : "a mask beside 8-bit keys and head dims above 128";
  }
  if (problem.batch_invariant && problem.packed()) {
    return "batch_invariant, and the longest sequence of a pack depends on the others";
  }
  return std::nullopt;
}

Launch with_clusters(const Problem& problem, const ForwardArguments& arguments,
                     Launch (*launch)(const ForwardArguments&, DType, std::int64_t)) {
  const Splits splits = hopper_splits_of(problem);
  Launch result = launch(arguments, problem.dtype(), splits.count);
  result.cluster = splits.cluster ? static_cast<int>(splits.count) : 1;
  return result;
}

constexpr const char* unreadable = "its copy engine cannot read key and value here";

}  // namespace

std::optional<std::string> decode_refusal(const Problem& problem) {
  if (problem.pages) {
    return "keys in pages";
  }
  if (auto reason = tensor_core_refusal(problem)) {
    return reason;
  }
  return common_refusal(problem);
}

std::optional<std::string> hopper_decode_refusal(const Problem& problem) {
  if (auto reason = decode_refusal(problem)) {
    return reason;
  }
  return reads_boxes(problem) ? std::optional<std::string>() : unreadable;
}

std::optional<std::string> paged_decode_refusal(const Problem& problem) {
  if (!problem.pages) {
    return "keys are not in pages";
  }
  if (auto reason = tensor_core_refusal(problem)) {
    return reason;
  }
  return common_refusal(problem);
}

std::optional<std::string> hopper_paged_decode_refusal(const Problem& problem) {
  if (auto reason = paged_decode_refusal(problem)) {
    return reason;
  }
  return reads_boxes(problem) ? std::optional<std::string>() : unreadable;
}

std::optional<std::string> byte_decode_refusal(const Problem& problem) {
  if (!fits_byte_decode(problem)) {
    return "keys are not 8-bit rows of whole chunks beside half queries";
  }
  return problem.alibi_slopes ? std::optional<std::string>("ALiBi") : common_refusal(problem);
}

Launch choose_decode(const Problem& problem, const ForwardArguments& arguments) {
  return decode_launch(arguments, problem.dtype(), copied_splits_of(problem));
}

Launch choose_hopper_decode(const Problem& problem, const ForwardArguments& arguments) {
  return with_clusters(problem, arguments, hopper_decode_launch);
}

Launch choose_paged_decode(const Problem& problem, const ForwardArguments& arguments) {
  return paged_decode_launch(arguments, problem.dtype(), copied_splits_of(problem));
}

Launch choose_hopper_paged_decode(const Problem& problem, const ForwardArguments& arguments) {
  return with_clusters(problem, arguments, hopper_paged_decode_launch);
}

Launch choose_byte_decode(const Problem& problem, const ForwardArguments& arguments) {
  return byte_decode_launch(arguments, problem.dtype(), problem.key_dtype(), splits_of(problem));
}

std::size_t decode_bytes(const Problem& problem, const Launch& launch) {
  return launch.cluster > 1 ? 0 : split_shape(problem, launch).bytes();
}

cudaError_t queue_decode(const ForwardProblem& problem, const Launch& launch, const ForwardArguments& arguments,
                         Workspace& workspace) {
  DecodeArguments all{};
  static_cast<ForwardArguments&>(all) = arguments;
  const SplitShape shape = split_shape(problem, launch);
  all.cluster = launch.cluster;
  all.split.splits = shape.splits, all.split.rows = shape.rows;
  if (launch.cluster == 1) {
    all.split = place_splits(shape, 1.0f, workspace);
  }
  all.split_keys = problem.batch_invariant ? invariant_split : 0;
  if (reads_boxes(problem)) {
    all.box_rows = box_rows(problem, decode_keys);
    all.key_map = stream_map(problem.key, all.box_rows, problem.operation);
    all.value_map = stream_map(problem.value, all.box_rows, problem.operation);
    all.key_steps = steps_of(problem.key);
    all.value_steps = steps_of(problem.value);
  }
  return launch_decode(launch, all, {problem.dtype(), problem.key_dtype()}, device_of(problem).major >= 9,
                       static_cast<cudaStream_t>(problem.stream));
}

}  // namespace headway::cuda
