// The first half of every exact kernel: the scores of a tile of queries against a tile of keys.
#pragma once

#include "engines/cuda/dropout.cuh"
#include "engines/cuda/kernels/simt_tile.cuh"
#include "engines/cuda/key_range.cuh"
#include "engines/cuda/modifiers.cuh"

namespace headway::cuda {

// Register blocks of M x N: f32 has tiles of 128 (or 64) rows x 64 keys, f64 64 x 32. `depth`: features of the other
// side in shared memory at a time.
template <class Real, int Block, int Columns = 8, int Depth = 64, int Resident = 128>
struct SimtShape {
  using Thread = SimtThread<Columns>;
  static constexpr int threads = Thread::threads;
  static constexpr int M = Block;
  static constexpr int N = (sizeof(Real) == 4 ? 64 : 32) / Columns;
  static constexpr int rows = 16 * M;
  static constexpr int keys = Columns * N;
  static constexpr int depth = Depth;
  static constexpr int resident = Resident;  // up to here a tile's own rows stay in shared memory
  static constexpr int row_stride = rows + simt_pad;
  static constexpr int key_stride = keys + simt_pad;

  __host__ __device__ static int padded(std::int64_t width) {
    return static_cast<int>((width + simt_step - 1) / simt_step * simt_step);
  }
  __host__ __device__ static bool stays(std::int64_t width) { return width <= resident; }
  // Numbers of shared memory for the rows' own features.
  __host__ __device__ static int own_size(std::int64_t width) {
    return (stays(width) ? padded(width) : depth) * row_stride;
  }
  __host__ __device__ static int other_size() { return depth * key_stride; }
  // Whether all features of the other side fit there, so that they can be copied ahead.
  __host__ __device__ static bool copies_ahead(std::int64_t width) { return width <= depth; }
};

// For blocks that may have no more than 99 KiB of shared memory.
template <class Real>
using SmallSimtShape = SimtShape<Real, 4, 8, 32, 32>;

// Of products in f32 whose sums' last bits matter, in features; f64 has shorter ones always.
template <class Real>
constexpr int short_chain = sizeof(Real) == sizeof(float) ? 2 * simt_step : simt_step;

// One product tile over all features: `own` [rows] against `other` [keys], both read through shared memory. The own
// side is filled once when it stays there. Every thread calls it; the shared memory may be reused after the next
// barrier. Products are added up in chains of `Chain` features, so that equal ones do not drift; 0: one after another,
// which takes half the registers.
template <class T, class Shape, int Chain = sizeof(RealOf<T>) == sizeof(float) ? 0 : simt_step>
struct SimtProduct {
  using Real = RealOf<T>;
  using Thread = typename Shape::Thread;

  Real* own;
  Real* other;

  __device__ void fill_own(const RowSource<T>& rows, std::int64_t width) const {
    if (Shape::stays(width)) {
      fill_columns<Shape::threads, Shape::rows>(rows, 0, Shape::padded(width), width, own, Shape::row_stride);
    }
  }

  // The two halves of run() where Shape::copies_ahead.
  template <class Keys>
  __device__ void start_others(const Keys& keys, std::int64_t width) const {
    start_columns<Shape::threads, Shape::keys, Shape::depth>(keys, Shape::padded(width), width, other,
                                                             Shape::key_stride);
  }
  __device__ void run_filled(const Thread& thread, std::int64_t width, Real (&c)[Shape::M][Shape::N]) const {
    clear(c);
    add_products(thread, own, Shape::padded(width), c);
  }

  // c = own other^T. Begins with a barrier, so that what shared memory held before has been read.
  template <class Keys>
  __device__ void run(const Thread& thread, const RowSource<T>& rows, const Keys& keys, std::int64_t width,
                      Real (&c)[Shape::M][Shape::N]) const {
    clear(c);
    for (std::int64_t d = 0; d < width; d += Shape::depth) {
      const int depth = Shape::padded(smaller(width - d, Shape::depth));
      __syncthreads();
      if (!Shape::stays(width)) {
        fill_columns<Shape::threads, Shape::rows>(rows, d, depth, width, own, Shape::row_stride);
      }
      fill_columns<Shape::threads, Shape::keys>(keys, d, depth, width, other, Shape::key_stride);
      __syncthreads();
      const Real* own_part = own + (Shape::stays(width) ? static_cast<int>(d) * Shape::row_stride : 0);
      add_products(thread, own_part, depth, c);
    }
  }

