// Bringing queries, keys and values into the form that accumulate() multiplies: scalars of the compute type, or, for a
// vocabulary that multiplies pairs, pairs of bf16.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/args.h"
#include "engines/cpu/kernel/pack.h"
#include "engines/cpu/kernel/row_source.h"
#include "engines/cpu/kernel/tile.h"
#include "engines/cpu/kernel/tiles.h"

namespace headway::cpu {
namespace {

// How many operands hold `count` scalars; for tiles whole ones.
template <class S>
HEADWAY_INLINE std::int64_t folded(std::int64_t count) {
  if constexpr (HasTiles<S>) {
    return (count + tile_steps - 1) / tile_steps * tile_pairs;
  }
  return (count + Operands<S>::fold - 1) / Operands<S>::fold;
}

template <class S>
struct OperandRows {
  const typename Operands<S>::Scalar* data;
  std::int64_t ld;
};

// Scalars: queries are scaled while they are packed; rows are read in place where they can be.
template <class S, class In, int fold = Operands<S>::fold>
struct Packing {
  using Scalar = typename S::Scalar;

  // panel[d][lane] = factor * query(row_begin + lane, d)
  static void queries(const Matrix& matrix, std::int64_t row_begin, int rows, std::int64_t dim, double factor,
                      Scalar* panel, std::int64_t width) {
    pack_scaled<S, In>(matrix, row_begin, rows, dim, static_cast<Scalar>(factor), panel, width);
  }
  // Of a Matrix, or of any source of rows.
  template <class Source>
  static OperandRows<S> keys(const Source& source, std::int64_t begin, std::int64_t count, std::int64_t dim,
                             Scalar* copy) {
    const Rows<Scalar> rows = readable_rows<S, In>(source, begin, count, dim, copy);
    return {rows.data, rows.ld};
  }
  static OperandRows<S> values(const RowSource& source, std::int64_t begin, std::int64_t count, std::int64_t dim,
                               Scalar* copy, std::int64_t, typename Operands<S>::Magnitudes&, const void**) {
    return keys(source, begin, count, dim, copy);
  }
  static OperandRows<S> copied_keys(const Matrix& matrix, std::int64_t begin, std::int64_t count, std::int64_t dim,
                                    Scalar* copy) {
    copy_rows<S, In>(matrix, begin, count, dim, copy, dim);
    return {copy, dim};
  }
  // Whether keys never need a copy.
  static bool keys_in_place(const RowSource& source, std::int64_t) {
    return is_one_run(source) && readable_in_place<S, In>(source.rows);
  }
};

// Pairs of bf16: queries and keys pair neighbours along d, values pair neighbouring keys. Rows are read 32 elements at
// a time; where a row or a pair ends early, zeros follow.
template <class S, class In>
struct Packing<S, In, 2> {
  using Operand = Operands<S>;
  using Scalar = typename Operand::Scalar;
  using Vector = typename Operand::Vector;
  static constexpr int part = 2 * S::lanes;  // elements of a vector

  // panel[d / 2][lane] = factor * (query(row_begin + lane, d), query(row_begin + lane, d + 1)), for powers of two
  static HEADWAY_NOINLINE void queries(const Matrix& matrix, std::int64_t row_begin, int rows, std::int64_t dim,
                                       double factor, Scalar* panel, std::int64_t width) {
    const In* first = static_cast<const In*>(matrix.data) + row_begin * matrix.row_stride;
    for (std::int64_t d = 0; d < dim; d += part) {
      const int count = at_most(dim - d, part);
      typename S::Vector block[S::lanes];
      HEADWAY_UNROLL
      for (int r = 0; r < S::lanes; ++r) {
        const In* row = first + r * matrix.row_stride;
        block[r] = r < rows ? __builtin_bit_cast(typename S::Vector, row_part(row, matrix.column_stride, d, count))
                            : S::zero();
      }
      S::transpose(block);
      HEADWAY_UNROLL
      for (int r = 0; r < S::lanes; ++r) {
        if (HasTiles<S> || 2 * r < count) {
          Operand::store(panel + (d / 2 + r) * width,
                         Operand::times_power(__builtin_bit_cast(Vector, block[r]), factor));
        }
      }
    }
  }

  static bool keys_in_place(const Matrix& matrix, std::int64_t dim) {
    return !HasTiles<S> && matrix.column_stride == 1 && matrix.row_stride % 2 == 0 && dim % 2 == 0;
  }
  static bool keys_in_place(const RowSource& source, std::int64_t dim) {
    return is_one_run(source) && keys_in_place(source.rows, dim);
  }

