// AVX-512 with the bf16 dot product: floats as in avx512.h, but products of pairs of bf16, two at a time.
#pragma once

#include "engines/cpu/kernel/tile.h"
#include "engines/cpu/simd/avx512.h"

namespace headway::cpu {
namespace {

struct BF16 : F32 {};

// A pair of bf16, the first in the low half. It is read wherever a bf16 may lie.
typedef std::uint32_t Pair __attribute__((aligned(2), may_alias));

template <>
struct Operands<BF16> {
  static constexpr int fold = 2;
  using Scalar = Pair;
  using Vector = __m512i;
  HEADWAY_INLINE static Vector load(const Pair* p) { return _mm512_loadu_si512(p); }
  HEADWAY_INLINE static Vector broadcast(const Pair* p) { return _mm512_set1_epi32(static_cast<int>(*p)); }
  HEADWAY_INLINE static __m512 multiply_add(Vector a, Vector b, __m512 c) {
    return _mm512_dpbf16_ps(c, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
  HEADWAY_INLINE static void clear_part(Pair* p, int part) { *p &= part == 0 ? 0xffff0000u : 0x0000ffffu; }
  HEADWAY_INLINE static void store(Pair* p, Vector x) { _mm512_storeu_si512(p, x); }

  // Lane by lane the pair (first, second), rounded to nearest even.
  HEADWAY_INLINE static Vector pairs(__m512 first, __m512 second) {
    const __m512i halves = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first));  // 16 firsts, then 16 seconds
    return _mm512_permutexvar_epi16(interleaved_halves(), halves);
  }

  // target[i] = (low[i], high[i]) for 32 elements.
  HEADWAY_INLINE static void interleave(const bfloat16* low, const bfloat16* high, Pair* target) {
    const __m512i a = _mm512_loadu_si512(low);
    const __m512i b = _mm512_loadu_si512(high);
    const __m512i front = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6,
                                           37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i back = _mm512_add_epi16(front, _mm512_set1_epi16(16));
    _mm512_storeu_si512(target, _mm512_permutex2var_epi16(a, front, b));
    _mm512_storeu_si512(target + 16, _mm512_permutex2var_epi16(a, back, b));
  }

 private:
  HEADWAY_INLINE static __m512i interleaved_halves() {
    return _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4,
                            19, 3, 18, 2, 17, 1, 16, 0);
  }
};

}  // namespace
}  // namespace headway::cpu
