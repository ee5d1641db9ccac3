// Writing a register tile whose lanes are columns straight to user memory.
#pragma once

#include <cstdint>
#include <type_traits>

#include "engines/cpu/kernel/args.h"
#include "engines/cpu/kernel/pack.h"
#include "engines/cpu/kernel/score_factor.h"
#include "engines/cpu/kernel/tile.h"

namespace headway::cpu {
namespace {

// matrix(row + c, column + lane of v) = acc[c][v], but for what lies behind the matrix's last column.
template <class S, class Out, int NV, int NB>
HEADWAY_INLINE void store_tile(const Accumulators<S, NV, NB>& acc, const WritableMatrix& matrix, std::int64_t row,
                               std::int64_t column, std::int64_t columns) {
  using Scalar = typename S::Scalar;
  if constexpr (std::is_same_v<Out, Scalar>) {
    if (matrix.column_stride == 1 && column + NV * S::lanes <= columns) {
      Scalar* first = static_cast<Scalar*>(matrix.data) + row * matrix.row_stride + column;
      HEADWAY_UNROLL
      for (int c = 0; c < NB; ++c) {
        HEADWAY_UNROLL
        for (int v = 0; v < NV; ++v) {
          S::store(first + c * matrix.row_stride + v * S::lanes, acc[c][v]);
        }
      }
      return;
    }
  }
  alignas(64) Scalar numbers[NB * NV * S::lanes];
  HEADWAY_UNROLL
  for (int c = 0; c < NB; ++c) {
    HEADWAY_UNROLL
    for (int v = 0; v < NV; ++v) {
      S::store(numbers + (c * NV + v) * S::lanes, acc[c][v]);
    }
  }
  store_rows<S, Out>(numbers, NV * S::lanes, matrix, row, NB, column, at_most(columns - column, NV * S::lanes));
}

// acc[c][v] *= factor. A sum of -0 becomes 0 first: its sign may come from what a 0 was multiplied by.
template <class S, int NV, int NB>
HEADWAY_INLINE void scale_tile(Accumulators<S, NV, NB>& acc, double factor) {
  const Scaling<S> scaled(factor);
  HEADWAY_UNROLL
  for (int c = 0; c < NB; ++c) {
    HEADWAY_UNROLL
    for (int v = 0; v < NV; ++v) {
      acc[c][v] = scaled(S::zero() + acc[c][v]);
    }
  }
}

}  // namespace
}  // namespace headway::cpu
