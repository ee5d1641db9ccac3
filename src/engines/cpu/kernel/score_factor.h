// Factors of any size in the compute type. A scale or a softcap is a double, so what scores and gradients are
// multiplied by may be beyond a float's range while the results are not.
#pragma once

#include <cstdint>

#include "engines/cpu/simd/common.h"

namespace headway::cpu {
namespace {

// The exponents of a type's normal numbers reach from -limit to limit.
template <class Scalar>
constexpr int exponent_limit = sizeof(Scalar) == 4 ? 126 : 1022;

// The exponent that frexp gives, and 2^exponent, without a call: small heads take half a microsecond.
inline int exponent_of(double x) {
  const auto bits = __builtin_bit_cast(std::uint64_t, x);
  const int biased = static_cast<int>(bits >> 52 & 0x7ff);
  if (biased != 0 && biased != 0x7ff) {
    return biased - 1022;
  }
  int exponent = 0;
  __builtin_frexp(x, &exponent);
  return exponent;
}
inline double power_of_two(int exponent) {
  return exponent >= -1022 && exponent <= 1023
             ? __builtin_bit_cast(double, static_cast<std::uint64_t>(exponent + 1023) << 52)
             : __builtin_ldexp(1, exponent);
}

// A factor as first * second; the second is 1 for a factor that the type holds.
template <class Scalar>
struct SplitFactor {
  Scalar first, second;
};

template <class Scalar>
inline SplitFactor<Scalar> split_factor(double factor) {
  constexpr int limit = exponent_limit<Scalar>;
  // A quotient of two factors may be infinite, but 0 times any factor is 0.
  factor = factor > __DBL_MAX__ ? __DBL_MAX__ : factor < -__DBL_MAX__ ? -__DBL_MAX__ : factor;
  const int exponent = exponent_of(factor);
  if (exponent <= limit && exponent > -limit) {
    return {static_cast<Scalar>(factor), 1};
  }
  const int wanted = exponent > 2 * limit ? 2 * limit : exponent < 2 - 2 * limit ? 2 - 2 * limit : exponent;
  const int half = wanted / 2;
  int same = 0;
  const double mantissa = __builtin_frexp(factor, &same);
  return {static_cast<Scalar>(__builtin_ldexp(mantissa, wanted - half)), static_cast<Scalar>(power_of_two(half))};
}

// x times a factor of any size.
template <class S>
struct Scaling {
  typename S::Vector first, second;

  explicit Scaling(double factor = 1) {
    const auto split = split_factor<typename S::Scalar>(factor);
    first = S::set(split.first);
    second = S::set(split.second);
  }
  HEADWAY_INLINE typename S::Vector operator()(typename S::Vector x) const { return x * first * second; }
};

// What makes a score of the product of a query and a key: packed * power * rest. K^T takes in `packed`, a power of two
// of at most 1, so that no bit of K is rounded away and no sum overflows whose score is finite; `power` is 1 unless the
// factor is beyond the type's range.
template <class Scalar>
struct ScoreFactor {
  Scalar packed = 1, power = 1, rest = 1;
};

// packs: whether K^T takes in its part.
template <class Scalar>
inline ScoreFactor<Scalar> score_factor(double factor, bool packs) {
  if (factor == 0) {
    return {static_cast<Scalar>(packs ? 0 : 1), 1, 0};
  }
  constexpr int limit = exponent_limit<Scalar>;
  const int exponent = exponent_of(factor);
  const int packed = !packs || exponent > 1 ? 0 : exponent - 1 < -limit ? -limit : exponent - 1;
  const auto split = split_factor<Scalar>(factor * power_of_two(-packed));
  return {static_cast<Scalar>(power_of_two(packed)), split.second, split.first};
}

}  // namespace
}  // namespace headway::cpu
