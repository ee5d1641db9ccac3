// What queries take in of the factor between products and scores.
#pragma once

#include "engines/cpu/kernel/score_factor.h"

namespace headway::cpu {
namespace {

// A power of two, which rounds nothing: at most 1, so that products overflow only if scores do. Only where the factor
// is so large that products of small numbers would vanish before it, queries take half of it in.
template <class Scalar>
inline double query_power(double factor) {
  constexpr int limit = exponent_limit<Scalar>;
  const int exponent = exponent_of(factor);
  if (factor != 0 && exponent > limit / 2) {
    return power_of_two(exponent / 2 < limit ? exponent / 2 : limit);
  }
  return score_factor<Scalar>(factor, true).packed;
}

}  // namespace
}  // namespace headway::cpu
