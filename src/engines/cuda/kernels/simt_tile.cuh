// Tiles of exact f32 or f64 arithmetic: plain fused multiply-adds on register blocks, operands in shared memory.
//
// 128 threads form a grid of 16 x 8 (or 8 x 16), or 256 one of 16 x 16. A product tile C[rows, cols] += A[rows, depth]
// B[depth, cols] reads A as columns ([depth][rows]) and B as rows ([depth][cols]), so that a thread's operands of one
// step are 4 neighbours each: for an 8 x 8 block 4 loads of 16 bytes feed 64 multiply-adds. Thread (r, c) has the rows
// 4 r + 0..3 of each span of 64, and the columns 4 c + 0..3 of each span of 32 or 64.
#pragma once

#include "engines/cuda/elements.cuh"
#include "engines/cuda/ptx/copy_async.cuh"

namespace headway::cuda {

constexpr int simt_pad = 4;   // keeps 16-byte alignment, and neighbours in other banks
constexpr int simt_step = 8;  // of a product's depth, unrolled

// A warp has all columns of a few rows. Bit 1 of the lane chooses a row and bit 0 a column: so lanes that differ in one
// of them read the same 16 bytes of one operand, and shared memory serves half a warp at once.
template <int Columns, int Rows = 16>
struct SimtThread {
  static_assert(Columns == 8 || Columns == 16);
  static constexpr int threads = Rows * Columns;
  int row, col;  // 0..Rows - 1, 0..Columns - 1

  __device__ SimtThread() : SimtThread(static_cast<int>(threadIdx.x)) {}
  __device__ explicit SimtThread(int index) {
    const int lane = index % 32, warp = index / 32;
    const int high = lane >> 2;
    row = warp * (32 / Columns) + (Columns == 8 ? (high >> 2) * 2 : 0) + (lane >> 1 & 1);
    col = (Columns == 8 ? high & 3 : high) * 2 + (lane & 1);
  }
  __device__ int row_of(int m) const { return m / 4 * 4 * Rows + row * 4 + m % 4; }
  __device__ int col_of(int n) const { return n / 4 * 4 * Columns + col * 4 + n % 4; }

  // Over the threads that share rows.
  template <class Value, class Combine>
  __device__ static Value over_row(Value value, const Combine& combine) {
    value = combine(value, __shfl_xor_sync(0xffffffffu, value, 1));
    value = combine(value, __shfl_xor_sync(0xffffffffu, value, 4));
    value = combine(value, __shfl_xor_sync(0xffffffffu, value, 8));
    return Columns == 8 ? value : combine(value, __shfl_xor_sync(0xffffffffu, value, 16));
  }
  template <class Real>
  __device__ static Real row_sum(Real value) {
    return over_row(value, [](Real x, Real y) { return x + y; });
  }
  template <class Real>
  __device__ static Real row_maximum(Real value) {
    return over_row(value, [](Real x, Real y) { return fmax(x, y); });
  }
};

// Four neighbours from shared memory.
template <class Real>
__device__ inline void load_four(const Real* from, Real* to) {
  if constexpr (sizeof(Real) == 4) {
    const float4 four = *reinterpret_cast<const float4*>(from);
    to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
  } else {
    const double2 low = *reinterpret_cast<const double2*>(from), high = *reinterpret_cast<const double2*>(from + 2);
    to[0] = low.x, to[1] = low.y, to[2] = high.x, to[3] = high.y;
  }
}

template <class Real>
__device__ inline void store_four(Real* to, Real a, Real b, Real c, Real d) {
  if constexpr (sizeof(Real) == 4) {
    *reinterpret_cast<float4*>(to) = {a, b, c, d};
  } else {
    reinterpret_cast<double2*>(to)[0] = {a, b};
    reinterpret_cast<double2*>(to)[1] = {c, d};
  }
}

template <class Real, int M, int N>
__device__ inline void clear(Real (&block)[M][N]) {
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      block[m][n] = 0;
    }
  }
}

// A forbidden pair's coefficient is -0. Those of allowed pairs never are: adding +0 turns -0 into +0.
__device__ inline bool is_marked(float coefficient) { return __float_as_uint(coefficient) == 0x80000000u; }
__device__ inline bool is_marked(double coefficient) { return coefficient == 0 && signbit(coefficient); }

