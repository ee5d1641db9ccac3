// The score matrix after a stage, in exact f32 or f64 arithmetic: every type, size and stride.
//
// A block owns a tile of queries. For weights it walks over the keys twice (simt_walk.cuh): once for the softmax's
// statistics, once to store exp(s - highest) / total; for the other stages once. Everything outside of the rows' ranges
// is written too. Stores bound it for short heads (2 or 4 bytes a pair), the products for long ones.
#pragma once

#include "engines/cuda/kernels/simt_walk.cuh"

namespace headway::cuda {

template <class T>
class SimtMatrix : SimtWalk<T> {
 public:
  using Walk = SimtWalk<T>;
  using typename Walk::Real, typename Walk::Shape;
  using Walk::M, Walk::N, Walk::walk_bytes;

  __device__ SimtMatrix(const ScoresArguments& args, unsigned char* shared) : Walk(args, shared), args_(args) {}

  __device__ void run(std::int64_t b, std::int64_t h, std::int64_t tile) {
    this->start(b, h, tile * Shape::rows, Shape::rows);
    const bool all_keys = args_.stage == Stage::scaled || args_.stage == Stage::capped;
    const std::int64_t begin = this->first_key();
    if (args_.stage == Stage::weights) {
      this->walk_for_softmax(args_.stage);
    }
    for (std::int64_t key = 0; key < args_.key_len; key += Shape::keys) {
      if (all_keys || (key >= begin && key < range_.end && this->next_from(key, range_.end) == key)) {
        Real scores[M][N];
        this->make_scores(args_.stage, key, scores);
        store(key, scores);
      } else {
        store_nothing(key);
      }
    }
  }

 private:
  using Walk::b_, Walk::first_, Walk::h_, Walk::range_, Walk::softmax_, Walk::thread_;

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
          value = forbidden ? Real(0) : exponential(value - reference(softmax_[m].highest)) / softmax_[m].total;
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
};

template <class T>
__global__ void __launch_bounds__(SimtMatrix<T>::Shape::threads, 2)
    simt_matrix(const __grid_constant__ ScoresArguments arguments, std::int64_t row_tiles) {
  extern __shared__ __align__(16) unsigned char shared[];
  SimtMatrix<T> matrix(arguments, shared);
  const std::int64_t tasks = arguments.batch * arguments.heads * row_tiles;
  for (std::int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const std::int64_t head = task / row_tiles;
    matrix.run(head / arguments.heads, head % arguments.heads, task % row_tiles);
  }
}

}  // namespace headway::cuda
