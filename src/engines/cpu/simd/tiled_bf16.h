// AVX-512 with bf16 and tiles: vectors as in avx512_bf16.h, products by tiles (tiles_amx.h, or its emulation).
#pragma once

#include "engines/cpu/simd/avx512_bf16.h"

namespace headway::cpu {
namespace {

template <class TileSet>
struct TiledBF16 : BF16 {
  using Tiles = TileSet;

  // x less the whole number below it; 0 for an infinite x.
  HEADWAY_INLINE static Vector fraction(Vector x) {
    return _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  }
  // a * 2^(the whole number below n)
  HEADWAY_INLINE static Vector times_whole_power_of_2(Vector a, Vector n) { return _mm512_scalef_ps(a, n); }
};

template <class TileSet>
struct Operands<TiledBF16<TileSet>> : Operands<BF16> {};

}  // namespace
}  // namespace headway::cpu
