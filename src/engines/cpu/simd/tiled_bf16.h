// AVX-512 with bf16 and tiles: vectors as in avx512_bf16.h, products by tiles (tiles_amx.h, or its emulation).
#pragma once

#include "engines/cpu/simd/avx512_bf16.h"

namespace headway::cpu {
namespace {

template <class TileSet>
struct TiledBF16 : BF16 {
  using Tiles = TileSet;

  // As F32 does, in one instruction if that is correct: the machine's own rounding treats denormals as 0.
  using BF16::store_first;
  HEADWAY_INLINE static void store_first(bfloat16* p, int n, Vector x) {
    constexpr int denormal = 0x20;
    if (__builtin_expect(_mm512_fpclass_ps_mask(x, denormal) != 0, 0)) {
      BF16::store_first(p, n, x);
      return;
    }
    const auto wanted = static_cast<__mmask16>((1u << n) - 1u);
    _mm256_mask_storeu_epi16(p, wanted, reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)));
  }

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
