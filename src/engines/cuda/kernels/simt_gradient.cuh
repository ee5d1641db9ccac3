// Gradients of query, key or value in exact f32 or f64 arithmetic, for every option, size and stride.
//
// A block owns 64 rows of the gradient (queries, or keys with KeysAreRows) and a span of features, and walks over the
// rows of the other side, 64 at a time (32 in f64), in one fixed order, so that the same call gives the same bits;
// grouped query heads follow one another. Each step recomputes the scores (and for query and key also <grad_out, v>)
// and adds coefficients times rows: 3 products of 64 x 64 x D multiply-adds for about 3 x 64 x D loads. The
// multiply-add units bound it. f32 with head dims up to 128 has faster ones (simt_team_gradient.cuh), where shared
// memory allows.
//   dq(i) += scale ds k(j)      dk(j) += scale ds q(i)      dv(j) += dropout(p) grad_out(i)
// As in simt_forward.cuh, only a walk that met what is not finite is repeated with forbidden pairs left out one by one,
// and with scores that say too little found again (walk_scores.cuh says when).
#pragma once

#include "engines/cuda/kernels/simt_pairs.cuh"

namespace headway::cuda {

template <class T, bool KeysAreRows, int Width, class Tile>
class SimtGradient {
 public:
  using Shape = Tile;
  using Pairs = SimtPairs<T, KeysAreRows, Shape>;
  using Real = typename Pairs::Real;
  static constexpr int M = Pairs::M, N = Pairs::N, width = Width, W = Width * 16 / Shape::threads;
  static constexpr int others_stride = Width + simt_pad;

  __host__ static std::size_t shared_bytes(const Arguments& args) {
    return sizeof(Real) * static_cast<std::size_t>(Pairs::size(args) + Shape::keys * others_stride);
  }

  __device__ SimtGradient(const GradientArguments& args, Real* shared)
      : args_(args),
        pairs_(args, args.grad_out, args.lse, args.delta, nullptr, shared),
        others_(shared + Pairs::size(args)),
        width_(args.of == GradientOf::value ? args.value_dim : args.head_dim) {}

  // `head` counts kv heads when the rows are keys.
  __device__ void run(std::int64_t b, std::int64_t head, std::int64_t tile, std::int64_t feature) {
    b_ = b, head_ = head, first_ = tile * Shape::rows, feature_ = feature;
    sequence_ = sequence_of(args_, b);
    const std::int64_t rows = KeysAreRows ? sequence_.key_count : sequence_.query_count;
    if (first_ >= rows) {
      return;
    }
#pragma unroll 1  // one copy of the code for both walks
    for (int careful = 0; careful < 2; ++careful) {
      walk(careful != 0);
      if (!__syncthreads_or(holds_not_finite(sums_) || odd_)) {
        break;
      }
    }
    store(rows);
  }

 private:
  __device__ void walk(bool careful) {
    clear(sums_);
    odd_ = false;
    const std::int64_t group = KeysAreRows ? args_.group : 1;
    for (std::int64_t member = 0; member < group; ++member) {
      const std::int64_t h = head_ * group + member;
      pairs_.set_head(b_, h, sequence_);
      const Modifiers<Real> modifiers(args_, sequence_, b_, h);
      __syncthreads();
      if (member == 0) {
        pairs_.fill_rows_of_tile(first_);
      }
      if constexpr (KeysAreRows) {
        walk_queries(modifiers, h, careful);
      } else {
        walk_keys(modifiers, careful);
      }
    }
  }

  __device__ void walk_keys(const Modifiers<Real>& modifiers, bool careful) {
    pairs_.fill_stats(first_);
    const TileRange range = tile_range(args_, sequence_, b_, first_, Shape::rows);
    const std::int64_t g = head_ / args_.group;
    const auto next_from = [&](std::int64_t key) {
      return next_key_tile(args_, sequence_, b_, head_, first_, Shape::rows, key, range.end, Shape::keys);
    };
    for (std::int64_t key = next_from(range.begin / Shape::keys * Shape::keys); key < range.end;
         key = next_from(key + Shape::keys)) {
      const RowSource<T> others(args_.key, b_, g, sequence_.key_begin, key, sequence_.key_count);
      step(modifiers, key, is_plain(range, key, Shape::keys, modifiers.only_scale()), careful, others);
    }
  }

