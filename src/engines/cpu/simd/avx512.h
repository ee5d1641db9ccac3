// The SIMD vocabulary for AVX-512 (F, BW, DQ, VL): 16 floats or 8 doubles a vector, 32 registers.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "engines/cpu/simd/common.h"

namespace headway::cpu {
namespace {

// What the two element types have in common.
struct Wide {
  // 64-bit lanes for Philox, of which the low 32 bits count. A word in memory is an operand of exclusive_or at no cost.
  using Words = __m512i;
  static constexpr int word_lanes = 8;
  HEADWAY_INLINE static Words words(std::uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
  HEADWAY_INLINE static Words consecutive_words(std::uint64_t first_word) {
    return _mm512_add_epi64(_mm512_set1_epi64(static_cast<long long>(first_word)),
                            _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0));
  }
  HEADWAY_INLINE static Words multiply_low_words(Words a, Words b) { return _mm512_mul_epu32(a, b); }
  HEADWAY_INLINE static Words high_words(Words a) { return _mm512_srli_epi64(a, 32); }
  HEADWAY_INLINE static Words exclusive_or(Words a, Words b, Words c) {
    return _mm512_ternarylogic_epi32(a, b, c, 0x96);
  }
  HEADWAY_INLINE static std::uint64_t low_words_at_least(Words a, std::uint64_t limit) {
    const Words low = _mm512_and_si512(a, _mm512_set1_epi64(0xffffffff));
    return _mm512_cmpge_epu64_mask(low, _mm512_set1_epi64(static_cast<long long>(limit)));
  }
  // The same for 16 words, those of `a` first. Optional.
  HEADWAY_INLINE static std::uint64_t low_words_at_least(Words a, Words b, std::uint64_t limit) {
    const Words even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const Words low = _mm512_permutex2var_epi32(a, even, b);
    return limit >> 32 != 0 ? 0 : _mm512_cmpge_epu32_mask(low, _mm512_set1_epi32(static_cast<int>(limit)));
  }

  // Bit l: whether byte l is not 0, for up to 64 bytes. Optional: kernels do without where a vocabulary has none.
  HEADWAY_INLINE static std::uint64_t nonzero_bytes(const std::uint8_t* p, int n) {
    const __mmask64 wanted = n >= 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << n) - 1;
    const __m512i bytes = _mm512_maskz_loadu_epi8(wanted, p);
    return _mm512_test_epi8_mask(bytes, bytes);
  }
  // Bit j of word r becomes bit r of word j. Optional too.
  HEADWAY_INLINE static void transpose_bits(std::uint64_t (&bits)[64]);
};

struct F32 : Wide {
  using Scalar = float;
  using Vector = __m512;
  using Mask = __mmask16;
  static constexpr int lanes = 16;
  static constexpr int panel_vectors = 4;  // vectors of queries in a panel
  static constexpr int tile_scalars = 4;   // broadcasts in a full tile: 4 x 4 accumulators hide the FMA's latency
  static constexpr int edge_scalars = 16;  // broadcasts in a tile of one vector
  static constexpr bool fused_softmax = true;

