// What the decode kernels (decode.cuh, byte_decode.cuh) share: a block's rows and its split of the keys, and where the
// results of rows go.
#pragma once

#include "engines/cuda/kernels/decode_arguments.h"
#include "engines/cuda/kernels/mma_scores.cuh"
#include "engines/cuda/kernels/plain_again.cuh"
#include "engines/cuda/kernels/softmax.cuh"
#include "engines/cuda/kernels/store_eight.cuh"
#include "engines/cuda/ptx/cluster.cuh"
#include "engines/cuda/ptx/dependent_launch.cuh"
#include "engines/cuda/ptx/shared_address.cuh"

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
  __device__ int real_rows() const {
    return static_cast<int>(smaller(args_.group * sequence_.query_count - first_row_, rows));
  }
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
        RowSoftmax<float> row;
        const float sum = sum_of_warps<Depth>(sums, statistics, r, d, row);
        store(r, d, row, sum * factor);
        if (d == 0) {
          again()[r] =
              args_.split.splits == 1 && needs_plain_row(args_, row, row_range(args_, sequence_, b_, query_of(r)));
        }
      }
    }
    __syncthreads();
    do_again();
  }

  // The same of the blocks of a cluster, which have a split each: what a block found stays in its shared memory, all
  // read it there, and each stores a part of the output.
  template <int Depth>
  __device__ void close_rows_of_cluster(float* sums, const RowSoftmax<float>* statistics, float factor) {
    const int real = real_rows();
    for (int task = static_cast<int>(threadIdx.x); task < real * Depth; task += mma_threads) {
      const int r = task / Depth, d = task % Depth;
      RowSoftmax<float> row;
      const float sum = sum_of_warps<Depth>(sums, statistics, r, d, row);
      sums[task] = sum * factor;
      if (d == 0) {
        found()[r] = row;
        again()[r] = false;
      }
    }
    ptx::cluster_sync();
    constexpr int quads = Depth / 4;
    const int splits = args_.cluster, first = static_cast<int>(split_) * mma_threads + static_cast<int>(threadIdx.x);
    for (int task = first; task < real * quads; task += splits * mma_threads) {
      const int r = task / quads, d = task % quads * 4;
      if (d < args_.value_dim) {
        store_merged(r, d, sums + r * Depth + d, splits);
      }
    }
    ptx::cluster_sync();  // the rows are stored, and nobody reads this block's memory any more
    do_again();
  }

  // What the 4 warps found of feature d of row r: its sum, relative to the row's statistics.
  template <int Depth>
  __device__ static float sum_of_warps(const float* sums, const RowSoftmax<float>* statistics, int r, int d,
                                       RowSoftmax<float>& row) {
    row = statistics[r];
    float sum = sums[r * Depth + d];
#pragma unroll
    for (int warp = 1; warp < 4; ++warp) {
      const RowSoftmax<float> other = statistics[warp * rows + r];
      sum *= row.raise(other.highest);
      const float share = exponential(other.highest - reference(row.highest));
      sum += sums[(warp * rows + r) * Depth + d] * share;
      row.total += other.total * share;
    }
    return sum;
  }

  __device__ void do_again() {
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

  // What this block of a cluster found of its rows.
  __device__ static RowSoftmax<float>* found() {
    __shared__ RowSoftmax<float> found[rows];
    return found;
  }

  // Four features of row r, from those that all blocks of the cluster found and this one has at `own`.
  __device__ void store_merged(int r, int d, const float* own, int splits) {
    const std::uint32_t statistics = ptx::shared_address(found() + r), sums = ptx::shared_address(own);
    RowSoftmax<float> blocks[decode_most_cluster];
    float4 parts[decode_most_cluster];
#pragma unroll
    for (int n = 0; n < decode_most_cluster; ++n) {  // all loads are under way at once
      blocks[n] = {};
      parts[n] = {};
      if (n < splits) {
        const std::uint32_t from = ptx::address_in_block(statistics, n);
        blocks[n] = {ptx::load_from_block(from), ptx::load_from_block(from + sizeof(float))};
        parts[n] = ptx::load_four_from_block(ptx::address_in_block(sums, n));
      }
    }
    RowSoftmax<float> row;
#pragma unroll
    for (const RowSoftmax<float>& block : blocks) {
      row.highest = higher(row.highest, block.highest);
    }
    // The order of sums is that of merge_splits.cuh.
    float four[4] = {}, totals[decode_most_cluster];
#pragma unroll
    for (int n = 0; n < decode_most_cluster; ++n) {
      const float share = exponential(blocks[n].highest - reference(row.highest));
      totals[n] = blocks[n].total * share;
      four[0] += parts[n].x * share, four[1] += parts[n].y * share;
      four[2] += parts[n].z * share, four[3] += parts[n].w * share;
    }
#pragma unroll
    for (int apart = decode_most_cluster / 2; apart > 0; apart /= 2) {
#pragma unroll
      for (int n = 0; n < apart; ++n) {
        totals[n] += totals[n + apart];
      }
    }
    row.total = totals[0];
    const std::int64_t h = head_of_row(r), i = query_of(r), at = sequence_.query_begin + i;
    const RowEnd<float> end = close_row(row, sink_of<float>(args_, h), i >= sequence_.real_queries);
#pragma unroll
    for (float& number : four) {
      number = row.empty() ? 0.0f : number * end.factor;
    }
    store_four(args_, head_of<T>(args_.out, b_, h) + at * args_.out.row, d, four);
    if (d == 0) {
      if (args_.lse.data != nullptr) {
        head_of<float>(args_.lse, b_, h)[at * args_.lse.row] = end.lse;
      }
      again()[r] = needs_plain_row(args_, row, row_range(args_, sequence_, b_, i));
    }
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

// A block for each tile of rows and split, kv head, and batch item, which lie along the grid's axes. Those of a tile's
// splits are neighbours where they are a cluster; else those of a split's tiles, which read the same keys.
template <class Kernel>
__device__ inline void decode_all(const DecodeArguments& arguments, unsigned char* shared) {
  ptx::let_next_kernel_start();  // merge_splits
  Kernel decode(arguments, shared);
  const auto row_tiles = static_cast<unsigned>(arguments.split.rows / decode.rows);
  const auto cluster = static_cast<unsigned>(arguments.cluster);
  const unsigned split = cluster > 1 ? blockIdx.x % cluster : blockIdx.x / row_tiles;
  const unsigned row_tile = cluster > 1 ? blockIdx.x / cluster : blockIdx.x % row_tiles;
  for (std::int64_t b = blockIdx.z; b < arguments.batch; b += gridDim.z) {
    for (std::int64_t g = blockIdx.y; g < arguments.kv_heads; g += gridDim.y) {
      decode.run(b, g, split, static_cast<int>(row_tile));
    }
  }
}

}  // namespace headway::cuda
