// The vocabulary for any processor: one lane, plain C++. Nothing is fused: fma(a, b, c) rounds twice.
#pragma once

#include <cstdint>

#include "engines/cpu/simd/common.h"

namespace headway::cpu {
namespace {

HEADWAY_INLINE float to_float(float x) { return x; }
HEADWAY_INLINE float to_float(bfloat16 x) {
  return __builtin_bit_cast(float, static_cast<std::uint32_t>(x.bits) << 16);
}
HEADWAY_INLINE float to_float(float16 x) {
  const std::uint32_t sign = (x.bits & 0x8000u) << 16;
  const std::uint32_t magnitude = (x.bits & 0x7fffu) << 13;
  if (magnitude >= 0x0f800000u) {  // infinity and NaN, which becomes quiet
    return __builtin_bit_cast(float, sign | 0x7f800000u | magnitude | (magnitude > 0x0f800000u ? 0x00400000u : 0u));
  }
  // The bits stand for a float whose exponent is 112 too small; the product is exact, denormals included.
  const float scaled = __builtin_bit_cast(float, magnitude) * 0x1p112f;
  return __builtin_bit_cast(float, sign | __builtin_bit_cast(std::uint32_t, scaled));
}
HEADWAY_INLINE float to_float(int8 x) { return x.bits; }
HEADWAY_INLINE float to_float(float8 x) {
  const std::uint32_t sign = (x.bits & 0x80u) << 24;
  const std::uint32_t magnitude = x.bits & 0x7fu;
  if (magnitude == 0x7fu) {
    return __builtin_bit_cast(float, sign | 0x7fc00000u);
  }
  const float value = magnitude < 8 ? static_cast<float>(magnitude) * 0x1p-9f
                                    : __builtin_bit_cast(float, (magnitude << 20) + ((127u - 7u) << 23));
  return __builtin_bit_cast(float, sign | __builtin_bit_cast(std::uint32_t, value));
}

// To nearest even, denormals kept; a NaN keeps its upper bits and becomes quiet.
HEADWAY_INLINE float16 to_float16(float x) {
  const auto bits = __builtin_bit_cast(std::uint32_t, x);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  std::uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  } else if (magnitude >= 0x47800000u) {  // 2^16
    half = 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // 2^-14: the unit of 1/2 is the least half
    const float sum = __builtin_bit_cast(float, magnitude) + 0.5f;
    half = __builtin_bit_cast(std::uint32_t, sum) - 0x3f000000u;
  } else {
    half = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  }
  return {static_cast<std::uint16_t>((bits >> 16 & 0x8000u) | half)};
}

template <class Real, class Unsigned>
struct OneLane {
  using Words = std::uint64_t;
  static constexpr int word_lanes = 1;
  HEADWAY_INLINE static Words words(std::uint32_t x) { return x; }
  HEADWAY_INLINE static Words consecutive_words(std::uint64_t first_word) { return first_word; }
  HEADWAY_INLINE static Words multiply_low_words(Words a, Words b) { return (a & 0xffffffffu) * (b & 0xffffffffu); }
  HEADWAY_INLINE static Words high_words(Words a) { return a >> 32; }
  HEADWAY_INLINE static Words exclusive_or(Words a, Words b, Words c) { return a ^ b ^ c; }
  HEADWAY_INLINE static std::uint64_t low_words_at_least(Words a, std::uint64_t limit) {
    return (a & 0xffffffffu) >= limit;
  }

  using Scalar = Real;
  using Vector = Real;
  using Mask = bool;
  using Bits = Unsigned;
  static constexpr int lanes = 1;
  static constexpr int panel_vectors = 4;  // queries in a panel
  static constexpr int tile_scalars = 4;   // broadcasts in a full tile
  static constexpr int edge_scalars = 8;   // broadcasts in a tile of one query
  static constexpr bool fused_softmax = false;

  HEADWAY_INLINE static Vector zero() { return 0; }
  HEADWAY_INLINE static Vector set(Scalar x) { return x; }
  HEADWAY_INLINE static Vector load(const Scalar* p) { return *p; }
  HEADWAY_INLINE static void store(Scalar* p, Vector x) { *p = x; }
  HEADWAY_INLINE static Vector fma(Vector a, Vector b, Vector c) { return a * b + c; }
  HEADWAY_INLINE static Scalar fma_scalar(Scalar a, Scalar b, Scalar c) { return fma(a, b, c); }
  HEADWAY_INLINE static Vector max(Vector a, Vector b) { return a > b ? a : b; }  // b where one is NaN
  HEADWAY_INLINE static Vector min(Vector a, Vector b) { return a < b ? a : b; }
  HEADWAY_INLINE static Vector abs(Vector a) {
    return __builtin_bit_cast(Real, (__builtin_bit_cast(Bits, a) << 1) >> 1);
  }
  HEADWAY_INLINE static Vector round(Vector a) {
    // Where the type holds no fractions any more, the sum is rounded to a whole number.
    constexpr Real whole = sizeof(Real) == 4 ? 0x1p23 : 0x1p52;
    const Real shift = a < 0 ? -whole : whole;
    return abs(a) < whole ? (a + shift) - shift : a;
  }
  HEADWAY_INLINE static Vector times_power_of_2(Vector a, Vector n) { return times_power_of_2_in_steps<OneLane>(a, n); }
  HEADWAY_INLINE static Vector select(Mask m, Vector yes, Vector no) { return m ? yes : no; }
  HEADWAY_INLINE static Mask less(Vector a, Vector b) { return a < b; }
  HEADWAY_INLINE static Mask less_equal(Vector a, Vector b) { return a <= b; }
  HEADWAY_INLINE static Mask not_less_equal(Vector a, Vector b) { return !(a <= b); }
  HEADWAY_INLINE static Mask equal(Vector a, Vector b) { return a == b; }
  HEADWAY_INLINE static Mask both(Mask a, Mask b) { return a && b; }
  HEADWAY_INLINE static bool any(Mask m) { return m; }
  HEADWAY_INLINE static Mask mask_from_bits(std::uint64_t bits) { return (bits & 1) != 0; }

  // The first n elements of a row, n 0 or 1; without one it is 0 and nothing is read.
  HEADWAY_INLINE static Vector load_first(const double* p, int n) { return n == 0 ? Real{0} : static_cast<Real>(*p); }
  template <class In>
  HEADWAY_INLINE static Vector load_first(const In* p, int n) {
    return n == 0 ? Real{0} : to_float(*p);
  }
  HEADWAY_INLINE static void store_first(Scalar* p, int n, Vector x) {
    if (n != 0) {
      *p = x;
    }
  }
  HEADWAY_INLINE static void store_first(float16* p, int n, Vector x) {
    if (n != 0) {
      *p = to_float16(x);
    }
  }
  HEADWAY_INLINE static void store_first(bfloat16* p, int n, Vector x) {
    if (n != 0) {
      p->bits = static_cast<std::uint16_t>(bfloat16_bits<OneLane>(x));
    }
  }

  HEADWAY_INLINE static void transpose(Vector (&)[lanes]) {}
};

using F32 = OneLane<float, std::uint32_t>;
using F64 = OneLane<double, std::uint64_t>;

}  // namespace
}  // namespace headway::cpu
