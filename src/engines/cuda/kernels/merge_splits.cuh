// The splits of a row (of decode.cuh, or of hopper_partial.cuh), merged: a block for each row. Its threads find the
// highest score and the sum of weights, then each adds four features of every so many splits, and at last those sums
// are added: the order depends on the number of splits and features alone. A few kilobytes a row, all loads of a step
// under way together: latency bounds it.
#pragma once

#include "engines/cuda/kernels/decode_arguments.h"
#include "engines/cuda/kernels/plain_again.cuh"
#include "engines/cuda/kernels/softmax.cuh"
#include "engines/cuda/key_range.cuh"
#include "engines/cuda/modifiers.cuh"
#include "engines/cuda/ptx/dependent_launch.cuh"

namespace headway::cuda {

constexpr int merge_threads = 256;

// Combines one number of every thread; all get the result. The order is fixed.
template <class Combine>
__device__ inline float over_block(float value, const Combine& combine) {
  constexpr int warps = merge_threads / 32;
  __shared__ float values[warps];
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    value = combine(value, __shfl_xor_sync(0xffffffffu, value, lanes));
  }
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

template <class T>
__device__ inline void merge_row(const MergeArguments& args, std::int64_t b, std::int64_t h, std::int64_t i) {
  __shared__ __align__(16) float sums[merge_threads * 4];
  const Sequence sequence = sequence_of(args, b);
  const float sink = sink_of<float>(args, h);
  ptx::wait_for_kernel_before();  // its statistics and sums; in every block, or this kernel might end first
  if (i >= sequence.query_count) {
    return;
  }
  const std::int64_t width = sum_width(args.value_dim), g = h / args.group;
  const SplitArguments& split = args.split;
  const std::int64_t first = (b * args.kv_heads + g) * split.splits * split.rows + i * args.group + h % args.group;
  const SplitRow splits{
      split.statistics + 2 * first, split.sums + first * width, split.splits, split.rows, width, split.unit};
  RowSoftmax<float> row = merged_statistics(splits);
  const float highest = row.highest;
  row.highest *= split.unit;
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
      attend_plainly<T>(args, b, h, i, 0, args.value_dim);
    }
  }
}

// A block for each query, head and batch item, which lie along the grid's axes.
template <class T>
__global__ void __launch_bounds__(merge_threads, 6) merge_splits(const __grid_constant__ MergeArguments args) {
  for (std::int64_t b = blockIdx.z; b < args.batch; b += gridDim.z) {
    for (std::int64_t h = blockIdx.y; h < args.heads; h += gridDim.y) {
      __syncthreads();  // the sums of the row before have been read
      merge_row<T>(args, b, h, blockIdx.x);
    }
  }
}

}  // namespace headway::cuda
