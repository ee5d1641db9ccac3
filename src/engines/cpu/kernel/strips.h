// Cutting a loop over rows or columns into strips that the register tile of tile.h does at once.
#pragma once

#include <cstdint>

#include "engines/cpu/simd/common.h"

namespace headway::cpu {
namespace {

// How many broadcasts go with NV vectors: enough accumulators to hide the FMA's latency, few enough for the registers.
template <class S, int NV>
constexpr int broadcasts() {
  return NV == 1 ? S::edge_scalars : NV == 2 ? S::edge_scalars / 2 : S::tile_scalars;
}

template <int N>
struct Strip {
  static constexpr int size = N;
};

// body(Strip<N>, first) for items in strips of N, then of 4, then of `least` (1 or 2), then one by one.
template <int N, int least = 1, class Body>
HEADWAY_INLINE void in_strips(std::int64_t items, const Body& body) {
  std::int64_t first = 0;
  for (; first + N <= items; first += N) {
    body(Strip<N>{}, first);
  }
  if constexpr (N > 4) {
    for (; first + 4 <= items; first += 4) {
      body(Strip<4>{}, first);
    }
  }
  if constexpr (least == 2) {
    for (; first + 2 <= items; first += 2) {
      body(Strip<2>{}, first);
    }
  }
  for (; first < items; ++first) {
    body(Strip<1>{}, first);
  }
}

// body(Strip<NV>) for the number of vectors that hold something.
template <int NV, class Body>
HEADWAY_INLINE void with_vectors(int vectors, const Body& body) {
  if constexpr (NV > 1) {
    if (vectors < NV) {
      with_vectors<NV - 1>(vectors, body);
      return;
    }
  }
  body(Strip<NV>{});
}

// body(Strip<NV>, first) for vectors in panels, of which the last may have fewer.
template <class S, class Body>
HEADWAY_INLINE void in_panels(std::int64_t vectors, const Body& body) {
  for (std::int64_t v = 0; v < vectors; v += S::panel_vectors) {
    const std::int64_t some = vectors - v < S::panel_vectors ? vectors - v : S::panel_vectors;
    with_vectors<S::panel_vectors>(static_cast<int>(some), [&](auto strip) HEADWAY_LAMBDA { body(strip, v); });
  }
}

}  // namespace
}  // namespace headway::cpu
