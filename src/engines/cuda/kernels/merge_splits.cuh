// The splits of a row (of decode.cuh, or of hopper_partial.cuh), merged: by a block for each row, or by a warp where
// there are few splits. Threads find the highest score and the sum of weights, then each adds four features of every so
// many splits, and at last those sums are added: in one order, whoever does it, that depends on the splits and features
// alone. A few kilobytes a row, all loads of a step under way together: latency bounds it.
#pragma once

#include "engines/cuda/kernels/decode_arguments.h"
#include "engines/cuda/kernels/plain_again.cuh"
#include "engines/cuda/kernels/softmax.cuh"
#include "engines/cuda/kernels/store_eight.cuh"
#include "engines/cuda/key_range.cuh"
#include "engines/cuda/modifiers.cuh"
#include "engines/cuda/ptx/dependent_launch.cuh"

namespace headway::cuda {

// Combine one number of every lane, or thread; all get the result. The order is fixed.
template <class Combine>
__device__ inline float over_warp(float value, const Combine& combine) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    value = combine(value, __shfl_xor_sync(0xffffffffu, value, lanes));
  }
  return value;
}

template <class Combine>
__device__ inline float over_block(float value, const Combine& combine) {
  constexpr int warps = merge_threads / 32;
  __shared__ float values[warps];
  value = over_warp(value, combine);
  __syncthreads();
  if (threadIdx.x % 32 == 0) {
    values[threadIdx.x / 32] = value;
  }
  __syncthreads();
  value = values[0];
#pragma unroll
  for (int warp = 1; warp < warps; ++warp) {
    value = combine(value, values[warp]);
  }
  return value;
}

// What the splits of one row left.
struct SplitRow {
  const float* statistics;
  const float* sums;
  std::int64_t splits, rows, width;  // rows: from one split to the next
  float unit;                        // what makes a score natural

  __device__ float highest(std::int64_t split) const { return statistics[2 * split * rows]; }
  __device__ float total(std::int64_t split) const { return statistics[2 * split * rows + 1]; }
  __device__ float4 four(std::int64_t split, int quad) const {
    return reinterpret_cast<const float4*>(sums + split * rows * width)[quad];
  }
  // Of a split without keys highest is -inf, and so this is 0.
  __device__ float factor(std::int64_t split, float all_highest) const {
    return exponential((highest(split) - reference(all_highest)) * unit);
  }
};

// The highest score is not natural yet.
__device__ inline RowSoftmax<float> merged_statistics(const SplitRow& row) {
  float highest = -infinity<float>(), total = 0;
  for (std::int64_t split = threadIdx.x; split < row.splits; split += merge_threads) {
    highest = higher(highest, row.highest(split));
  }
  highest = over_block(highest, [](float x, float y) { return higher(x, y); });
  for (std::int64_t split = threadIdx.x; split < row.splits; split += merge_threads) {
    total += row.total(split) * row.factor(split, highest);
  }
  return {highest, over_block(total, [](float x, float y) { return x + y; })};
}

// sums[groups][width]: each group of threads has the splits that are its number modulo groups. Returns groups.
__device__ inline int add_splits(const SplitRow& row, float highest, float* sums) {
  const int quads = static_cast<int>(row.width) / 4, groups = merge_threads / quads;
  const int group = static_cast<int>(threadIdx.x) / quads, quad = static_cast<int>(threadIdx.x) % quads;
  if (group < groups) {
    float4 sum{};
#pragma unroll 8
    for (std::int64_t split = group; split < row.splits; split += groups) {
      const float factor = row.factor(split, highest);
      const float4 four = row.four(split, quad);
      sum.x += four.x * factor, sum.y += four.y * factor, sum.z += four.z * factor, sum.w += four.w * factor;
    }
    reinterpret_cast<float4*>(sums)[threadIdx.x] = sum;
  }
  __syncthreads();
  return groups;
}

__device__ inline SplitRow splits_of(const MergeArguments& args, std::int64_t b, std::int64_t h, std::int64_t i) {
  const std::int64_t width = sum_width(args.value_dim);
  const SplitArguments& split = args.split;
  const std::int64_t head = (b * args.kv_heads + h / args.group) * split.splits;
  const std::int64_t first = head * split.rows + i * args.group + h % args.group;
  return {split.statistics + 2 * first, split.sums + first * width, split.splits, split.rows, width, split.unit};
}

