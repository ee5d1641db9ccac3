// The gradient of a bias: ds, summed over the axes along which the bias repeats.
//
// A block owns a tile of 64 queries x 64 keys of the bias (32 keys in f64); where an axis is summed over it owns all of
// it, and walks along in one fixed order. So a bias of the full size is written once by many blocks, while a short one
// has few blocks with long walks: the price of the same bits every time without a second matrix.
#pragma once

#include "engines/cuda/kernels/simt_pairs.cuh"

namespace headway::cuda {

template <class T, class Tile>
class SimtBiasGradient {
 public:
  using Real = RealOf<T>;
  using Shape = Tile;
  using Pairs = SimtPairs<T, false, Shape>;
  static constexpr int M = Pairs::M, N = Pairs::N;

  __host__ static std::size_t shared_bytes(const Arguments& args) {
    return sizeof(Real) * static_cast<std::size_t>(Pairs::size(args));
  }

  __device__ SimtBiasGradient(const BiasGradientArguments& args, Real* shared)
      : args_(args), pairs_(args, args.grad_out, args.lse, args.delta, &args.coarse, shared) {}

  // The tile of items from b, heads from h, queries from `query` and keys from `key`: one of each, or all of them.
  __device__ void run(std::int64_t b, std::int64_t h, std::int64_t query, std::int64_t key) {
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
        sums_[m][n] = 0;
      }
    }
    const std::int64_t b_end = args_.sums[0] ? args_.batch : b + 1, h_end = args_.sums[1] ? args_.heads : h + 1;
    for (std::int64_t item = b; item < b_end; ++item) {
      const Sequence sequence = sequence_of(args_, item);
      for (std::int64_t head = h; head < h_end; ++head) {
        pairs_.set_head(item, head, sequence);
        const Modifiers<Real> modifiers(args_, sequence, item, head);
        const std::int64_t query_end = args_.sums[2] ? sequence.real_queries : query + 1;
        for (std::int64_t i = query; i < query_end; i += Shape::rows) {
          walk_keys(modifiers, sequence, item, head, i, key);
        }
      }
    }
    store(b, h, query, key);
  }

 private:
  __device__ void walk_keys(const Modifiers<Real>& modifiers, const Sequence& sequence, std::int64_t b, std::int64_t h,
                            std::int64_t i, std::int64_t key) {
    const TileRange range = tile_range(args_, sequence, b, i, Shape::rows);
    const std::int64_t end = args_.sums[3] ? range.end : smaller(key + 1, range.end);
    const auto next_from = [&](std::int64_t j) {
      return next_key_tile(args_, sequence, b, h, i, Shape::rows, j, end, Shape::keys);
    };
    if (next_from(key) >= end || (!args_.sums[3] && key + Shape::keys <= range.begin)) {
      return;
    }
    __syncthreads();
    pairs_.fill_rows_of_tile(i);
    pairs_.fill_stats(i);
    for (std::int64_t j = next_from(key); j < end; j = next_from(j + Shape::keys)) {
      Real ds[M][N];
      std::uint64_t forbidden = 0;
      __syncthreads();
      pairs_.run(modifiers, j, false, false, false, true, ds, forbidden);
#pragma unroll
      for (int m = 0; m < M; ++m) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
          sums_[m][n] += ds[m][n];
        }
      }
    }
  }

  __device__ void store(std::int64_t b, std::int64_t h, std::int64_t query, std::int64_t key) {
    __syncthreads();
    Real* tile = pairs_.weights;  // [keys][rows]
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
        tile[pairs_.thread.col_of(n) * Shape::row_stride + pairs_.thread.row_of(m)] = sums_[m][n];
      }
    }
    __syncthreads();
    // Each sum along a tile's own axes goes from its first element to its last.
    const int rows = args_.sums[2] ? 1 : Shape::rows, cols = args_.sums[3] ? 1 : Shape::keys;
    const int rows_summed = args_.sums[2] ? Shape::rows : 1, cols_summed = args_.sums[3] ? Shape::keys : 1;
    for (int task = static_cast<int>(threadIdx.x); task < rows * cols; task += Shape::threads) {
      const int r = task / cols, c = task % cols;
      // A sum over an axis without elements is 0.
      if ((!args_.sums[2] && query + r >= args_.query_len) || (!args_.sums[3] && key + c >= args_.key_len)) {
        continue;
      }
      Real sum = 0;
      for (int y = 0; y < rows_summed; ++y) {
        for (int x = 0; x < cols_summed; ++x) {
          sum += tile[(c + x) * Shape::row_stride + r + y];
        }
      }
      const Matrix& target = args_.gradient;
      store_number(target.data, target.dtype,
                   b * target.batch + h * target.head + (query + r) * target.query + (key + c) * target.key, sum);
    }
  }

  const BiasGradientArguments& args_;
  Pairs pairs_;
  Real sums_[M][N];
};

template <class T, class Shape>
__global__ void __launch_bounds__(Shape::threads, 2)
    simt_bias_gradient(const __grid_constant__ BiasGradientArguments arguments, std::int64_t heads,
                       std::int64_t row_tiles, std::int64_t key_tiles, std::int64_t tasks) {
  extern __shared__ __align__(16) unsigned char shared[];
  using Gradient = SimtBiasGradient<T, Shape>;
  Gradient gradient(arguments, reinterpret_cast<typename Gradient::Real*>(shared));
  for (std::int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const std::int64_t key = task % key_tiles, query = task / key_tiles % row_tiles;
    const std::int64_t head = task / key_tiles / row_tiles % heads, item = task / key_tiles / row_tiles / heads;
    gradient.run(item, head, query * Gradient::Shape::rows, key * Gradient::Shape::keys);
  }
}

}  // namespace headway::cuda
