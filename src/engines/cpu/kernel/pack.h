// Moving rows between user memory and packed panels.
#pragma once

#include <cstdint>
#include <type_traits>

#include "engines/cpu/kernel/args.h"
#include "engines/cpu/simd/common.h"

namespace headway::cpu {
namespace {

// `count` (up to S::lanes) elements of one row starting at column `at`, converted to the compute type.
template <class S, class In>
HEADWAY_INLINE typename S::Vector load_row(const In* row, std::int64_t column_stride, std::int64_t at, int count) {
  if constexpr (sizeof(In) > sizeof(typename S::Scalar)) {  // a float64 bias beside float inputs: finite stays finite
    typename S::Scalar narrowed[S::lanes];
    for (int c = 0; c < count; ++c) {
      const In value = row[(at + c) * column_stride];
      const In magnitude = value < 0 ? -value : value;
      const bool overflows = magnitude > __FLT_MAX__ && magnitude <= __DBL_MAX__;
      narrowed[c] = overflows ? (value < 0 ? -__FLT_MAX__ : __FLT_MAX__) : static_cast<typename S::Scalar>(value);
    }
    return S::load_first(narrowed, count);
  } else {
    if (column_stride == 1) {
      return S::load_first(row + at, count);
    }
    In gathered[S::lanes];
    for (int c = 0; c < count; ++c) {
      gathered[c] = row[(at + c) * column_stride];
    }
    return S::load_first(gathered, count);
  }
}

template <class S, class Out>
HEADWAY_INLINE void store_row(Out* row, std::int64_t column_stride, std::int64_t at, int count, typename S::Vector x) {
  if (column_stride == 1) {
    S::store_first(row + at, count, x);
    return;
  }
  Out scattered[S::lanes];
  S::store_first(scattered, count, x);
  for (int c = 0; c < count; ++c) {
    row[(at + c) * column_stride] = scattered[c];
  }
}

HEADWAY_INLINE int at_most(std::int64_t value, int limit) { return static_cast<int>(value < limit ? value : limit); }

// panel[c][lane] = factor * matrix(row_begin + lane, c) for `rows` lanes; the lanes behind them are 0.
template <class S, class In>
HEADWAY_NOINLINE void pack_transposed(const Matrix& matrix, std::int64_t row_begin, int rows, std::int64_t columns,
                                      typename S::Scalar factor, typename S::Scalar* panel, std::int64_t width) {
  using Vector = typename S::Vector;
  const In* first = static_cast<const In*>(matrix.data) + row_begin * matrix.row_stride;
  const Vector scale = S::set(factor);
  for (std::int64_t c = 0; c < columns; c += S::lanes) {
    const int count = at_most(columns - c, S::lanes);
    Vector block[S::lanes];
    if (rows == S::lanes && count == S::lanes && matrix.column_stride == 1) {
      HEADWAY_UNROLL
      for (int r = 0; r < S::lanes; ++r) {
        block[r] = scale * S::load_first(first + r * matrix.row_stride + c, S::lanes);
      }
    } else {
      HEADWAY_UNROLL
      for (int r = 0; r < S::lanes; ++r) {
        block[r] =
            r < rows ? scale * load_row<S>(first + r * matrix.row_stride, matrix.column_stride, c, count) : S::zero();
      }
    }
    S::transpose(block);
    HEADWAY_UNROLL
    for (int r = 0; r < S::lanes; ++r) {
      if (r < count) {
        S::store(panel + (c + r) * width, block[r]);
      }
    }
  }
}

// factor * x; where that makes 0 of a number, the least one of its sign, since what it meets may be infinite.
template <class S>
HEADWAY_INLINE typename S::Vector scaled_down(typename S::Vector x, typename S::Scalar factor) {
  using Scalar = typename S::Scalar;
  using Vector = typename S::Vector;
  constexpr auto least = static_cast<Scalar>(sizeof(Scalar) == 4 ? 0x1p-149 : 0x1p-1074);
  const Vector with_sign = S::set(factor < 0 ? -least : least);
  const Vector product = x * S::set(factor);
  const Vector rest =
      S::select(S::less(x, S::zero()), S::zero() - with_sign, S::select(S::less(S::zero(), x), with_sign, product));
  return S::select(S::equal(product, S::zero()), rest, product);
}

// Whether a factor may make 0 of numbers that are not small.
template <class Scalar>
HEADWAY_INLINE bool scales_far_down(Scalar factor) {
  return factor != 0 && factor < static_cast<Scalar>(0x1p-8) && factor > static_cast<Scalar>(-0x1p-8);
}

// panel[d][lane] = factor * row(row_begin + lane, d) of queries or keys, for their part of the scores' factor.
template <class S, class In>
HEADWAY_NOINLINE void pack_scaled(const Matrix& matrix, std::int64_t row_begin, int rows, std::int64_t columns,
                                  typename S::Scalar factor, typename S::Scalar* panel, std::int64_t width) {
  const bool far = scales_far_down(factor);
  pack_transposed<S, In>(matrix, row_begin, rows, columns, far ? 1 : factor, panel, width);
  for (std::int64_t c = 0; far && c < columns; ++c) {
    S::store(panel + c * width, scaled_down<S>(S::load(panel + c * width), factor));
  }
}

// matrix(row_begin + lane, c) = factor[lane] * panel[c][lane] for those of `rows` lanes that are `wanted`. Every 0 has
// one sign, which a number that counts for nothing may have changed.
template <class S, class Out>
HEADWAY_NOINLINE void unpack_transposed(const typename S::Scalar* panel, std::int64_t width, typename S::Vector factor,
                                        const WritableMatrix& matrix, std::int64_t row_begin, int rows,
                                        std::int64_t columns, std::uint64_t wanted = ~std::uint64_t{0}) {
  using Vector = typename S::Vector;
  Out* first = static_cast<Out*>(matrix.data) + row_begin * matrix.row_stride;
  for (std::int64_t c = 0; c < columns; c += S::lanes) {
    const int count = at_most(columns - c, S::lanes);
    Vector block[S::lanes];
    HEADWAY_UNROLL
    for (int r = 0; r < S::lanes; ++r) {
      block[r] = r < count ? factor * (S::zero() + S::load(panel + (c + r) * width)) : S::zero();
    }
    S::transpose(block);
    HEADWAY_UNROLL
    for (int r = 0; r < S::lanes; ++r) {
      if (r < rows && (wanted >> r & 1) != 0) {
        store_row<S>(first + r * matrix.row_stride, matrix.column_stride, c, count, block[r]);
      }
    }
  }
}

// matrix(row_begin + r, column_begin + c) = numbers[r * ld + c]
template <class S, class Out>
HEADWAY_NOINLINE void store_rows(const typename S::Scalar* numbers, std::int64_t ld, const WritableMatrix& matrix,
                                 std::int64_t row_begin, std::int64_t rows, std::int64_t column_begin,
                                 std::int64_t columns) {
  Out* first = static_cast<Out*>(matrix.data) + row_begin * matrix.row_stride + column_begin * matrix.column_stride;
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < columns; c += S::lanes) {
      store_row<S>(first + r * matrix.row_stride, matrix.column_stride, c, at_most(columns - c, S::lanes),
                   S::load(numbers + r * ld + c));
    }
  }
}

