// The tile vocabulary of tiles_amx.h in loops, for machines without AMX: the same results bit for bit, by the
// instruction's definition, so that tests of the kernels over it run anywhere with AVX-512.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "engines/cpu/simd/common.h"

namespace headway::cpu {
namespace {

struct EmulatedTiles {
  // Using tiles that are not configured faults on the real machine, so it does here.
  class InUse {
   public:
    InUse() { state().configured = true; }
    ~InUse() { state().configured = false; }
    InUse(const InUse&) = delete;
    InUse& operator=(const InUse&) = delete;
  };

  template <int tile>
  static void zero() {
    std::memset(rows_of(tile), 0, sizeof(Tile));
  }
  template <int tile>
  static void load(const void* rows, std::int64_t stride) {
    for (int r = 0; r < 16; ++r) {
      std::memcpy(rows_of(tile)[r], static_cast<const char*>(rows) + r * stride, 64);
    }
  }
  template <int tile>
  static void load_passing(const void* rows, std::int64_t stride) {
    load<tile>(rows, stride);
  }
  template <int tile>
  static void store(void* rows, std::int64_t stride) {
    for (int r = 0; r < 16; ++r) {
      std::memcpy(static_cast<char*>(rows) + r * stride, rows_of(tile)[r], 64);
    }
  }
  // Elements at even places and those at odd ones have a chain of fused products each; the two are added at the end.
  template <int sum, int a, int b>
  static void multiply_add() {
    static_assert(sum != a && sum != b && a != b);
    for (int m = 0; m < 16; ++m) {
      __m512 even = _mm512_setzero_ps();
      __m512 odd = _mm512_setzero_ps();
      for (int k = 0; k < 16; ++k) {
        const __m512i pair = _mm512_set1_epi32(static_cast<int>(rows_of(a)[m][k]));
        const __m512i column = _mm512_loadu_si512(rows_of(b)[k]);
        even = without_denormals(_mm512_fmadd_ps(low_halves(pair), low_halves(column), even));
        odd = without_denormals(_mm512_fmadd_ps(high_halves(pair), high_halves(column), odd));
      }
      const __m512 old = without_denormals(_mm512_loadu_ps(rows_of(sum)[m]));
      const __m512 all = without_denormals(_mm512_add_ps(even, odd));
      _mm512_storeu_ps(rows_of(sum)[m], without_denormals(_mm512_add_ps(old, all)));
    }
  }

 private:
  using Tile = std::uint32_t[16][16];
  struct State {
    bool configured = false;
    Tile tiles[8];
  };
  static State& state() {
    static thread_local State tiles;
    return tiles;
  }
  static std::uint32_t (*rows_of(int tile))[16] {
    if (!state().configured) {
      __builtin_trap();
    }
    return state().tiles[tile];
  }

  static __m512 without_denormals(__m512 x) {
    const __mmask16 tiny = _mm512_cmp_ps_mask(_mm512_abs_ps(x), _mm512_set1_ps(0x1p-126f), _CMP_LT_OQ);
    return _mm512_mask_mov_ps(x, tiny, _mm512_setzero_ps());
  }
  static __m512 low_halves(__m512i pairs) {
    return without_denormals(_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)));
  }
  static __m512 high_halves(__m512i pairs) {
    return without_denormals(
        _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u)))));
  }
};

}  // namespace
}  // namespace headway::cpu