template <class T, class Stored>
__device__ inline void merge_row(const MergeArguments& args, std::int64_t b, std::int64_t h, std::int64_t i) {
  __shared__ __align__(16) float sums[merge_threads * 4];
  const Sequence sequence = sequence_of(args, b);
  const float sink = sink_of<float>(args, h);
  ptx::wait_for_kernel_before();  // its statistics and sums; in every block, or this kernel might end first
  if (i >= sequence.query_count) {
    return;
  }
  const SplitRow splits = splits_of(args, b, h, i);
  const std::int64_t width = splits.width;
  RowSoftmax<float> row = merged_statistics(splits);
  const float highest = row.highest;
  row.highest *= splits.unit;
  const RowEnd<float> end = close_row(row, sink, i >= sequence.real_queries);
  const int groups = width == 0 ? 0 : add_splits(splits, highest, sums);
  const std::int64_t at = sequence.query_begin + i;
  for (std::int64_t d = threadIdx.x; d < args.value_dim; d += merge_threads) {
    float sum = 0;
    for (int group = 0; group < groups; ++group) {
      sum += sums[group * width + d];
    }
    head_of<T>(args.out, b, h)[at * args.out.row + d * args.out.feature] =
        element<T>(row.empty() ? 0.0f : sum * end.factor);
  }
  if (threadIdx.x == 0 && args.lse.data != nullptr) {
    head_of<float>(args.lse, b, h)[at * args.lse.row] = end.lse;
  }
  if (needs_plain_row(args, row, row_range(args, sequence, b, i))) {
    __syncthreads();  // the row is stored
    if (threadIdx.x < 32) {
      attend_plainly<T, Stored>(args, b, h, i, 0, args.value_dim);
    }
  }
}

// A block for each query, head and batch item, which lie along the grid's axes.
template <class T, class Stored>
__global__ void __launch_bounds__(merge_threads, 6) merge_splits(const __grid_constant__ MergeArguments args) {
  for (std::int64_t b = blockIdx.z; b < args.batch; b += gridDim.z) {
    for (std::int64_t h = blockIdx.y; h < args.heads; h += gridDim.y) {
      __syncthreads();  // the sums of the row before have been read
      merge_row<T, Stored>(args, b, h, blockIdx.x);
    }
  }
}

// ---- Few splits ----

// A block's groups of threads then have one split each at most, and their sums are added split by split.
inline bool is_merged_by_warps(std::int64_t splits, std::int64_t value_dim) {
  return value_dim > 0 && splits <= 32 && splits <= splits_in_order(value_dim);
}

template <class T, class Stored>
__device__ inline void merge_row_by_warp(const MergeArguments& args, std::int64_t b, std::int64_t h, std::int64_t i) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const Sequence sequence = sequence_of(args, b);
  if (i >= sequence.query_count) {
    return;
  }
  const SplitRow splits = splits_of(args, b, h, i);
  const auto count = static_cast<int>(splits.splits);
  const bool has_split = lane < count;
  const float highest =
      over_warp(has_split ? splits.highest(lane) : -infinity<float>(), [](float x, float y) { return higher(x, y); });
  const float own_factor = has_split ? splits.factor(lane, highest) : 0.0f;
  const float own_total = has_split ? splits.total(lane) * own_factor : 0.0f;
  RowSoftmax<float> row{highest, over_warp(own_total, [](float x, float y) { return x + y; })};
  row.highest *= splits.unit;
  const RowEnd<float> end = close_row(row, sink_of<float>(args, h), i >= sequence.real_queries);
  const std::int64_t at = sequence.query_begin + i;
  T* out = head_of<T>(args.out, b, h) + at * args.out.row;
  for (int first = 0; first < splits.width; first += 128) {
    const int quad = first / 4 + lane;
    float sum[4] = {};
    const bool has_quad = 4 * quad < splits.width;
#pragma unroll 4
    for (int split = 0; split < count; ++split) {
      const float factor = __shfl_sync(~0u, own_factor, split);
      const float4 four = has_quad ? splits.four(split, quad) : float4{};
      sum[0] += four.x * factor, sum[1] += four.y * factor, sum[2] += four.z * factor, sum[3] += four.w * factor;
    }
    if (has_quad) {
#pragma unroll
      for (float& number : sum) {
        number = row.empty() ? 0.0f : number * end.factor;
      }
      store_four(args, out, 4 * quad, sum);
    }
  }
  if (lane == 0 && args.lse.data != nullptr) {
    head_of<float>(args.lse, b, h)[at * args.lse.row] = end.lse;
  }
  if (needs_plain_row(args, row, row_range(args, sequence, b, i))) {
    __syncwarp();  // the row is stored
    attend_plainly<T, Stored>(args, b, h, i, 0, args.value_dim);
  }
}

// A warp for each query and head, a batch item after the other.
template <class T, class Stored>
__global__ void __launch_bounds__(merge_threads) merge_few_splits(const __grid_constant__ MergeArguments args) {
  const std::int64_t row = std::int64_t{blockIdx.x} * (merge_threads / 32) + threadIdx.x / 32;
  const std::int64_t h = row / args.query_len, i = row % args.query_len;
  ptx::wait_for_kernel_before();
  for (std::int64_t b = blockIdx.z; h < args.heads && b < args.batch; b += gridDim.z) {
    merge_row_by_warp<T, Stored>(args, b, h, i);
  }
}

}  // namespace headway::cuda