  HEADWAY_INLINE static Vector zero() { return _mm512_setzero_ps(); }
  HEADWAY_INLINE static Vector set(float x) { return _mm512_set1_ps(x); }
  HEADWAY_INLINE static Vector load(const float* p) { return _mm512_loadu_ps(p); }
  HEADWAY_INLINE static void store(float* p, Vector x) { _mm512_storeu_ps(p, x); }
  HEADWAY_INLINE static Vector fma(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
  HEADWAY_INLINE static float fma_scalar(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
  HEADWAY_INLINE static Vector max(Vector a, Vector b) { return _mm512_max_ps(a, b); }  // b where one is NaN
  HEADWAY_INLINE static Vector min(Vector a, Vector b) { return _mm512_min_ps(a, b); }
  HEADWAY_INLINE static Vector abs(Vector a) { return _mm512_abs_ps(a); }
  HEADWAY_INLINE static Vector round(Vector a) {
    return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  HEADWAY_INLINE static Vector times_power_of_2(Vector a, Vector n) { return _mm512_scalef_ps(a, n); }
  HEADWAY_INLINE static Vector select(Mask m, Vector yes, Vector no) { return _mm512_mask_blend_ps(m, no, yes); }
  HEADWAY_INLINE static Mask less(Vector a, Vector b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
  HEADWAY_INLINE static Mask less_equal(Vector a, Vector b) { return _mm512_cmp_ps_mask(a, b, _CMP_LE_OQ); }
  HEADWAY_INLINE static Mask not_less_equal(Vector a, Vector b) { return _mm512_cmp_ps_mask(a, b, _CMP_NLE_UQ); }
  HEADWAY_INLINE static Mask equal(Vector a, Vector b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
  HEADWAY_INLINE static Mask both(Mask a, Mask b) { return static_cast<Mask>(a & b); }
  HEADWAY_INLINE static bool any(Mask m) { return m != 0; }
  HEADWAY_INLINE static Mask mask_from_bits(std::uint64_t bits) { return static_cast<Mask>(bits); }

  // Optional, for near_exp2.h. The index is in the last five bits; all its bits, shifted, are added to the power's.
  using Bits = __m512i;
  HEADWAY_INLINE static Vector times_looked_up_power(Vector a, Vector index, const std::uint32_t (&powers)[32]) {
    const Bits bits = _mm512_castps_si512(index);
    const Bits power = _mm512_permutex2var_epi32(_mm512_load_si512(powers), bits, _mm512_load_si512(powers + 16));
    return a * _mm512_castsi512_ps(_mm512_add_epi32(power, _mm512_slli_epi32(bits, 18)));
  }
  HEADWAY_INLINE static Bits no_bits() { return _mm512_setzero_si512(); }
  HEADWAY_INLINE static Bits or_different_bits(Bits found, Vector a, Vector b) {  // found | (a ^ b)
    return _mm512_ternarylogic_epi32(found, _mm512_castps_si512(a), _mm512_castps_si512(b), 0xf6);
  }
  HEADWAY_INLINE static Mask any_bits_from(Bits bits, std::uint32_t first_bit) {
    return _mm512_test_epi32_mask(bits, _mm512_set1_epi32(static_cast<int>(~0u << first_bit)));
  }

  // The first n elements of a row, n from 0 to lanes; the rest is 0 and not read.
  HEADWAY_INLINE static Vector load_first(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
  HEADWAY_INLINE static Vector load_first(const float16* p, int n) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(n), p));
  }
  HEADWAY_INLINE static Vector load_first(const bfloat16* p, int n) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first(n), p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
  }
  HEADWAY_INLINE static Vector load_first(const int8* p, int n) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(first(n), p)));
  }
  // As the half numbers with the same bits in front, which are 2^8 times smaller.
  HEADWAY_INLINE static Vector load_first(const float8* p, int n) {
    const __m128i bytes = _mm_maskz_loadu_epi8(first(n), p);
    const __m256i shifted =
        _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);  // the sign also where it does not belong
    const __m256i half = _mm256_and_si256(shifted, _mm256_set1_epi16(static_cast<short>(0xbf80)));
    const __mmask16 nan = _mm_testn_epi8_mask(_mm_add_epi8(bytes, _mm_set1_epi8(1)), _mm_set1_epi8(0x7f));
    return _mm512_cvtph_ps(_mm256_mask_mov_epi16(half, nan, _mm256_set1_epi16(0x7e00))) * set(0x1p8f);
  }
  // 32 elements, those at even places and those at odd ones; merging puts numbers so split in order again. Optional:
  // one instruction a vector where converting in order takes two.
  HEADWAY_INLINE static void load_alternating(const bfloat16* p, Vector& even, Vector& odd) {
    const __m512i both = _mm512_loadu_si512(p);
    even = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
    odd = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
  }
  HEADWAY_INLINE static void merge_alternating(Vector& even, Vector& odd) {
    const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    const Vector front = _mm512_permutex2var_ps(even, low, odd);
    odd = _mm512_permutex2var_ps(even, high, odd);
    even = front;
  }
  HEADWAY_INLINE static void store_first(float* p, int n, Vector x) { _mm512_mask_storeu_ps(p, first(n), x); }
  HEADWAY_INLINE static void store_first(float16* p, int n, Vector x) {
    _mm256_mask_storeu_epi16(p, first(n), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  HEADWAY_INLINE static void store_first(bfloat16* p, int n, Vector x) {
    // Round to nearest even on the bits, denormals kept; a NaN keeps its upper bits and becomes quiet.
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i tie = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(tie, _mm512_set1_epi32(0x7fff)));
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x00400000));
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    const __m512i chosen = _mm512_mask_blend_epi32(nan, rounded, quiet);
    _mm256_mask_storeu_epi16(p, first(n), _mm512_cvtepi32_epi16(_mm512_srli_epi32(chosen, 16)));
  }

  // rows[i] lane j becomes rows[j] lane i.
  HEADWAY_INLINE static void transpose(Vector (&r)[lanes]) {
    Vector t[lanes];
    HEADWAY_UNROLL
    for (int i = 0; i < 16; i += 2) {
      t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
      t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
    HEADWAY_UNROLL
    for (int i = 0; i < 16; i += 4) {
      r[i] = join_low(t[i], t[i + 2]);
      r[i + 1] = join_high(t[i], t[i + 2]);
      r[i + 2] = join_low(t[i + 1], t[i + 3]);
      r[i + 3] = join_high(t[i + 1], t[i + 3]);
    }
    // Now r[4a + c] holds, in its four 128-bit parts, column 4 part + c of rows 4a .. 4a + 3.
    HEADWAY_UNROLL
    for (int i = 0; i < 16; i += 8) {
      HEADWAY_UNROLL
      for (int c = 0; c < 4; ++c) {
        t[i + c] = _mm512_shuffle_f32x4(r[i + c], r[i + 4 + c], 0x88);
        t[i + 4 + c] = _mm512_shuffle_f32x4(r[i + c], r[i + 4 + c], 0xdd);
      }
    }
    HEADWAY_UNROLL
    for (int c = 0; c < 8; ++c) {
      r[c] = _mm512_shuffle_f32x4(t[c], t[8 + c], 0x88);
      r[8 + c] = _mm512_shuffle_f32x4(t[c], t[8 + c], 0xdd);
    }
  }

  // Lane l is the sum of r[l]'s lanes. Optional: less work than a transposition and sums of vectors.
  HEADWAY_INLINE static Vector lane_sums(Vector (&r)[lanes]) {
    Vector quarters[4];  // the four 128-bit parts of quarters[q] sum those parts of r[4q] .. r[4q + 3]
    HEADWAY_UNROLL
    for (int q = 0; q < 4; ++q) {
      const Vector front = _mm512_unpacklo_ps(r[4 * q], r[4 * q + 1]) + _mm512_unpackhi_ps(r[4 * q], r[4 * q + 1]);
      const Vector back =
          _mm512_unpacklo_ps(r[4 * q + 2], r[4 * q + 3]) + _mm512_unpackhi_ps(r[4 * q + 2], r[4 * q + 3]);
      quarters[q] = join_low(front, back) + join_high(front, back);
    }
    const Vector low =
        _mm512_shuffle_f32x4(quarters[0], quarters[1], 0x44) + _mm512_shuffle_f32x4(quarters[0], quarters[1], 0xee);
    const Vector high =
        _mm512_shuffle_f32x4(quarters[2], quarters[3], 0x44) + _mm512_shuffle_f32x4(quarters[2], quarters[3], 0xee);
    return _mm512_shuffle_f32x4(low, high, 0x88) + _mm512_shuffle_f32x4(low, high, 0xdd);
  }

 private:
  HEADWAY_INLINE static Mask first(int n) { return static_cast<Mask>((1u << n) - 1u); }
  HEADWAY_INLINE static Vector join_low(Vector a, Vector b) {
    return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
  }
  HEADWAY_INLINE static Vector join_high(Vector a, Vector b) {
    return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
  }
};

