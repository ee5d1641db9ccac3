// 2^x for kernels over tiles, whose vector work is as scarce as their products: one multiply-add makes the exponent,
// and the fraction goes through a polynomial on [0, 1) with 1.5 x 2^-23 of relative error, roundings included, that
// gives 1 at 0.
#pragma once

#include "engines/cpu/kernel/near_exp2.h"
#include "engines/cpu/simd/common.h"

namespace headway::cpu {
namespace {

template <class S>
struct TileExp2 : SummedExp2<S> {
  using Vector = typename S::Vector;
  using typename SummedExp2<S>::Witness;

  // The exponent is the rounding of score * to_log2 less a rounded reference, so references must be so small that
  // their rounding does not show. Others make NaN, which is out of reach.
  static constexpr float highest_reference = 0x1p12f;

  // What to add to score * to_log2.
  HEADWAY_INLINE static Vector addend(Vector reference, Vector to_log2) {
    const Vector product = reference * to_log2;
    const auto near = S::less_equal(S::abs(product), S::set(highest_reference));
    return S::select(near, S::zero() - product, S::set(__builtin_nanf("")));
  }
  HEADWAY_INLINE static Vector exponent(Vector score, Vector reference, Vector to_log2) {
    return S::fma(score, to_log2, addend(reference, to_log2));
  }
  HEADWAY_INLINE static Vector of(Vector x, Witness&) {
    constexpr float coefficients[] = {0.6931512951850891f, 0.24016444385051727f, 0.055799927562475204f,
                                      0.009017008356750011f, 0.0018671402940526605f};
    const Vector f = S::fraction(x);
    Vector p = S::set(coefficients[4]);
    HEADWAY_UNROLL
    for (int k = 3; k >= 0; --k) {
      p = S::fma(p, f, S::set(coefficients[k]));
    }
    return S::times_whole_power_of_2(S::fma(p, f, S::set(1)), x);
  }
};

}  // namespace
}  // namespace headway::cpu
