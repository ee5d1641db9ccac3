// AVX-512 with the bf16 dot product, and VBMI: floats as in avx512.h, but products of pairs of bf16, two at a time.
#pragma once

#include <type_traits>

#include "engines/cpu/kernel/tile.h"
#include "engines/cpu/simd/avx512.h"

namespace headway::cpu {
namespace {

struct BF16 : F32 {};

// A pair of bf16, the first in the low half. It is read wherever a bf16 may lie.
typedef std::uint32_t Pair __attribute__((aligned(2), may_alias));

// The bytes of the bf16s that have the magnitudes of 8-bit numbers.
struct MagnitudeBytes {
  alignas(64) std::uint8_t low[128], high[128];
};
template <class Byte>
constexpr MagnitudeBytes magnitude_bytes() {
  MagnitudeBytes result{};
  for (unsigned n = 0; n < 128; ++n) {
    float magnitude = static_cast<float>(n);
    if (std::is_same_v<Byte, float8>) {  // e4m3: 2^-9 units below 2^-6
      const unsigned exponent = n >> 3;
      magnitude = static_cast<float>(exponent == 0 ? n : 8 + n % 8) / 512;
      for (unsigned e = 1; e < exponent; ++e) {
        magnitude *= 2;
      }
    }
    const auto bits =
        std::is_same_v<Byte, float8> && n == 127 ? 0x7fc00000 : __builtin_bit_cast(std::uint32_t, magnitude);
    result.low[n] = static_cast<std::uint8_t>(bits >> 16);
    result.high[n] = static_cast<std::uint8_t>(bits >> 24);
  }
  return result;
}
template <class Byte>
constexpr MagnitudeBytes magnitudes = magnitude_bytes<Byte>();

template <>
struct Operands<BF16> {
  static constexpr int fold = 2;
  using Scalar = Pair;
  using Vector = __m512i;
  HEADWAY_INLINE static Vector load(const Pair* p) { return _mm512_loadu_si512(p); }
  HEADWAY_INLINE static Vector broadcast(const Pair* p) {
#if defined(__clang__) && __clang_major__ == 16  // it crashes where it sees that a vector of bf16 is a broadcast
    Vector result = _mm512_set1_epi32(static_cast<int>(*p));
    asm("" : "+v"(result));
    return result;
#else
    return _mm512_set1_epi32(static_cast<int>(*p));
#endif
  }
  HEADWAY_INLINE static __m512 multiply_add(Vector a, Vector b, __m512 c) {
    return _mm512_dpbf16_ps(c, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
  HEADWAY_INLINE static void clear_part(Pair* p, int part) { *p &= part == 0 ? 0xffff0000u : 0x0000ffffu; }
  HEADWAY_INLINE static Vector zero() { return _mm512_setzero_si512(); }
  HEADWAY_INLINE static void store(Pair* p, Vector x) { _mm512_storeu_si512(p, x); }

  // The first n elements of a row, n from 0 to 32; the rest is 0 and not read.
  HEADWAY_INLINE static Vector load_first(const bfloat16* p, int n) {
    return _mm512_maskz_loadu_epi16(static_cast<__mmask32>((std::uint64_t{1} << n) - 1), p);
  }
  // The first n pairs, n from 0 to 16.
  HEADWAY_INLINE static void store_first(Pair* p, int n, Vector x) {
    _mm512_mask_storeu_epi32(p, static_cast<__mmask16>((1u << n) - 1), x);
  }

  // (low element i, high element i): 16 pairs in x, 16 more in y.
  HEADWAY_INLINE static void interleave(Vector low, Vector high, Vector& x, Vector& y) {
    const __m512i front = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6,
                                           37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i back = _mm512_add_epi16(front, _mm512_set1_epi16(16));
    x = _mm512_permutex2var_epi16(low, front, high);
    y = _mm512_permutex2var_epi16(low, back, high);
  }
  // The first n of those 32 pairs.
  HEADWAY_INLINE static void store_interleaved(Pair* target, int n, Vector low, Vector high) {
    Vector x, y;
    interleave(low, high, x, y);
    const auto wanted = static_cast<std::uint32_t>((std::uint64_t{1} << n) - 1);
    _mm512_mask_storeu_epi32(target, static_cast<__mmask16>(wanted), x);
    _mm512_mask_storeu_epi32(target + 16, static_cast<__mmask16>(wanted >> 16), y);
  }

  // 32 numbers, rounded to nearest even.
  HEADWAY_INLINE static Vector rounded(__m512 front, __m512 back) {
    return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(back, front));
  }

  // x times a power of two, or its negative, where that leaves normal numbers normal.
  HEADWAY_INLINE static Vector times_power(Vector x, double power) {
    const int exponent = __builtin_ilogb(power);
    const __m512i magnitude = _mm512_and_si512(x, _mm512_set1_epi16(0x7fff));
    const __mmask32 number = _mm512_test_epi16_mask(x, _mm512_set1_epi16(0x7fff)) &
                             _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(0x7f80));
    const __m512i scaled = _mm512_mask_add_epi16(x, number, x, _mm512_set1_epi16(static_cast<short>(exponent * 128)));
    return power < 0 ? _mm512_xor_si512(scaled, _mm512_set1_epi16(static_cast<short>(0x8000))) : scaled;
  }