struct F64 : Wide {
  using Scalar = double;
  using Vector = __m512d;
  using Mask = __mmask8;
  static constexpr int lanes = 8;
  static constexpr int panel_vectors = 4;
  static constexpr int tile_scalars = 4;
  static constexpr int edge_scalars = 16;
  static constexpr bool fused_softmax = true;

  HEADWAY_INLINE static Vector zero() { return _mm512_setzero_pd(); }
  HEADWAY_INLINE static Vector set(double x) { return _mm512_set1_pd(x); }
  HEADWAY_INLINE static Vector load(const double* p) { return _mm512_loadu_pd(p); }
  HEADWAY_INLINE static void store(double* p, Vector x) { _mm512_storeu_pd(p, x); }
  HEADWAY_INLINE static Vector fma(Vector a, Vector b, Vector c) { return _mm512_fmadd_pd(a, b, c); }
  HEADWAY_INLINE static double fma_scalar(double a, double b, double c) { return __builtin_fma(a, b, c); }
  HEADWAY_INLINE static Vector max(Vector a, Vector b) { return _mm512_max_pd(a, b); }
  HEADWAY_INLINE static Vector min(Vector a, Vector b) { return _mm512_min_pd(a, b); }
  HEADWAY_INLINE static Vector abs(Vector a) { return _mm512_abs_pd(a); }
  HEADWAY_INLINE static Vector round(Vector a) {
    return _mm512_roundscale_pd(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  HEADWAY_INLINE static Vector times_power_of_2(Vector a, Vector n) { return _mm512_scalef_pd(a, n); }
  HEADWAY_INLINE static Vector select(Mask m, Vector yes, Vector no) { return _mm512_mask_blend_pd(m, no, yes); }
  HEADWAY_INLINE static Mask less(Vector a, Vector b) { return _mm512_cmp_pd_mask(a, b, _CMP_LT_OQ); }
  HEADWAY_INLINE static Mask less_equal(Vector a, Vector b) { return _mm512_cmp_pd_mask(a, b, _CMP_LE_OQ); }
  HEADWAY_INLINE static Mask not_less_equal(Vector a, Vector b) { return _mm512_cmp_pd_mask(a, b, _CMP_NLE_UQ); }
  HEADWAY_INLINE static Mask equal(Vector a, Vector b) { return _mm512_cmp_pd_mask(a, b, _CMP_EQ_OQ); }
  HEADWAY_INLINE static Mask both(Mask a, Mask b) { return static_cast<Mask>(a & b); }
  HEADWAY_INLINE static bool any(Mask m) { return m != 0; }
  HEADWAY_INLINE static Mask mask_from_bits(std::uint64_t bits) { return static_cast<Mask>(bits); }
  HEADWAY_INLINE static Vector load_first(const double* p, int n) { return _mm512_maskz_loadu_pd(first(n), p); }
  HEADWAY_INLINE static Vector load_first(const float* p, int n) {
    return _mm512_cvtps_pd(_mm256_maskz_loadu_ps(first(n), p));
  }
  HEADWAY_INLINE static Vector load_first(const float16* p, int n) {
    return _mm512_cvtps_pd(_mm256_cvtph_ps(_mm_maskz_loadu_epi16(first(n), p)));
  }
  HEADWAY_INLINE static Vector load_first(const bfloat16* p, int n) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_maskz_loadu_epi16(first(n), p));
    return _mm512_cvtps_pd(_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16)));
  }
  HEADWAY_INLINE static void store_first(double* p, int n, Vector x) { _mm512_mask_storeu_pd(p, first(n), x); }

  HEADWAY_INLINE static void transpose(Vector (&r)[lanes]) {
    Vector t[lanes];
    HEADWAY_UNROLL
    for (int i = 0; i < 8; i += 2) {
      t[i] = _mm512_unpacklo_pd(r[i], r[i + 1]);
      t[i + 1] = _mm512_unpackhi_pd(r[i], r[i + 1]);
    }
    // t[2a + c] holds, in its four 128-bit parts, column 2 part + c of rows 2a and 2a + 1.
    Vector u[lanes];
    HEADWAY_UNROLL
    for (int i = 0; i < 8; i += 4) {
      HEADWAY_UNROLL
      for (int c = 0; c < 2; ++c) {
        u[i + c] = _mm512_shuffle_f64x2(t[i + c], t[i + 2 + c], 0x88);
        u[i + 2 + c] = _mm512_shuffle_f64x2(t[i + c], t[i + 2 + c], 0xdd);
      }
    }
    HEADWAY_UNROLL
    for (int c = 0; c < 4; ++c) {
      r[c] = _mm512_shuffle_f64x2(u[c], u[4 + c], 0x88);
      r[4 + c] = _mm512_shuffle_f64x2(u[c], u[4 + c], 0xdd);
    }
  }

 private:
  HEADWAY_INLINE static Mask first(int n) { return static_cast<Mask>((1u << n) - 1u); }
};

