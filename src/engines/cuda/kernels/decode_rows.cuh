// What the decode kernels (decode.cuh, byte_decode.cuh) share: a block's rows and its split of the keys, and where the
// results of rows go.
#pragma once

#include "engines/cuda/kernels/decode_arguments.h"
#include "engines/cuda/kernels/mma_scores.cuh"
#include "engines/cuda/kernels/plain_again.cuh"
#include "engines/cuda/kernels/softmax.cuh"
#include "engines/cuda/ptx/dependent_launch.cuh"

namespace headway::cuda {

// T of queries and output, Stored of keys and values.
template <class T, class Stored = T>
class DecodeRows {
 public:
  static constexpr int rows = 16;

 protected:
  __device__ explicit DecodeRows(const DecodeArguments& args) : args_(args) {}

  __device__ void start(std::int64_t b, std::int64_t g, std::int64_t split, int row_tile) {
    b_ = b, g_ = g, split_ = split, first_row_ = row_tile * rows;
    sequence_ = sequence_of(args_, b);
    range_ = tile_range(args_, sequence_, b, 0, sequence_.query_count);
    find_split();
  }

  // Row r of the kv head, row r - first_row_ of the tile, is query r / group of head g * group + r % group.
  __device__ int row_of(int half) const { return thread_.lane / 4 + 8 * half; }
  __device__ int group() const { return static_cast<int>(args_.group); }
  __device__ bool is_real(int row) const { return first_row_ + row < args_.group * sequence_.query_count; }
  __device__ std::int64_t query_of(int row) const { return (first_row_ + row) / group(); }
  __device__ std::int64_t head_of_row(int row) const { return g_ * args_.group + (first_row_ + row) % group(); }

  // This split's part of the keys that some row sees: whole tiles of 64.
  __device__ void find_split() {
    const std::int64_t first = range_.begin / mma_rows * mma_rows;
    std::int64_t begin = split_ * args_.split_keys, length = args_.split_keys;
    if (length == 0) {
      const auto all = static_cast<std::uint32_t>((range_.end - first + mma_rows - 1) / mma_rows);
      const auto splits = static_cast<std::uint32_t>(args_.split.splits);
      length = std::int64_t{(all + splits - 1) / splits} * mma_rows;
      begin = first + split_ * length;
    }
    begin_ = larger(begin, first);
    end_ = smaller(begin + length, range_.end);
  }

  // Merges what the 4 warps found, sums [4][16][Depth] and statistics [4][16], which all threads see; sums are
  // multiplied by `factor`.
  template <int Depth>
  __device__ void close_rows(const float* sums, const RowSoftmax<float>* statistics, float factor) {
    for (int task = static_cast<int>(threadIdx.x); task < rows * Depth; task += mma_threads) {
      const int r = task / Depth, d = task % Depth;
      if (is_real(r)) {
        RowSoftmax<float> row = statistics[r];
        float sum = sums[r * Depth + d];
#pragma unroll
        for (int warp = 1; warp < 4; ++warp) {
          const RowSoftmax<float> other = statistics[warp * rows + r];
          sum *= row.raise(other.highest);
          const float share = exponential(other.highest - reference(row.highest));
          sum += sums[(warp * rows + r) * Depth + d] * share;
          row.total += other.total * share;
        }
        store(r, d, row, sum * factor);
        if (d == 0) {
          again()[r] =
              args_.split.splits == 1 && needs_plain_row(args_, row, row_range(args_, sequence_, b_, query_of(r)));
        }
      }
    }
    __syncthreads();
    for (int r = thread_.warp; r < rows; r += mma_threads / 32) {
      if (is_real(r) && again()[r]) {
        attend_plainly<T, Stored>(args_, b_, head_of_row(r), query_of(r), 0, args_.value_dim);
      }
    }
  }

  // Rows of which the sums say too little; of splits merge_splits knows it.
  __device__ static bool* again() {
    __shared__ bool again[rows];
    return again;
  }

  __device__ void store(int r, int d, const RowSoftmax<float>& row, float sum) {
    const SplitArguments& split = args_.split;
    if (split.splits > 1) {
      const std::int64_t at = ((b_ * args_.kv_heads + g_) * split.splits + split_) * split.rows + first_row_ + r;
      if (d < args_.value_dim) {
        split.sums[at * sum_width(args_.value_dim) + d] = sum;
      }
      if (d == 0) {
        split.statistics[2 * at] = row.highest;
        split.statistics[2 * at + 1] = row.total;
      }
      return;
    }
    const std::int64_t h = head_of_row(r), i = query_of(r);
    const RowEnd<float> end = close_row(row, sink_of<float>(args_, h), i >= sequence_.real_queries);
    const std::int64_t at = sequence_.query_begin + i;
    if (d < args_.value_dim) {
      head_of<T>(args_.out, b_, h)[at * args_.out.row + d * args_.out.feature] =
          element<T>(row.empty() ? 0.0f : sum * end.factor);
    }
    if (d == 0 && args_.lse.data != nullptr) {
      head_of<float>(args_.lse, b_, h)[at * args_.lse.row] = end.lse;
    }
  }

  const DecodeArguments& args_;
  MmaThread thread_;
  std::int64_t b_ = 0, g_ = 0, split_ = 0, begin_ = 0, end_ = 0;
  int first_row_ = 0;
  Sequence sequence_;
  TileRange range_;
};

// A block for each tile of rows and split, kv head, and batch item, which lie along the grid's axes.
template <class Kernel>
__device__ inline void decode_all(const DecodeArguments& arguments, unsigned char* shared) {
  ptx::let_next_kernel_start();  // merge_splits
  Kernel decode(arguments, shared);
  const auto row_tiles = static_cast<unsigned>(arguments.split.rows / decode.rows);
  const unsigned split = blockIdx.x / row_tiles, row_tile = blockIdx.x % row_tiles;
  for (std::int64_t b = blockIdx.z; b < arguments.batch; b += gridDim.z) {
    for (std::int64_t g = blockIdx.y; g < arguments.kv_heads; g += gridDim.y) {
      decode.run(b, g, split, static_cast<int>(row_tile));
    }
  }
}

}  // namespace headway::cuda
