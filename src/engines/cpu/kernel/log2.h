// log2 on a vector of normal positive numbers; infinity and NaN stay what they are. x = 2^e m with m in [sqrt(1/2),
// sqrt(2)), and ln m = 2 artanh(s) with s = (m - 1) / (m + 1), |s| < 0.172: a short series with an error below 2^-28
// of it for float and 2^-65 for double, before its own rounding.
#pragma once

#include <cstdint>
#include <type_traits>

#include "engines/cpu/simd/common.h"

namespace headway::cpu {
namespace {

template <class S>
HEADWAY_INLINE typename S::Vector log2(typename S::Vector x) {
  using Scalar = typename S::Scalar;
  using Vector = typename S::Vector;
  constexpr bool single = sizeof(Scalar) == 4;
  using Unsigned = std::conditional_t<single, std::uint32_t, std::uint64_t>;
  typedef Unsigned Bits __attribute__((vector_size(sizeof(Vector))));
  constexpr int mantissa_bits = single ? 23 : 52;
  constexpr Unsigned bias = single ? 127 : 1023;
  constexpr auto root_half = static_cast<Unsigned>(single ? 0x3f3504f3 : 0x3fe6a09e667f3bcd);
  constexpr Scalar whole = single ? 0x1p23 : 0x1p52;  // beside it the last bits are whole numbers
  constexpr int terms = single ? 5 : 12;

  const Bits bits = __builtin_bit_cast(Bits, x);
  const Bits exponent = (bits - (root_half - (bias << mantissa_bits))) >> mantissa_bits;  // biased
  const Vector m = __builtin_bit_cast(Vector, bits - ((exponent - bias) << mantissa_bits));
  const Vector e = __builtin_bit_cast(Vector, exponent | __builtin_bit_cast(Unsigned, whole)) -
                   S::set(whole + static_cast<Scalar>(bias));
  const Vector s = (m - S::set(1)) / (m + S::set(1));
  const Vector square = s * s;
  Vector series = S::set(Scalar{1} / (2 * terms - 1));
  HEADWAY_UNROLL
  for (int k = terms - 2; k >= 0; --k) {
    series = S::fma(series, square, S::set(Scalar{1} / static_cast<Scalar>(2 * k + 1)));
  }
  const Vector result = S::fma(s * S::set(static_cast<Scalar>(2.8853900817779268147)), series, e);  // 2 / ln 2
  return S::select(S::less(x, S::set(static_cast<Scalar>(__builtin_inff()))), result, x);
}

}  // namespace
}  // namespace headway::cpu
