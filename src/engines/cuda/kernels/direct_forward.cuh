// Forward over few keys, bf16 and f16: a warp for each 16 query rows of a kv head, which are those of all its heads.
//
// Everything a row needs is in one warp's registers (direct_tile.cuh), so warps know nothing of each other and a
// multiprocessor has up to 16 of them. Q is read and out written once; K and V come once from L2 for each block of
// threads, whose warps have neighbouring rows, and then from L1. Memory bounds it where there are many heads, and the
// latency of two dependent loads where there are few.
#pragma once

#include "engines/cuda/kernels/direct_arguments.h"
#include "engines/cuda/kernels/direct_tile.cuh"

namespace headway::cuda {

template <class T, int Keys, bool Modified>
class DirectForward {
 public:
  using Tile = DirectTile<T, Keys, Modified>;

  __device__ DirectForward(const ForwardArguments& args, float* scratch)
      : args_(args), tile_(args), scratch_(scratch) {}

  __device__ void run(int b, int g, int row_tile) {
    b_ = b;
    if (!tile_.start(b, g, row_tile)) {
      return;
    }
    const int first = tile_.begin();
    typename Tile::Weights weights;
    {
      typename Tile::Scores scores;
      tile_.find_scores(first, scratch_, scores);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        rows_[half].highest = Tile::highest_of(scores, half);
        rows_[half].total = Tile::weigh(scores, half, rows_[half].highest);
      }
      tile_.pack(first, scores, weights);
    }
    close();
    constexpr int groups = Keys <= 16 ? 2 : 1;  // few loads for each feature: more features
#pragma unroll 1
    for (int d = 0; d < args_.value_dim; d += groups * direct_features) {
      typename Tile::Sums sums[groups];
      tile_.template multiply_values<groups>(first, d, weights, sums);
#pragma unroll
      for (int n = 0; n < groups; ++n) {
        store(d + n * direct_features, sums[n]);
      }
    }
    do_again();
  }

 private:
  // What out is multiplied by; lse.
  __device__ void close() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (tile_.is_real(half)) {
        const int h = tile_.head(half), i = tile_.query(half);
        const RowEnd<float> end = close_row(rows_[half], sink_of<float>(args_, h), i >= tile_.sequence().real_queries);
        factors_[half] = end.factor * (static_cast<float>(args_.dropout.kept_scale) / Tile::weight_scale);
        if (tile_.lane() % 4 == 0) {
          tile_.store_lse(h, i, end.lse);
        }
      }
    }
  }

  __device__ void store(int d, const typename Tile::Sums& sums) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (!tile_.is_real(half)) {
        continue;
      }
      T* row = tile_.out_row(tile_.head(half), tile_.query(half));
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        float eight[8];
        Tile::sums_of(sums, half, part, eight);
#pragma unroll
        for (float& number : eight) {
          number = rows_[half].empty() ? 0.0f : number * factors_[half];
        }
        store_eight(args_, row, d + 16 * (tile_.lane() % 4) + 8 * part, eight);
      }
    }
  }

  // Rows whose sums say too little, by all lanes.
  __device__ void do_again() {
    unsigned left = 0;  // bit 4 n + half: row n + 8 half
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      left |= (0x11111111u & __ballot_sync(~0u, needs_plain_row(args_, rows_[half], tile_.range(half)))) << half;
    }
    __syncwarp();  // the rows are stored
#pragma unroll 1
    for (; left != 0; left &= left - 1) {
      const int bit = __ffs(static_cast<int>(left)) - 1;
      const bool second = (bit & 1) != 0;
      const int h = __shfl_sync(~0u, second ? tile_.head(1) : tile_.head(0), bit & ~3);
      const int i = __shfl_sync(~0u, second ? tile_.query(1) : tile_.query(0), bit & ~3);
      attend_plainly<T>(args_, b_, h, i, 0, args_.value_dim);
    }
  }

  const ForwardArguments& args_;
  Tile tile_;
  float* scratch_;
  int b_ = 0;
  RowSoftmax<float> rows_[2];
  float factors_[2] = {0, 0};
};

inline constexpr int direct_threads = 256;  // of one block at most, of which a multiprocessor has two

template <class T, int Keys, bool Modified>
__global__ void __launch_bounds__(direct_threads, 2) direct_forward(const __grid_constant__ DirectArguments args) {
  extern __shared__ float direct_scratch[];  // [DirectTile::scratch][threads]
  const unsigned task = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (task >= args.tasks) {
    return;
  }
  const unsigned head = task / args.row_tiles, kv_heads = static_cast<unsigned>(args.kv_heads);
  const unsigned b = head / kv_heads;
  DirectForward<T, Keys, Modified>(args, direct_scratch + threadIdx.x)
      .run(static_cast<int>(b), static_cast<int>(head - b * kv_heads), static_cast<int>(task - head * args.row_tiles));
}

}  // namespace headway::cuda
