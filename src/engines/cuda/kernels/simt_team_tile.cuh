// Two teams of 128 threads that share the work on a tile of pairs, each with a whole product tile of its own.
#pragma once

#include "engines/cuda/kernels/simt_tile.cuh"

namespace headway::cuda {

// Blocks of 8 rows. A team's first four rows are the other's last four, so that each may hand over its last four, and
// both then have different halves of the pairs in the same registers.
template <int Columns>
struct TeamThread : SimtThread<Columns, 128 / Columns> {
  static constexpr int team_threads = 128, threads = 2 * team_threads;
  static constexpr int span = team_threads / Columns * 4;  // rows of half a tile
  int team, index;

  __device__ TeamThread()
      : SimtThread<Columns, 128 / Columns>(static_cast<int>(threadIdx.x) % team_threads),
        team(static_cast<int>(threadIdx.x) / team_threads),
        index(static_cast<int>(threadIdx.x) % team_threads) {}
  __device__ int row_of(int m) const { return (m / 4 ^ team) * span + this->row * 4 + m % 4; }
};

// [rows][Stride] numbers of shared memory whose chunks of four change places with every fourth row, and back after 32:
// 8 threads that read the same chunk of rows 4 apart, or write two chunks to 4 of them, meet different banks. No
// padding, so a tile has the size of its data.
template <int Stride>
struct Swizzled {
  // By how much, as the bits of a column that change.
  __device__ static int turn(int row) { return (row << 1 & 24) | (row >> 2 & 4); }

  // The chunk that begins with column low + high of row first + x; `first` is a multiple of 4, `high` one of 32. With x
  // and `high` known to the compiler, one address serves four rows and all columns 32 apart.
  __device__ static int at(int first, int x, int low, int high) {
    return first * Stride + (low ^ turn(first + (x & ~3))) + x * Stride + high;
  }
  __device__ static int at(int row, int column) { return at(0, row, column, 0); }
};

// Features of a step of multiply_rows.
constexpr int team_step = 16;

// c[M][From + 0..3] += a[depth][rows]^T b[cols][depth]^T with a Swizzled b. Its rows are read along their length, four
// features at a time, so that one copy of them serves this product and a later one that reads them as rows. Four
// columns a thread: with more of them registers get so short that the multiply-adds wait for each other's. The depth is
// a multiple of team_step.
template <int Stride, int From, class Thread, int M, int N, class Real>
__device__ inline void multiply_rows(const Thread& thread, const Real* a, int a_row, const Real* b, int depth,
                                     Real (&c)[M][N]) {
  constexpr int columns = 4;
  Real left[2][M], right[columns][4];
  const auto load_left = [&](int k, int into) {
#pragma unroll
    for (int m = 0; m < M; m += 4) {
      load_four(a + k * a_row + thread.row_of(m), left[into] + m);
    }
  };
  // Where the chunks of 8 features are changes by one exclusive or for all of a thread's columns.
  const int turn = Swizzled<Stride>::turn(thread.col * 4);
  const Real* own = b + thread.col_of(From) * Stride;
  const Real* halves[2] = {own + (turn & 4), own + (4 - (turn & 4))};
  const auto load_right = [&](int first, int x, int n) {
    load_four(halves[x / 4 % 2] + ((first + x / 8 * 8) ^ (turn & 24)) + n * Stride, right[n]);
  };
  if (depth > 0) {
    load_left(0, 0);
#pragma unroll
    for (int n = 0; n < columns; ++n) {
      load_right(0, 0, n);
    }
  }
#pragma unroll 1
  for (int first = 0; first < depth; first += team_step) {
    const int after = first + team_step < depth ? first + team_step : 0;
#pragma unroll
    for (int x = 0; x < team_step; ++x) {
      const int next = x + 1 < team_step ? first : after;
      load_left(next + (x + 1) % team_step, (x + 1) % 2);
#pragma unroll
      for (int n = 0; n < columns; ++n) {
#pragma unroll
        for (int m = 0; m < M; ++m) {
          c[m][From + n] = fma(left[x % 2][m], right[n][x % 4], c[m][From + n]);
        }
        if (x % 4 == 3) {
          load_right(next, (x + 1) % team_step, n);
        }
      }
    }
  }
}

}  // namespace headway::cuda
