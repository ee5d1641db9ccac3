// Sums across the lanes of vectors.
#pragma once

#include "engines/cpu/simd/common.h"

namespace headway::cpu {
namespace {

// Lane l of the result is the sum of x[l]'s lanes, each sum in the same order.
template <class S>
HEADWAY_INLINE typename S::Vector lane_sums(typename S::Vector (&x)[S::lanes]) {
  if constexpr (requires { S::lane_sums(x); }) {
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

}  // namespace
}  // namespace headway::cpu
