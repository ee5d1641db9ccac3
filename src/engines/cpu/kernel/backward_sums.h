// Adding register tiles to gradients in scratch.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/backward_tile_data.h"
#include "engines/cpu/kernel/tile.h"

namespace headway::cpu {
namespace {

// target += term, or target = term where it holds nothing yet: never -0, which would become 0 where nothing but zeros
// comes later.
template <class S>
HEADWAY_INLINE void add_vector(typename S::Scalar* target, typename S::Vector term, bool empty) {
  S::store(target, (empty ? S::zero() : S::load(target)) + term);
}

// The same for a tile of vocabulary T's sums, which are raised.
template <class T, int NV, int NB>
HEADWAY_INLINE void add_tile(const Accumulators<T, NV, NB>& acc, typename T::Scalar* target, std::int64_t ld,
                             bool empty) {
  const typename T::Vector lower = T::set(lowering<T>);
  const auto each = [&](const auto& sum) HEADWAY_LAMBDA {
    HEADWAY_UNROLL
    for (int c = 0; c < NB; ++c) {
      HEADWAY_UNROLL
      for (int v = 0; v < NV; ++v) {
        sum(target + c * ld + v * T::lanes, acc[c][v] * lower);
      }
    }
  };
  if (empty) {
    each([&](typename T::Scalar* at, typename T::Vector term) HEADWAY_LAMBDA { add_vector<T>(at, term, true); });
  } else {
    each([&](typename T::Scalar* at, typename T::Vector term) HEADWAY_LAMBDA { add_vector<T>(at, term, false); });
  }
}

template <class S>
HEADWAY_INLINE void clear_numbers(typename S::Scalar* numbers, std::int64_t count) {
  for (std::int64_t n = 0; n < count; n += S::lanes) {
    S::store(numbers + n, S::zero());
  }
}

}  // namespace
}  // namespace headway::cpu