  // 8-bit numbers as bf16, which holds each of them: two tables of 128 bytes give the halves of a magnitude.
  template <class Byte>
  class Bytes {
   public:
    static constexpr int count = 64;  // that are converted at once
    HEADWAY_INLINE Bytes() {
      HEADWAY_UNROLL
      for (int part = 0; part < 2; ++part) {
        low_[part] = _mm512_load_si512(magnitudes<Byte>.low + part * count);
        high_[part] = _mm512_load_si512(magnitudes<Byte>.high + part * count);
      }
    }
    // The first n bytes of a row, n from 0 to 64; the rest is 0 and not read.
    HEADWAY_INLINE static Vector load_first(const Byte* p, int n) {
      return _mm512_maskz_loadu_epi8(n >= count ? ~std::uint64_t{0} : (std::uint64_t{1} << n) - 1, p);
    }
    HEADWAY_INLINE static Vector load(const Byte* p) { return _mm512_loadu_si512(p); }
    // Which byte number n of the front's is, n from 0 to 31: eight neighbours of each sixteen. The back's are the
    // eight behind them.
    static constexpr int place(int n) { return n / 8 * 16 + n % 8; }
    HEADWAY_INLINE void convert(Vector bytes, Vector& front, Vector& back) const {
      const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
      const bool is_signed = std::is_same_v<Byte, int8>;
      const __m512i magnitude = is_signed ? _mm512_abs_epi8(bytes) : bytes;  // the tables take the low seven bits
      const __m512i low = _mm512_permutex2var_epi8(low_[0], magnitude, low_[1]);
      __m512i high = _mm512_permutex2var_epi8(high_[0], magnitude, high_[1]);
      if (is_signed) {  // -128 alone has a magnitude of eight bits
        high = _mm512_mask_blend_epi8(_mm512_movepi8_mask(magnitude), high, _mm512_set1_epi8(0x43));
      }
      high = _mm512_ternarylogic_epi32(high, bytes, sign, 0xf8);  // high | (bytes & sign)
      front = _mm512_unpacklo_epi8(low, high);
      back = _mm512_unpackhi_epi8(low, high);
    }
    // Pairs (a, b) of two rows' bytes: four vectors, of which lane l of number v is byte 16 (l / 4) + 4 v + l % 4.
    HEADWAY_INLINE void convert_pairs(Vector a, Vector b, Vector (&pairs)[4]) const {
      convert(_mm512_unpacklo_epi8(a, b), pairs[0], pairs[1]);
      convert(_mm512_unpackhi_epi8(a, b), pairs[2], pairs[3]);
    }
    // Sums in the order of those pairs, in the order of the bytes.
    HEADWAY_INLINE static void sort(__m512 (&sums)[4]) {
      const __m512 a = _mm512_shuffle_f32x4(sums[0], sums[1], 0x44), b = _mm512_shuffle_f32x4(sums[0], sums[1], 0xee);
      const __m512 c = _mm512_shuffle_f32x4(sums[2], sums[3], 0x44), d = _mm512_shuffle_f32x4(sums[2], sums[3], 0xee);
      sums[0] = _mm512_shuffle_f32x4(a, c, 0x88);
      sums[1] = _mm512_shuffle_f32x4(a, c, 0xdd);
      sums[2] = _mm512_shuffle_f32x4(b, d, 0x88);
      sums[3] = _mm512_shuffle_f32x4(b, d, 0xdd);
    }

   private:
    __m512i low_[2], high_[2];
  };

  // The least and the greatest magnitude among bf16s, as bits; zeros do not count.
  struct Magnitudes {
    __m512i greatest = _mm512_setzero_si512();
    __m512i least_minus_1 = _mm512_set1_epi16(-1);  // as 0 - 1 is

    HEADWAY_INLINE void see(Vector x) {
      const __m512i magnitude = _mm512_and_si512(x, _mm512_set1_epi16(0x7fff));
      greatest = _mm512_max_epu16(greatest, magnitude);
      least_minus_1 = _mm512_min_epu16(least_minus_1, _mm512_sub_epi16(magnitude, _mm512_set1_epi16(1)));
    }
    bool any_below(std::uint16_t bits) const {
      return _mm512_cmplt_epu16_mask(least_minus_1, _mm512_set1_epi16(static_cast<short>(bits - 1))) != 0;
    }
    bool any_from(std::uint16_t bits) const {
      return _mm512_cmpge_epu16_mask(greatest, _mm512_set1_epi16(static_cast<short>(bits))) != 0;
    }
  };

  // Lane by lane the pair (first, second), rounded to nearest even.
  HEADWAY_INLINE static Vector pairs(__m512 first, __m512 second) {
    return _mm512_permutexvar_epi16(interleaved_halves(), rounded(first, second));
  }

  // (low[i], high[i]) for n, up to 16, of them, zeros behind; without `high` (low[i], 0).
  HEADWAY_INLINE static Vector rows_paired(const bfloat16* low, const bfloat16* high, int n) {
    const auto wanted = static_cast<__mmask16>((1u << n) - 1u);
    const __m512i first = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(wanted, low));
    if (high == nullptr) {
      return first;
    }
    const __m512i second = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(wanted, high));
    return _mm512_or_si512(first, _mm512_slli_epi32(second, 16));
  }
  HEADWAY_INLINE static void transpose(Vector (&r)[16]) {
    __m512 rows[16];
    HEADWAY_UNROLL
    for (int i = 0; i < 16; ++i) {
      rows[i] = _mm512_castsi512_ps(r[i]);
    }
    F32::transpose(rows);
    HEADWAY_UNROLL
    for (int i = 0; i < 16; ++i) {
      r[i] = _mm512_castps_si512(rows[i]);
    }
  }

 private:
  HEADWAY_INLINE static __m512i interleaved_halves() {
    return _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4,
                            19, 3, 18, 2, 17, 1, 16, 0);
  }
};

}  // namespace
}  // namespace headway::cpu