 private:
  __device__ void add_products(const Thread& thread, const Real* own_part, int depth,
                               Real (&c)[Shape::M][Shape::N]) const {
    static_assert(Chain % simt_step == 0);
    if constexpr (Chain == 0) {
      multiply<false>(thread, own_part, Shape::row_stride, other, Shape::key_stride, depth, c);
    } else {
#pragma unroll 1
      for (int d = 0; d < depth; d += Chain) {
        Real part[Shape::M][Shape::N];
        clear(part);
        multiply<false>(thread, own_part + d * Shape::row_stride, Shape::row_stride, other + d * Shape::key_stride,
                        Shape::key_stride, Chain == simt_step || depth - d > Chain ? Chain : depth - d, part);
#pragma unroll
        for (int m = 0; m < Shape::M; ++m) {
#pragma unroll
          for (int n = 0; n < Shape::N; ++n) {
            c[m][n] += part[m][n];
          }
        }
      }
    }
  }
};

// Products become scores, -inf where forbidden. A tile that every row sees whole and that has no modifier is scaled in
// registers. Any other takes one row of the block after another through `scratch` [M * N][threads], each thread in its
// own column: a loop, because unrolling every modifier for every element would be most of the kernel's code. where(r,
// c) is the Pair of the tile's row r and column c. `slopes`, if given, is filled like `scratch` with d(capped) /
// d(scaled).
template <class Thread, int M, int N, class Real, class Where>
__device__ inline void modify_tile(const Thread& thread, const Modifiers<Real>& modifiers, bool plain,
                                   const Where& where, Real* scratch, Real* slopes, Real (&scores)[M][N]) {
  if (plain) {
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
        scores[m][n] = modifiers.scaled(scores[m][n]);
      }
    }
    return;
  }
  Real* own = scratch + threadIdx.x;
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      own[(m * N + n) * Thread::threads] = scores[m][n];
    }
  }
#pragma unroll 1
  for (int m = 0; m < M; ++m) {
    Real row[N], row_slopes[N];
#pragma unroll
    for (int n = 0; n < N; ++n) {
      row[n] = own[(m * N + n) * Thread::threads];
    }
    const int r = thread.row_of(m);
    modifiers.apply(
        row, [&](int n) { return where(r, thread.col_of(n)); }, row_slopes);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      own[(m * N + n) * Thread::threads] = row[n];
      if (slopes != nullptr) {
        slopes[(m * N + n) * Thread::threads + threadIdx.x] = row_slopes[n];
      }
    }
  }
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      scores[m][n] = own[(m * N + n) * Thread::threads];
    }
  }
}

// Bit m * N + n says whether dropout keeps element (m, n) of a block whose rows are queries.
template <int M, int N, class Thread>
__device__ inline std::uint64_t kept_bits(const Thread& thread, const DropoutArguments& dropout, std::int64_t b,
                                          std::int64_t h, std::int64_t first_row, std::int64_t first_key) {
  static_assert(M * N <= 64);
  std::uint64_t bits = 0;
#pragma unroll 1
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int n = 0; n < N; n += 4) {
      const auto words = dropout_words(dropout, b, h, first_row + thread.row_of(m), (first_key + thread.col_of(n)) / 4);
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        bits |= std::uint64_t{is_kept(dropout, words[x])} << (m * N + n + x);
      }
    }
  }
  return bits;
}

// The same for a block whose rows are keys and whose columns are queries.
template <int M, int N, class Thread>
__device__ inline std::uint64_t kept_bits_transposed(const Thread& thread, const DropoutArguments& dropout,
                                                     std::int64_t b, std::int64_t h, std::int64_t first_key,
                                                     std::int64_t first_query) {
  static_assert(M * N <= 64);
  std::uint64_t bits = 0;
#pragma unroll 1
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int m = 0; m < M; m += 4) {
      const auto words =
          dropout_words(dropout, b, h, first_query + thread.col_of(n), (first_key + thread.row_of(m)) / 4);
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        bits |= std::uint64_t{is_kept(dropout, words[x])} << ((m + x) * N + n);
      }
    }
  }
  return bits;
}

// What of a tile's masking is needed: inside every row's range and without a modifier only the scale remains.
__device__ inline bool is_plain(const TileRange& range, std::int64_t key, int keys, bool only_scale) {
  return only_scale && key >= range.full_begin && key + keys <= range.full_end;
}

}  // namespace headway::cuda