// Rows that broadcasts can read: user memory itself where its type and layout allow, else a copy in the compute type.
template <class Scalar>
struct Rows {
  const Scalar* data;
  std::int64_t ld;
};

template <class S, class In>
HEADWAY_INLINE bool readable_in_place(const Matrix& matrix) {
  return std::is_same_v<In, typename S::Scalar> && matrix.column_stride == 1;
}

// copy[r][c] = matrix(row_begin + r, c), rows of the copy `ld` apart.
template <class S, class In>
HEADWAY_NOINLINE void copy_rows(const Matrix& matrix, std::int64_t row_begin, std::int64_t rows, std::int64_t columns,
                                typename S::Scalar* copy, std::int64_t ld) {
  const In* first = static_cast<const In*>(matrix.data) + row_begin * matrix.row_stride;
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < columns; c += S::lanes) {
      const int count = at_most(columns - c, S::lanes);
      S::store_first(copy + r * ld + c, count,
                     load_row<S>(first + r * matrix.row_stride, matrix.column_stride, c, count));
    }
  }
}

template <class S, class In>
HEADWAY_NOINLINE Rows<typename S::Scalar> readable_rows(const Matrix& matrix, std::int64_t row_begin, std::int64_t rows,
                                                        std::int64_t columns, typename S::Scalar* copy) {
  const In* first = static_cast<const In*>(matrix.data) + row_begin * matrix.row_stride;
  if constexpr (std::is_same_v<In, typename S::Scalar>) {
    if (matrix.column_stride == 1) {
      return {first, matrix.row_stride};
    }
  }
  copy_rows<S, In>(matrix, row_begin, rows, columns, copy, columns);
  return {copy, columns};
}

// Columns of a copied row whose last vector is whole.
template <class S>
HEADWAY_INLINE std::int64_t padded(std::int64_t columns) {
  return (columns + S::lanes - 1) / S::lanes * S::lanes;
}

// Whether a factor of 0 can forget each of these numbers.
template <class S>
HEADWAY_NOINLINE bool rows_are_finite(const Rows<typename S::Scalar>& rows, std::int64_t begin, std::int64_t end,
                                      std::int64_t columns) {
  typename S::Vector zeros = S::zero();  // NaN after 0 * inf or 0 * NaN
  for (std::int64_t r = begin; r < end; ++r) {
    for (std::int64_t c = 0; c < columns; c += S::lanes) {
      zeros = S::fma(S::load_first(rows.data + r * rows.ld + c, at_most(columns - c, S::lanes)), S::zero(), zeros);
    }
  }
  return !S::any(S::not_less_equal(zeros, S::zero()));
}

}  // namespace
}  // namespace headway::cpu