  static HEADWAY_NOINLINE OperandRows<S> keys(const Matrix& matrix, std::int64_t begin, std::int64_t count,
                                              std::int64_t dim, Scalar* copy) {
    const In* first = static_cast<const In*>(matrix.data) + begin * matrix.row_stride;
    if (keys_in_place(matrix, dim)) {
      return {reinterpret_cast<const Scalar*>(first), matrix.row_stride / 2};
    }
    return copied_keys(matrix, begin, count, dim, copy);
  }
  static OperandRows<S> keys(const RowSource& source, std::int64_t begin, std::int64_t count, std::int64_t dim,
                             Scalar* copy) {
    if (in_one_run(source, begin, count)) {
      return keys(run_at<In>(source, begin), 0, count, dim, copy);
    }
    const std::int64_t ld = folded<S>(dim);
    each_run<In>(source, begin, count, [&](const Matrix& run, std::int64_t done, std::int64_t rows) {
      copied_keys(run, 0, rows, dim, copy + done * ld);
    });
    return {copy, ld};
  }

  static HEADWAY_NOINLINE OperandRows<S> copied_keys(const Matrix& matrix, std::int64_t begin, std::int64_t count,
                                                     std::int64_t dim, Scalar* copy) {
    const In* first = static_cast<const In*>(matrix.data) + begin * matrix.row_stride;
    const std::int64_t ld = folded<S>(dim);
    for (std::int64_t j = 0; j < count; ++j) {
      for (std::int64_t d = 0; d < dim; d += part) {
        const int some = at_most(dim - d, part);
        Operand::store_first(copy + j * ld + d / 2, HasTiles<S> ? tile_pairs : (some + 1) / 2,
                             row_part(first + j * matrix.row_stride, matrix.column_stride, d, some));
      }
    }
    return {copy, ld};
  }

  // copy[j / 2][d] = (value(j, d), value(j + 1, d)); `seen` sees all values.
  static OperandRows<S> values(const Matrix& matrix, std::int64_t begin, std::int64_t count, std::int64_t dim,
                               Scalar* copy, std::int64_t ld, typename Operand::Magnitudes& seen) {
    const In* first = static_cast<const In*>(matrix.data) + begin * matrix.row_stride;
    return paired_rows(RunRows<In>{first, matrix.row_stride}, matrix.column_stride, count, dim, copy, ld, seen);
  }
  static OperandRows<S> values(const RowSource& source, std::int64_t begin, std::int64_t count, std::int64_t dim,
                               Scalar* copy, std::int64_t ld, typename Operand::Magnitudes& seen, const void** list) {
    with_addresses<In>(source, begin, count, list, [&](const auto& rows) HEADWAY_LAMBDA {
      paired_rows(rows, source.rows.column_stride, count, dim, copy, ld, seen);
    });
    return {copy, ld};
  }

  template <class RowAt>
  static HEADWAY_NOINLINE OperandRows<S> paired_rows(const RowAt& row, std::int64_t column_stride, std::int64_t count,
                                                     std::int64_t dim, Scalar* copy, std::int64_t ld,
                                                     typename Operand::Magnitudes& seen) {
    for (std::int64_t j = 0; j < count; j += 2) {
      const In* low = row(j);
      const In* high = j + 1 < count ? row(j + 1) : nullptr;
      Scalar* target = copy + j / 2 * ld;
      for (std::int64_t d = 0; d < dim; d += part) {
        const int some = at_most(dim - d, part);
        const Vector a = row_part(low, column_stride, d, some);
        const Vector b = high != nullptr ? row_part(high, column_stride, d, some) : Operand::zero();
        seen.see(a);
        seen.see(b);
        Operand::store_interleaved(target + d, some, a, b);
      }
    }
    return {copy, ld};
  }

  // What the elements of some rows are.
  static HEADWAY_NOINLINE typename Operand::Magnitudes magnitudes(const Matrix& matrix, std::int64_t begin,
                                                                  std::int64_t end, std::int64_t dim) {
    typename Operand::Magnitudes seen;
    for (std::int64_t j = begin; j < end; ++j) {
      const In* row = static_cast<const In*>(matrix.data) + j * matrix.row_stride;
      for (std::int64_t d = 0; d < dim; d += part) {
        seen.see(row_part(row, matrix.column_stride, d, at_most(dim - d, part)));
      }
    }
    return seen;
  }

  // `count` elements of a row from column d on.
  static HEADWAY_INLINE Vector row_part(const In* row, std::int64_t stride, std::int64_t d, int count) {
    if (stride == 1) {
      return Operand::load_first(row + d, count);
    }
    In gathered[part];
    for (int c = 0; c < count; ++c) {
      gathered[c] = row[(d + c) * stride];
    }
    return Operand::load_first(gathered, count);
  }
};

}  // namespace
}  // namespace headway::cpu
