// The score matrix after a stage, in exact f32 or f64 arithmetic: every type, size and stride.
//
// A block owns a tile of queries. For weights it walks over the keys twice: once for the softmax's statistics, once to
// store exp(s - highest) / total; for the other stages once. Everything outside of the rows' ranges is written too.
// Stores bound it for short heads (2 or 4 bytes a pair), the products for long ones.
#pragma once

#include "engines/cuda/kernels/simt_scores.cuh"
#include "engines/cuda/kernels/softmax.cuh"

namespace headway::cuda {

template <class T>
class SimtMatrix {
 public:
  using Real = RealOf<T>;
  using Shape = SimtShape<Real, 4>;
  static constexpr int M = Shape::M, N = Shape::N;

  __host__ static std::size_t shared_bytes(std::int64_t head_dim) {
    return sizeof(Real) *
           static_cast<std::size_t>(Shape::own_size(head_dim) + Shape::other_size() + Shape::keys * Shape::row_stride);
  }

  __device__ SimtMatrix(const ScoresArguments& args, Real* shared)
      : args_(args),
        product_{shared, shared + Shape::own_size(args.head_dim)},
        scratch_(product_.other + Shape::other_size()) {}

  __device__ void run(std::int64_t b, std::int64_t h, std::int64_t tile) {
    b_ = b, h_ = h, first_ = tile * Shape::rows;
    sequence_ = sequence_of(args_, b);
    range_ = tile_range(args_, sequence_, b, first_, Shape::rows);
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < Shape::rows) {
      ranges()[threadIdx.x] = row_range(args_, sequence_, b, first_ + threadIdx.x);
    }
    product_.fill_own(queries(), args_.head_dim);
#pragma unroll
    for (int m = 0; m < M; ++m) {
      rows_[m] = {};
    }
    const bool all_keys = args_.stage == Stage::scaled || args_.stage == Stage::capped;
    const std::int64_t begin = range_.begin / Shape::keys * Shape::keys;
    if (args_.stage == Stage::weights) {
      for (std::int64_t key = begin; key < range_.end; key += Shape::keys) {
        Real scores[M][N];
        make_scores(key, scores);
        add_to_softmax(scores);
      }
      close_rows();
    }
    for (std::int64_t key = 0; key < args_.key_len; key += Shape::keys) {
      if (all_keys || (key >= begin && key < range_.end)) {
        Real scores[M][N];
        make_scores(key, scores);
        store(key, scores);
      } else {
        store_nothing(key);
      }
    }
  }

 private:
  __device__ static KeyRange* ranges() {
    __shared__ KeyRange ranges[Shape::rows];
    return ranges;
  }
  __device__ RowSource<T> queries() const {
    return {args_.query, b_, h_, sequence_.query_begin, first_, sequence_.query_count};
  }

  // S = Q K^T  [rows, keys], modified as far as the stage says
  __device__ void make_scores(std::int64_t key, Real (&scores)[M][N]) {
    const RowSource<T> keys(args_.key, b_, h_ / args_.group, sequence_.key_begin, key, sequence_.key_count);
    product_.run(thread_, queries(), keys, args_.head_dim, scores);
    __syncthreads();  // without features there was no barrier
    const Modifiers<Real> modifiers(args_, sequence_, b_, h_);
    if (args_.stage == Stage::scaled || args_.stage == Stage::capped) {
#pragma unroll
      for (int m = 0; m < M; ++m) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
          scores[m][n] = modifiers.scaled(scores[m][n]);
          scores[m][n] = args_.stage == Stage::capped ? modifiers.capped(scores[m][n]) : scores[m][n];
        }
      }
      return;
    }
    const auto where = [&](int r, int c) {
      const KeyRange range = ranges()[r];
      return Pair{first_ + r, key + c, key + c >= range.begin && key + c < range.end};
    };
    modify_tile(thread_, modifiers, is_plain(range_, key, Shape::keys, modifiers.only_scale()), where, scratch_,
                static_cast<Real*>(nullptr), scores);
  }

  __device__ void add_to_softmax(const Real (&scores)[M][N]) {
#pragma unroll
    for (int m = 0; m < M; ++m) {
      Real highest = -infinity<Real>();
#pragma unroll
      for (int n = 0; n < N; ++n) {
        highest = higher(highest, scores[m][n]);
      }
      rows_[m].raise(row_maximum(highest));
      Real sum = 0;
#pragma unroll
      for (int n = 0; n < N; ++n) {
        sum += exponential(scores[m][n] - reference(rows_[m].highest));
      }
      rows_[m].total += row_sum(sum);
    }
  }

  __device__ void close_rows() {
    const Real sink = sink_of<Real>(args_, h_);
#pragma unroll
    for (int m = 0; m < M; ++m) {
      if (!rows_[m].empty()) {
        rows_[m].raise(sink);
        rows_[m].total += exponential(sink - reference(rows_[m].highest));
      }
    }
  }

  __device__ T* target(int m, std::int64_t j) const {
    const Matrix& to = args_.scores;
    return static_cast<T*>(to.data) + b_ * to.batch + h_ * to.head + (first_ + thread_.row_of(m)) * to.query +
           j * to.key;
  }

  __device__ void store(std::int64_t key, const Real (&scores)[M][N]) {
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const std::int64_t j = key + thread_.col_of(n);
        Real value = scores[m][n];
        if (args_.stage == Stage::weights) {
          const bool forbidden = value == -infinity<Real>();
          value = forbidden ? Real(0) : exponential(value - reference(rows_[m].highest)) / rows_[m].total;
        }
        if (first_ + thread_.row_of(m) < args_.query_len && j < args_.key_len) {
          *target(m, j) = element<T>(value);
        }
      }
    }
  }

  __device__ void store_nothing(std::int64_t key) {
    const T value = element<T>(args_.stage == Stage::weights ? Real(0) : -infinity<Real>());
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const std::int64_t j = key + thread_.col_of(n);
        if (first_ + thread_.row_of(m) < args_.query_len && j < args_.key_len) {
          *target(m, j) = value;
        }
      }
    }
  }

  const ScoresArguments& args_;
  SimtProduct<T, Shape> product_;
  Real* scratch_;
  SimtThread thread_;
  std::int64_t b_ = 0, h_ = 0, first_ = 0;
  Sequence sequence_;
  TileRange range_;
  RowSoftmax<Real> rows_[M];
};

template <class T>
__global__ void __launch_bounds__(simt_threads, 2)
    simt_matrix(const __grid_constant__ ScoresArguments arguments, std::int64_t row_tiles) {
  extern __shared__ __align__(16) unsigned char shared[];
  SimtMatrix<T> matrix(arguments, reinterpret_cast<RealOf<T>*>(shared));
  const std::int64_t tasks = arguments.batch * arguments.heads * row_tiles;
  for (std::int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const std::int64_t head = task / row_tiles;
    matrix.run(head / arguments.heads, head % arguments.heads, task % row_tiles);
  }
}

}  // namespace headway::cuda