// c[M][N] += a[depth][rows]^T b[depth][cols], where a(first, x, r) and b(first, x, c) say where four neighbours of step
// first + x lie; x is known to the compiler, and `first`, like the depth, is a multiple of simt_step. `Skip` leaves out
// the terms whose a is marked as forbidden, so that what b holds there cannot matter; every other result keeps its
// bits.
template <bool Skip, class Thread, class Left, class Right, int M, int N, class Real>
__device__ inline void multiply(const Thread& thread, const Left& a, const Right& b, int depth, Real (&c)[M][N]) {
  // Operands are loaded one step ahead.
  Real left[2][M], right[2][N];
  const auto load = [&](int first, int x, int into) {
#pragma unroll
    for (int m = 0; m < M; m += 4) {
      load_four(a(first, x, thread.row_of(m)), left[into] + m);
    }
#pragma unroll
    for (int n = 0; n < N; n += 4) {
      load_four(b(first, x, thread.col_of(n)), right[into] + n);
    }
  };
  if (depth > 0) {
    load(0, 0, 0);
  }
#pragma unroll 1
  for (int first = 0; first < depth; first += simt_step) {
    const int after = first + simt_step < depth ? first + simt_step : 0;
#pragma unroll
    for (int x = 0; x < simt_step; ++x) {
      load(x + 1 < simt_step ? first : after, (x + 1) % simt_step, (x + 1) % 2);
#pragma unroll
      for (int m = 0; m < M; ++m) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
          const Real l = left[x % 2][m], r = right[x % 2][n];
          if constexpr (Skip) {
            c[m][n] = is_marked(l) ? c[m][n] : fma(l, r, c[m][n]);
          } else {
            c[m][n] = fma(l, r, c[m][n]);
          }
        }
      }
    }
  }
}

template <bool Skip, class Thread, int M, int N, class Real>
__device__ inline void multiply(const Thread& thread, const Real* a, int a_row, const Real* b, int b_row, int depth,
                                Real (&c)[M][N]) {
  multiply<Skip>(
      thread, [&](int first, int x, int r) { return a + (first + x) * a_row + r; },
      [&](int first, int x, int col) { return b + (first + x) * b_row + col; }, depth, c);
}

// The rows of one head's view from `first` on; those at or past `end` read as 0.
template <class T>
struct RowSource {
  const T* data;
  std::int64_t row, feature;
  std::int64_t first, end;
  bool chunks;

  __device__ RowSource(const Rows& view, std::int64_t b, std::int64_t h, std::int64_t begin, std::int64_t from,
                       std::int64_t count)
      : data(head_of<T>(view, b, h) + begin * view.row),
        row(view.row),
        feature(view.feature),
        first(from),
        end(count),
        chunks(view.chunks && sizeof(T) == 4) {}

  // Elements d to d + 3 of a row; 0 from `width` on.
  template <class Real>
  __device__ void four(int r, std::int64_t d, std::int64_t width, Real* to) const {
    const std::int64_t at = first + r;
    if (at >= end) {
      to[0] = to[1] = to[2] = to[3] = 0;
      return;
    }
    const T* from = data + at * row + d * feature;
    if (chunks && d + 4 <= width) {
      load_four(reinterpret_cast<const Real*>(from), to);
      return;
    }
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      to[x] = d + x < width ? number<Real>(from[x * feature]) : Real(0);
    }
  }
};

// to[depth][stride] = features [d, d + depth) of Rows rows, transposed: neighbouring threads take neighbouring rows,
// and store without bank conflicts. The loads of a few steps are under way before the first is stored.
template <int Threads, int Rows, class Source, class Real>
__device__ inline void fill_columns(const Source& source, std::int64_t d, int depth, std::int64_t width, Real* to,
                                    int stride) {
  static_assert(Threads % Rows == 0);
  constexpr int batch = 4, step = Threads / Rows;
  const int r = static_cast<int>(threadIdx.x) % Rows, begin = static_cast<int>(threadIdx.x) / Rows * 4;
#pragma unroll 1
  for (int k = begin; k < depth; k += 4 * step * batch) {
    Real four[batch][4];
#pragma unroll
    for (int x = 0; x < batch; ++x) {
      if (k + 4 * step * x < depth) {
        source.four(r, d + k + 4 * step * x, width, four[x]);
      }
    }
#pragma unroll
    for (int x = 0; x < batch; ++x) {
      if (k + 4 * step * x < depth) {
#pragma unroll
        for (int y = 0; y < 4; ++y) {
          to[(k + 4 * step * x + y) * stride + r] = four[x][y];
        }
      }
    }
  }
}

