// The one loop that does the arithmetic: an outer-product tile held in registers.
//
//   acc[c][v] += sum over t of  scalar(c, t) * vector(t, v)        c < NB broadcasts, v < NV vectors
//
// Vectors lie in rows of a packed panel, [t][width]. Scalars are read in place from a row-major matrix: `across` takes
// scalar(c, t) = x[c * ld + t] (keys for the scores), `along` takes x[t * ld + c] (values for the output). Each step loads
// NV vectors and NB scalars for NB * NV FMAs, so with 4 x 4 the loads stay below half of the FMAs and the FMA units
// bound it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engines/cpu/simd/common.h"

namespace headway::cpu {
namespace {

enum class Scalars { across, along };

template <class S, int NV, int NB>
using Accumulators = typename S::Vector[NB][NV];

template <class S, int NV, int NB>
HEADWAY_INLINE void clear(Accumulators<S, NV, NB>& acc) {
  HEADWAY_UNROLL
  for (int c = 0; c < NB; ++c) {
    HEADWAY_UNROLL
    for (int v = 0; v < NV; ++v) {
      acc[c][v] = S::zero();
    }
  }
}

template <class S, int NV, int NB, Scalars layout>
HEADWAY_INLINE void accumulate(Accumulators<S, NV, NB>& acc, const typename S::Scalar* __restrict vectors,
                               std::ptrdiff_t width, const typename S::Scalar* __restrict scalars, std::ptrdiff_t ld,
                               std::ptrdiff_t steps) {
  _Pragma("GCC unroll 2")
  for (std::ptrdiff_t t = 0; t < steps; ++t) {
    typename S::Vector x[NV];
    HEADWAY_UNROLL
    for (int v = 0; v < NV; ++v) {
      x[v] = S::load(vectors + v * S::lanes);
    }
    HEADWAY_UNROLL
    for (int c = 0; c < NB; ++c) {
      const typename S::Vector b = S::set(layout == Scalars::across ? scalars[c * ld + t] : scalars[c]);
      HEADWAY_UNROLL
      for (int v = 0; v < NV; ++v) {
        acc[c][v] = S::fma(b, x[v], acc[c][v]);
      }
    }
    vectors += width;
    if constexpr (layout == Scalars::along) {
      scalars += ld;
    }
  }
}

// How many broadcasts go with NV vectors: enough accumulators to hide the FMA's latency, few enough for the registers.
template <class S, int NV>
constexpr int broadcasts() {
  return NV == 1 ? S::edge_scalars : NV == 2 ? S::edge_scalars / 2 : S::tile_scalars;
}

template <int N>
struct Strip {
  static constexpr int size = N;
};

// body(Strip<N>, first) for items in strips of N, then of 4, then one by one.
template <int N, class Body>
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
  for (; first < items; ++first) {
    body(Strip<1>{}, first);
  }
}

}  // namespace
}  // namespace headway::cpu
