// Sums whose rounding errors are kept, so that any number of terms adds up.
#pragma once

#include "engines/cpu/simd/common.h"

namespace headway::cpu {
namespace {

// total + term = sum + lost, exactly; beside a sum that is not finite nothing is lost.
template <class S>
struct Compensated {
  typename S::Vector sum, lost;

  HEADWAY_INLINE Compensated(typename S::Vector total, typename S::Vector term) {
    sum = total + term;
    const typename S::Vector added = sum - total;
    const typename S::Vector error = (total - (sum - added)) + (term - added);
    lost = S::select(S::equal(error, error), error, S::zero());
  }
};

}  // namespace
}  // namespace headway::cpu