// Features [d, d + Cols) of Rows rows, copied by `Threads` threads of which this is number `thread`: to(r, k) is where
// the four from d + k of row r go.
template <int Threads, int Rows, int Cols, class Source, class Place>
__device__ inline void fill_rows(const Source& source, std::int64_t d, std::int64_t width, int thread,
                                 const Place& to) {
  using Real = std::remove_pointer_t<decltype(to(0, 0))>;
  constexpr int batch = 4, step = Threads / (Cols / 4);
  const int k = thread % (Cols / 4) * 4, begin = thread / (Cols / 4);
#pragma unroll 1
  for (int r = begin; r < Rows; r += step * batch) {
    Real four[batch][4];
#pragma unroll
    for (int x = 0; x < batch; ++x) {
      source.four(r + step * x, d + k, width, four[x]);
    }
#pragma unroll
    for (int x = 0; x < batch; ++x) {
      store_four(to(r + step * x, k), four[x][0], four[x][1], four[x][2], four[x][3]);
    }
  }
}

// The same two fills begun now and finished by a later wait_for_copies, where no conversion is needed; else done at
// once. A warp takes 8 features of 4 rows: whole sectors of global memory, and 32 banks of shared memory. At most
// `Most` features.
template <int Threads, int Rows, int Most, class T, class Real>
__device__ inline void start_columns(const RowSource<T>& source, int depth, std::int64_t width, Real* to, int stride) {
  if constexpr (std::is_same_v<T, Real>) {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    const int k_own = lane % 8, r_own = warp * 4 + lane / 8;
    constexpr int step = Threads / 8;
    const T* from = source.data + (source.first + r_own) * source.row + k_own * source.feature;
    if (width == Most && source.feature == 1 && source.first + Rows <= source.end) {  // nothing to choose or to add up
      const std::uint32_t address = ptx::shared_address(to + k_own * stride + r_own);
#pragma unroll
      for (int r = 0; r < Rows; r += step) {
#pragma unroll
        for (int k = 0; k < Most; k += 8) {
          ptx::copy_element<sizeof(T)>(address + (k * stride + r) * static_cast<int>(sizeof(T)), from + k, true);
        }
        from += step * source.row;
      }
      return;
    }
#pragma unroll 1
    for (int k = k_own; k < depth; k += 8) {
      const T* at = from;
#pragma unroll
      for (int r = r_own; r < Rows; r += step) {
        const bool any = k < width && source.first + r < source.end;
        ptx::copy_element<sizeof(T)>(ptx::shared_address(to + k * stride + r), any ? at : source.data, any);
        at += step * source.row;
      }
      from += 8 * source.feature;
    }
  } else {
    fill_columns<Threads, Rows>(source, 0, depth, width, to, stride);
  }
}

template <int Threads, int Rows, int Cols, class T, class Place>
__device__ inline void start_rows(const RowSource<T>& source, std::int64_t d, std::int64_t width, int thread,
                                  const Place& to) {
  if constexpr (std::is_same_v<T, float>) {
    if (source.chunks) {
      constexpr int step = Threads / (Cols / 4);
      const int k = thread % (Cols / 4) * 4, begin = thread / (Cols / 4);
      const std::int64_t left = width - d - k;
      const int bytes = left <= 0 ? 0 : left < 4 ? static_cast<int>(left) * 4 : 16;
      const T* from = source.data + (source.first + begin) * source.row + d + k;
      if (width - d >= Cols && source.first + Rows <= source.end) {  // nothing to choose
#pragma unroll
        for (int x = 0; x < Rows; x += step) {
          ptx::copy_16(ptx::shared_address(to(begin + x, k)), from + x * source.row, 16);
        }
        return;
      }
#pragma unroll
      for (int r = begin; r < Rows; r += step) {
        const bool any = bytes > 0 && source.first + r < source.end;
        ptx::copy_16(ptx::shared_address(to(r, k)), any ? from : source.data, any ? bytes : 0);
        from += step * source.row;
      }
      return;
    }
  }
  fill_rows<Threads, Rows, Cols>(source, d, width, thread, to);
}

// The same by all threads of a block, to to[Rows][stride].
template <int Threads, int Rows, int Cols, class T, class Real>
__device__ inline void start_rows(const RowSource<T>& source, std::int64_t d, std::int64_t width, Real* to,
                                  int stride) {
  start_rows<Threads, Rows, Cols>(source, d, width, static_cast<int>(threadIdx.x),
                                  [&](int r, int k) { return to + r * stride + k; });
}

}  // namespace headway::cuda