// First the bytes, 8 x 8 of them within each vector and vectors against each other; then a byte's bits are one bit each
// of 64 rows' words.
HEADWAY_INLINE void Wide::transpose_bits(std::uint64_t (&bits)[64]) {
  const __m512i neighbours = _mm512_set4_epi32(0x0f070e06, 0x0d050c04, 0x0b030a02, 0x09010800);
  const __m512i across = _mm512_set_epi16(31, 23, 15, 7, 30, 22, 14, 6, 29, 21, 13, 5, 28, 20, 12, 4, 27, 19, 11, 3, 26,
                                          18, 10, 2, 25, 17, 9, 1, 24, 16, 8, 0);
  __m512d rows[8];
  HEADWAY_UNROLL
  for (int i = 0; i < 8; ++i) {
    const __m512i pairs = _mm512_shuffle_epi8(_mm512_loadu_si512(bits + 8 * i), neighbours);
    rows[i] = _mm512_castsi512_pd(_mm512_permutexvar_epi16(across, pairs));
  }
  F64::transpose(rows);
  HEADWAY_UNROLL
  for (int i = 0; i < 8; ++i) {
    HEADWAY_UNROLL
    for (int bit = 0; bit < 8; ++bit) {
      const __m512i highest = _mm512_slli_epi16(_mm512_castpd_si512(rows[i]), static_cast<unsigned>(7 - bit));
      bits[8 * i + bit] = _mm512_movepi8_mask(highest);
    }
  }
}

}  // namespace
}  // namespace headway::cpu
