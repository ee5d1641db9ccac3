// Bringing queries, keys and values into the form that accumulate() multiplies: scalars of the compute type, or, for a
// vocabulary that multiplies pairs, pairs of bf16.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/args.h"
#include "engines/cpu/kernel/pack.h"
#include "engines/cpu/kernel/tile.h"

namespace headway::cpu {
namespace {

// How many operands hold `count` scalars.
template <class S>
HEADWAY_INLINE std::int64_t folded(std::int64_t count) {
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
    pack_transposed<S, In>(matrix, row_begin, rows, dim, static_cast<Scalar>(factor), panel, width);
  }
  static OperandRows<S> keys(const Matrix& matrix, std::int64_t begin, std::int64_t count, std::int64_t dim,
                             Scalar* copy) {
    const Rows<Scalar> rows = readable_rows<S, In>(matrix, begin, count, dim, copy);
    return {rows.data, rows.ld};
  }
  static OperandRows<S> values(const Matrix& matrix, std::int64_t begin, std::int64_t count, std::int64_t dim,
                               Scalar* copy) {
    return keys(matrix, begin, count, dim, copy);
  }
  static bool keys_in_place(const Matrix& matrix, std::int64_t) { return readable_in_place<S, In>(matrix); }
};

// Pairs of bf16: queries and keys pair neighbours along d, values pair neighbouring keys.
template <class S, class In>
struct Packing<S, In, 2> {
  using Scalar = typename Operands<S>::Scalar;

  static HEADWAY_NOINLINE void queries(const Matrix& matrix, std::int64_t row_begin, int rows, std::int64_t dim, double,
                                       Scalar* panel, std::int64_t width) {
    const In* first = static_cast<const In*>(matrix.data) + row_begin * matrix.row_stride;
    for (std::int64_t d = 0; d < dim; d += 2) {
      Scalar* target = panel + d / 2 * width;
      for (int r = 0; r < S::lanes; ++r) {
        target[r] = r < rows ? pair(first + r * matrix.row_stride, matrix.column_stride, d, dim) : 0;
      }
    }
  }

  static bool keys_in_place(const Matrix& matrix, std::int64_t dim) {
    return matrix.column_stride == 1 && matrix.row_stride % 2 == 0 && dim % 2 == 0;
  }

  static HEADWAY_NOINLINE OperandRows<S> keys(const Matrix& matrix, std::int64_t begin, std::int64_t count,
                                              std::int64_t dim, Scalar* copy) {
    const In* first = static_cast<const In*>(matrix.data) + begin * matrix.row_stride;
    if (keys_in_place(matrix, dim)) {
      return {reinterpret_cast<const Scalar*>(first), matrix.row_stride / 2};
    }
    const std::int64_t ld = folded<S>(dim);
    for (std::int64_t j = 0; j < count; ++j) {
      for (std::int64_t d = 0; d < dim; d += 2) {
        copy[j * ld + d / 2] = pair(first + j * matrix.row_stride, matrix.column_stride, d, dim);
      }
    }
    return {copy, ld};
  }

  // copy[j / 2][d] = (value(j, d), value(j + 1, d)), with 0 beside a last odd one
  static HEADWAY_NOINLINE OperandRows<S> values(const Matrix& matrix, std::int64_t begin, std::int64_t count,
                                                std::int64_t dim, Scalar* copy) {
    const In* first = static_cast<const In*>(matrix.data) + begin * matrix.row_stride;
    for (std::int64_t j = 0; j < count; j += 2) {
      const In* low = first + j * matrix.row_stride;
      const In* high = j + 1 < count ? low + matrix.row_stride : nullptr;
      Scalar* target = copy + j / 2 * dim;
      std::int64_t d = 0;
      if (matrix.column_stride == 1 && high != nullptr) {
        for (; d + 32 <= dim; d += 32) {
          Operands<S>::interleave(low + d, high + d, target + d);
        }
      }
      for (; d < dim; ++d) {
        const std::uint32_t upper = high != nullptr ? high[d * matrix.column_stride].bits : 0;
        target[d] = low[d * matrix.column_stride].bits | upper << 16;
      }
    }
    return {copy, dim};
  }

 private:
  static HEADWAY_INLINE std::uint32_t pair(const In* row, std::int64_t stride, std::int64_t d, std::int64_t dim) {
    const std::uint32_t upper = d + 1 < dim ? row[(d + 1) * stride].bits : 0;
    return row[d * stride].bits | upper << 16;
  }
};

}  // namespace
}  // namespace headway::cpu
