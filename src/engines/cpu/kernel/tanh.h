// tanh on a vector, to a few units of the last place relative to the result: softcap * tanh(s / softcap) must keep the
// relative accuracy of small scores. Near 0 an odd polynomial with minimal relative error, beyond it (1 - e) / (1 + e)
// with e = exp(-2 |x|).
#pragma once

#include "engines/cpu/kernel/exp2.h"
#include "engines/cpu/simd/common.h"

namespace headway::cpu {
namespace {

template <class Scalar>
struct TanhPolynomial;

template <>
struct TanhPolynomial<float> {
  static constexpr int degree = 5;  // in x^2
  static constexpr float limit = 0.6f;
  static constexpr float coefficients[degree + 1] = {0.999999997510993201f,  -0.333332832573827736f,
                                                     0.133316889602237857f,  -0.0537687047054121262f,
                                                     0.0207536288852189090f, -0.00585216864728727474f};
};

template <>
struct TanhPolynomial<double> {
  static constexpr int degree = 10;
  static constexpr double limit = 0.4;
  static constexpr double coefficients[degree + 1] = {
      0.99999999999999999998,    -0.33333333333333329831,    0.13333333333332455778,    -0.053968253967395581688,
      0.021869488493040184306,   -0.0088632342644058673672,  0.0035921048220599129106,  -0.0014555598121596836101,
      0.00058792670381382739345, -0.00022901014296693997132, 0.000068418972545742666514};
};

template <class Vector>
struct TanhAndSlope {
  Vector value;
  Vector slope;  // 1 - tanh^2, to the same relative accuracy: what is left of a saturated score's gradient
};

// tanh(x) / x near 0.
template <class S>
HEADWAY_INLINE typename S::Vector tanh_ratio(typename S::Vector x_squared) {
  using Polynomial = TanhPolynomial<typename S::Scalar>;
  typename S::Vector p = S::set(Polynomial::coefficients[Polynomial::degree]);
  HEADWAY_UNROLL
  for (int k = Polynomial::degree - 1; k >= 0; --k) {
    p = S::fma(p, x_squared, S::set(Polynomial::coefficients[k]));
  }
  return p;
}

template <class S>
HEADWAY_INLINE typename S::Vector exp_minus_twice(typename S::Vector x) {
  constexpr double log2e = 1.4426950408889634074;
  return exp2<S>(x * S::set(static_cast<typename S::Scalar>(-2 * log2e)));
}

template <class S>
HEADWAY_INLINE TanhAndSlope<typename S::Vector> tanh_and_slope(typename S::Vector x) {
  using Vector = typename S::Vector;
  using Polynomial = TanhPolynomial<typename S::Scalar>;
  const Vector one = S::set(1);
  const Vector near = x * tanh_ratio<S>(x * x);
  const Vector near_slope = one - near * near;
  const Vector magnitude = S::abs(x);
  const auto is_far = S::not_less_equal(magnitude, S::set(Polynomial::limit));  // NaN too
  if (!S::any(is_far)) {
    return {near, near_slope};
  }
  const Vector e = exp_minus_twice<S>(magnitude);
  const Vector far = (one - e) / (one + e);
  const Vector far_slope = S::set(4) * e / ((one + e) * (one + e));
  return {S::select(is_far, S::select(S::less(x, S::zero()), S::zero() - far, far), near),
          S::select(is_far, far_slope, near_slope)};
}

// cap * tanh(score / cap) for a cap of any size: near 0 a score is multiplied by tanh(x) / x, so that what is lost of
// x = score / cap beside a large cap is not lost of the score.
template <class S>
class SoftCap {
  using Scalar = typename S::Scalar;
  using Vector = typename S::Vector;

 public:
  explicit SoftCap(double cap) : cap_(S::set(in_range(cap))), inverse_(S::set(in_range(1 / cap))) {}

  HEADWAY_INLINE Vector operator()(Vector score) const {
    const Vector x = score * inverse_;
    const Vector near = score * tanh_ratio<S>(x * x);
    const auto is_far = S::not_less_equal(S::abs(x), S::set(TanhPolynomial<Scalar>::limit));  // NaN too
    if (!S::any(is_far)) {
      return near;
    }
    const Vector e = exp_minus_twice<S>(S::abs(x));
    const Vector far = cap_ * ((S::set(1) - e) / (S::set(1) + e));
    return S::select(is_far, S::select(S::less(x, S::zero()), S::zero() - far, far), near);
  }

 private:
  static Scalar in_range(double x) {
    constexpr double highest = sizeof(Scalar) == 4 ? static_cast<double>(__FLT_MAX__) : __DBL_MAX__;
    return static_cast<Scalar>(x < highest ? x : highest);
  }

  Vector cap_, inverse_;
};

}  // namespace
}  // namespace headway::cpu