  __device__ void walk_queries(const Modifiers<Real>& modifiers, std::int64_t h, bool careful) {
    const QueryRange queries = query_range(args_, sequence_, b_, first_, Shape::rows);
    const Rows& view = args_.of == GradientOf::value ? args_.grad_out : args_.query;
    const auto next_from = [&](std::int64_t i) {
      return next_query_tile(args_, sequence_, b_, h, first_, Shape::rows, i, queries.end, Shape::keys);
    };
    for (std::int64_t i = next_from(queries.begin / Shape::keys * Shape::keys); i < queries.end;
         i = next_from(i + Shape::keys)) {
      const TileRange range = tile_range(args_, sequence_, b_, i, Shape::keys);
      __syncthreads();  // the stats of the step before have been read
      pairs_.fill_stats(i);
      const RowSource<T> others(view, b_, h, sequence_.query_begin, i, sequence_.real_queries);
      step(modifiers, i, is_plain(range, first_, Shape::rows, modifiers.only_scale()), careful, others);
    }
  }

  __device__ void step(const Modifiers<Real>& modifiers, std::int64_t col, bool plain, bool careful,
                       const RowSource<T>& others) {
    __syncthreads();
    start_rows<Shape::threads, Shape::keys, Width>(others, feature_, width_, others_, others_stride);
    ptx::commit_copies();  // under way until the last product
    Real coefficients[M][N];
    std::uint64_t forbidden = 0;
    pairs_.run(modifiers, col, plain && !careful, args_.of == GradientOf::value, true, careful, coefficients,
               forbidden);
    odd_ |= plain && !careful && forbidden != 0;  // every pair of a plain tile is allowed
    __syncthreads();                              // each thread has read its part of what becomes the coefficients
#pragma unroll
    for (int n = 0; n < N; ++n) {
      Real column[M];
#pragma unroll
      for (int m = 0; m < M; ++m) {
        const bool marked = careful && (forbidden >> (m * N + n) & 1) != 0;
        column[m] = marked ? -Real(0) : coefficients[m][n] + Real(0);
      }
#pragma unroll
      for (int m = 0; m < M; m += 4) {
        store_four(pairs_.weights + pairs_.thread.col_of(n) * Shape::row_stride + pairs_.thread.row_of(m), column[m],
                   column[m + 1], column[m + 2], column[m + 3]);
      }
    }
    ptx::wait_for_copies<0>();
    __syncthreads();
    if (careful) {
      multiply<true>(pairs_.thread, pairs_.weights, Shape::row_stride, others_, others_stride, Shape::keys, sums_);
    } else {
      multiply<false>(pairs_.thread, pairs_.weights, Shape::row_stride, others_, others_stride, Shape::keys, sums_);
    }
  }

  __device__ void store(std::int64_t rows) {
    const Real scale = args_.of == GradientOf::value ? Real(1) : bounded<Real>(args_.scale);
    const std::int64_t begin = KeysAreRows ? sequence_.key_begin : sequence_.query_begin;
#pragma unroll
    for (int m = 0; m < M; ++m) {
      const std::int64_t r = first_ + pairs_.thread.row_of(m);
      if (r >= rows) {
        continue;
      }
      const Rows& gradient = args_.of == GradientOf::value ? args_.value_gradient : args_.gradient;
      T* target = head_of<T>(gradient, b_, head_) + (begin + r) * gradient.row;
#pragma unroll
      for (int w = 0; w < W; ++w) {
        const std::int64_t d = feature_ + pairs_.thread.col_of(w);
        if (d < width_) {
          target[d * gradient.feature] = element<T>((sums_[m][w] + Real(0)) * scale);
        }
      }
    }
  }

  const GradientArguments& args_;
  Pairs pairs_;
  Real* others_;  // [keys][Width]
  std::int64_t width_;
  std::int64_t b_ = 0, head_ = 0, first_ = 0, feature_ = 0;
  Sequence sequence_;
  bool odd_ = false;  // a score says too little
  Real sums_[M][W];
};

template <class T, bool KeysAreRows, int Width, class Shape>
__global__ void __launch_bounds__(Shape::threads, 256 / Shape::threads)
    simt_gradient(const __grid_constant__ GradientArguments arguments, std::int64_t row_tiles, std::int64_t spans) {
  extern __shared__ __align__(16) unsigned char shared[];
  using Gradient = SimtGradient<T, KeysAreRows, Width, Shape>;
  Gradient gradient(arguments, reinterpret_cast<typename Gradient::Real*>(shared));
  const std::int64_t heads = KeysAreRows ? arguments.kv_heads : arguments.heads;
  const std::int64_t tasks = arguments.batch * heads * row_tiles * spans;
  for (std::int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const std::int64_t span = task % spans, tile = task / spans % row_tiles, head = task / spans / row_tiles;
    // When causal, late queries see the most keys and early keys are seen by the most queries: they start first.
    gradient.run(head / heads, head % heads, KeysAreRows ? tile : row_tiles - 1 - tile, span * Width);
  }
}

}  // namespace headway::cuda
