// Sums across the lanes of vectors, and the highest of a vector.
#pragma once

#include "engines/cpu/simd/common.h"
#include "engines/cpu/simd/vocabulary.h"

namespace headway::cpu {
namespace {

// Lane l of the result is the sum of x[l]'s lanes, each sum in the same order.
template <class S>
HEADWAY_INLINE typename S::Vector lane_sums(typename S::Vector (&x)[S::lanes]) {
  if constexpr (SumsLanes<S>) {
    return S::lane_sums(x);
  } else {
    S::transpose(x);
    HEADWAY_UNROLL
    for (int half = S::lanes / 2; half > 0; half /= 2) {
      HEADWAY_UNROLL
      for (int l = 0; l < half; ++l) {
        x[l] = x[l] + x[l + half];
      }
    }
    return x[0];
  }
}

// NaN passes by, but for that of the first lane.
template <class S>
HEADWAY_INLINE typename S::Scalar highest_lane(typename S::Vector x) {
  alignas(64) typename S::Scalar elements[S::lanes];
  S::store(elements, x);
  typename S::Scalar highest = elements[0];
  for (int l = 1; l < S::lanes; ++l) {
    highest = elements[l] > highest ? elements[l] : highest;
  }
  return highest;
}

}  // namespace
}  // namespace headway::cpu
