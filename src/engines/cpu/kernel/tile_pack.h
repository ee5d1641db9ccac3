// Values as tiles multiply them: transposed, with pairs of neighbouring keys along each row.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/operands.h"
#include "engines/cpu/kernel/tiles.h"

namespace headway::cpu {
namespace {

// Rows or columns of a matrix in whole tiles.
HEADWAY_INLINE std::int64_t in_whole_tiles(std::int64_t rows) { return (rows + tile_side - 1) / tile_side * tile_side; }

// Pairs from one row of transposed values to the next: room for `keys`, and for the zeros that a product of keys from
// any place on may reach behind them. An odd number of cache lines keeps the rows of a tile apart in the cache.
constexpr std::int64_t transposed_ld(std::int64_t keys) {
  return ((keys + tile_steps - 1) / tile_steps | 1) * tile_pairs + 2 * tile_pairs;
}

template <class S>
HEADWAY_INLINE void store_transposed(typename Operands<S>::Vector (&rows)[tile_pairs],
                                     typename Operands<S>::Scalar* target, std::int64_t ld) {
  Operands<S>::transpose(rows);
  HEADWAY_UNROLL
  for (int r = 0; r < tile_side; ++r) {
    Operands<S>::store(target + r * ld, rows[r]);
  }
}

// copy[d][j / 2] = (value(j, d), value(j + 1, d)) for `count` rows and whole tiles of d; zeros behind the values and,
// of one more tile of keys, behind the keys. `seen` sees all values.
template <class S, class In, class RowAt>
HEADWAY_NOINLINE void transpose_rows(const RowAt& row, std::int64_t column_stride, std::int64_t count, std::int64_t dim,
                                     typename Operands<S>::Scalar* copy, std::int64_t ld,
                                     typename Operands<S>::Magnitudes& seen) {
  using Operand = Operands<S>;
  using Vector = typename Operand::Vector;
  const auto part = [&](std::int64_t j, std::int64_t d, int some) HEADWAY_LAMBDA {
    return j < count ? Packing<S, In>::row_part(row(j), column_stride, d, some) : Operand::zero();
  };
  const std::int64_t whole = (count + tile_steps - 1) / tile_steps * tile_steps;
  for (std::int64_t d = 0; d < dim; d += 2 * tile_side) {
    const int some = at_most(dim - d, 2 * tile_side);
    auto* front = copy + d * ld;
    auto* back = some > tile_side ? front + tile_side * ld : nullptr;
    for (std::int64_t j = 0; j < whole; j += tile_steps) {
      Vector x[tile_pairs], y[tile_pairs];
      HEADWAY_UNROLL
      for (int pair = 0; pair < tile_pairs; ++pair) {
        const Vector low = part(j + 2 * pair, d, some);
        const Vector high = part(j + 2 * pair + 1, d, some);
        seen.see(low);
        seen.see(high);
        Operand::interleave(low, high, x[pair], y[pair]);
      }
      store_transposed<S>(x, front + j / 2, ld);
      if (back != nullptr) {
        store_transposed<S>(y, back + j / 2, ld);
      }
    }
    for (int r = 0; r < (back != nullptr ? 2 * tile_side : tile_side); ++r) {
      Operand::store(front + r * ld + whole / 2, Operand::zero());
    }
  }
}

template <class S, class In>
HEADWAY_INLINE void transpose_values(const Matrix& matrix, std::int64_t begin, std::int64_t count, std::int64_t dim,
                                     typename Operands<S>::Scalar* copy, std::int64_t ld,
                                     typename Operands<S>::Magnitudes& seen) {
  const In* first = static_cast<const In*>(matrix.data) + begin * matrix.row_stride;
  transpose_rows<S, In>(RunRows<In>{first, matrix.row_stride}, matrix.column_stride, count, dim, copy, ld, seen);
}
template <class S, class In>
HEADWAY_INLINE void transpose_values(const RowSource& source, std::int64_t begin, std::int64_t count, std::int64_t dim,
                                     typename Operands<S>::Scalar* copy, std::int64_t ld,
                                     typename Operands<S>::Magnitudes& seen, const void** list) {
  with_addresses<In>(source, begin, count, list, [&](const auto& rows) HEADWAY_LAMBDA {
    transpose_rows<S, In>(rows, source.rows.column_stride, count, dim, copy, ld, seen);
  });
}

}  // namespace
}  // namespace headway::cpu
