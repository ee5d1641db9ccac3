// What the matrix product multiplies: numbers of the compute type, or, for a vocabulary that multiplies pairs, pairs
// along the depth. Here they are read from user memory.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/operands.h"
#include "engines/cpu/kernel/pack.h"
#include "engines/cpu/kernel/tile.h"
#include "engines/cpu/simd/common.h"

namespace headway::cpu {
namespace {

// Columns of two consecutive rows along the depth, next to each other in memory; a vocabulary without pairs reads the
// first row alone.
template <class In>
struct DepthRows {
  const In* first;
  const In* second;  // null: the depth ends between them
};

template <class S, class In, int fold = Operands<S>::fold>
struct GemmOperands {
  using Vector = typename S::Vector;

  // Of `count` columns, up to a vector's lanes; zeros behind them.
  HEADWAY_INLINE static Vector from_rows(const DepthRows<In>& rows, int count) {
    return S::load_first(rows.first, count);
  }
  // The same for NV vectors side by side, with last_count columns in the last.
  template <int NV>
  HEADWAY_INLINE static void load_panel(const DepthRows<In>& rows, int last_count, Vector (&x)[NV]) {
    HEADWAY_UNROLL
    for (int v = 0; v < NV; ++v) {
      x[v] = from_rows({rows.first + v * S::lanes, nullptr}, v + 1 < NV ? S::lanes : last_count);
    }
  }
  // Of `count` numbers of one row, up to a vector's, that follow each other along the depth.
  HEADWAY_INLINE static Vector along_row(const In* numbers, int count) { return S::load_first(numbers, count); }
  HEADWAY_INLINE static void transpose(Vector (&block)[S::lanes]) { S::transpose(block); }
  HEADWAY_INLINE static void store(typename S::Scalar* to, Vector x) { S::store(to, x); }
};

template <class S, class In>
struct GemmOperands<S, In, 2> {
  using Vector = typename Operands<S>::Vector;

  HEADWAY_INLINE static Vector from_rows(const DepthRows<In>& rows, int count) {
    return Operands<S>::rows_paired(rows.first, rows.second, count);
  }
  template <int NV>
  HEADWAY_INLINE static void load_panel(const DepthRows<In>& rows, int last_count, Vector (&x)[NV]) {
    if (NV % 2 == 0 && last_count == S::lanes && rows.second != nullptr) {  // a whole panel
      HEADWAY_UNROLL
      for (int v = 0; v + 1 < NV; v += 2) {
        const int at = v * S::lanes;
        Operands<S>::interleave(Operands<S>::load_first(rows.first + at, 32),
                                Operands<S>::load_first(rows.second + at, 32), x[v], x[v + 1]);
      }
      return;
    }
    HEADWAY_UNROLL
    for (int v = 0; v < NV; ++v) {
      const int at = v * S::lanes;
      x[v] = from_rows({rows.first + at, rows.second == nullptr ? nullptr : rows.second + at},
                       v + 1 < NV ? S::lanes : last_count);
    }
  }
  HEADWAY_INLINE static Vector along_row(const In* numbers, int count) {
    return Operands<S>::load_first(numbers, count);
  }
  HEADWAY_INLINE static void transpose(Vector (&block)[S::lanes]) { Operands<S>::transpose(block); }
  HEADWAY_INLINE static void store(typename Operands<S>::Scalar* to, Vector x) { Operands<S>::store(to, x); }
};

// row[at * stride], row[(at + 1) * stride] ... where they lie if they are neighbours, else in `buffer`.
template <class In>
HEADWAY_INLINE const In* neighbours(const In* row, std::int64_t stride, std::int64_t at, int count, In* buffer) {
  if (stride == 1) {
    return row + at;
  }
  for (int c = 0; c < count; ++c) {
    buffer[c] = row[(at + c) * stride];
  }
  return buffer;
}

}  // namespace
}  // namespace headway::cpu
