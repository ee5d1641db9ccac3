// The SIMD vocabulary for AVX2 with FMA and F16C: 8 floats or 4 doubles a vector, 16 registers. Masks are vectors whose
// lanes are all ones or all zeros.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "engines/cpu/simd/common.h"

namespace headway::cpu {
namespace {

// Masked loads and stores of 32-bit lanes take their mask from here: 8 words from `8 - n` on have n ones in front.
constexpr std::int32_t ones_then_zeros[16] = {-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0};

// What the two element types have in common.
struct Wide {
  // 64-bit lanes for Philox, of which the low 32 bits count.
  using Words = __m256i;
  static constexpr int word_lanes = 4;
  HEADWAY_INLINE static Words words(std::uint32_t x) { return _mm256_set1_epi64x(x); }
  HEADWAY_INLINE static Words consecutive_words(std::uint64_t first_word) {
    return _mm256_add_epi64(_mm256_set1_epi64x(static_cast<long long>(first_word)), _mm256_set_epi64x(3, 2, 1, 0));
  }
  HEADWAY_INLINE static Words multiply_low_words(Words a, Words b) { return _mm256_mul_epu32(a, b); }
  HEADWAY_INLINE static Words high_words(Words a) { return _mm256_srli_epi64(a, 32); }
  HEADWAY_INLINE static Words exclusive_or(Words a, Words b, Words c) {
    return _mm256_xor_si256(_mm256_xor_si256(a, b), c);
  }
  HEADWAY_INLINE static std::uint64_t low_words_at_least(Words a, std::uint64_t limit) {
    const Words low = _mm256_and_si256(a, _mm256_set1_epi64x(0xffffffff));
    const Words below = _mm256_cmpgt_epi64(_mm256_set1_epi64x(static_cast<long long>(limit)), low);
    return static_cast<std::uint64_t>(~_mm256_movemask_pd(_mm256_castsi256_pd(below)) & 0xf);
  }

  // Bit l: whether byte l is not 0, for up to 64 bytes.
  HEADWAY_INLINE static std::uint64_t nonzero_bytes(const std::uint8_t* p, int n) {
    std::uint64_t zeros = 0;
    int l = 0;
    for (; l + 32 <= n; l += 32) {
      const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + l));
      const __m256i is_zero = _mm256_cmpeq_epi8(bytes, _mm256_setzero_si256());
      zeros |= static_cast<std::uint64_t>(static_cast<std::uint32_t>(_mm256_movemask_epi8(is_zero))) << l;
    }
    for (; l < n; l += 8) {
      const __m128i is_zero = _mm_cmpeq_epi8(load_bytes(p + l, n - l < 8 ? n - l : 8), _mm_setzero_si128());
      zeros |= static_cast<std::uint64_t>(_mm_movemask_epi8(is_zero) & 0xff) << l;
    }
    return ~zeros & (n >= 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << n) - 1);
  }
  // Of 32 words, which hold a panel. Their bytes are transposed first; then the highest bits of 32 bytes are a word.
  HEADWAY_INLINE static void transpose_bits(std::uint64_t (&bits)[64]);

 protected:
  HEADWAY_INLINE static __m256i first_words(int n) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(ones_then_zeros + 8 - n));
  }
  HEADWAY_INLINE static __m256d load_doubles(const double* p, int n) {
    return n == 4 ? _mm256_loadu_pd(p) : _mm256_maskload_pd(p, first_words(2 * n));
  }
  // The first n of `count` half numbers, 4 or 8.
  template <int count, class Half>
  HEADWAY_INLINE static __m128i load_halves(const Half* p, int n) {
    if (n == count) {
      const auto* whole = reinterpret_cast<const __m128i*>(p);
      return count == 8 ? _mm_loadu_si128(whole) : _mm_loadl_epi64(whole);
    }
    const PaddedRow<8, Half> row = padded_row<8>(p, n);
    return _mm_load_si128(reinterpret_cast<const __m128i*>(row.elements));
  }
  // The first n of 8 bytes.
  template <class Byte>
  HEADWAY_INLINE static __m128i load_bytes(const Byte* p, int n) {
    if (n == 8) {
      return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    }
    const PaddedRow<8, Byte> row = padded_row<8>(p, n);
    return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(row.elements));
  }
};

HEADWAY_INLINE void Wide::transpose_bits(std::uint64_t (&bits)[64]) {
  // Vector i: words 2i and 2i + 1 in its first 128 bits, 16 words further in its second, byte beside byte.
  const __m256i beside =
      _mm256_broadcastsi128_si256(_mm_set_epi8(15, 7, 14, 6, 13, 5, 12, 4, 11, 3, 10, 2, 9, 1, 8, 0));
  __m256i r[8], t[8];
  HEADWAY_UNROLL
  for (int i = 0; i < 8; ++i) {
    const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bits + 2 * i));
    const __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bits + 16 + 2 * i));
    r[i] = _mm256_shuffle_epi8(_mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1), beside);
  }
  // An 8 x 8 transposition of pairs of bytes in each half.
  HEADWAY_UNROLL
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_epi16(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_epi16(r[i], r[i + 1]);
  }
  HEADWAY_UNROLL
  for (int i = 0; i < 8; i += 4) {
    HEADWAY_UNROLL
    for (int c = 0; c < 2; ++c) {
      r[i + 2 * c] = _mm256_unpacklo_epi32(t[i + c], t[i + 2 + c]);
      r[i + 2 * c + 1] = _mm256_unpackhi_epi32(t[i + c], t[i + 2 + c]);
    }
  }
  HEADWAY_UNROLL
  for (int c = 0; c < 4; ++c) {
    t[2 * c] = _mm256_unpacklo_epi64(r[c], r[4 + c]);
    t[2 * c + 1] = _mm256_unpackhi_epi64(r[c], r[4 + c]);
  }
  for (int c = 0; c < 8; ++c) {
    __m256i bytes = t[c];
    HEADWAY_UNROLL
    for (int b = 7; b >= 0; --b) {
      bits[8 * c + b] = static_cast<std::uint32_t>(_mm256_movemask_epi8(bytes));
      bytes = _mm256_add_epi8(bytes, bytes);
    }
  }
}

struct F32 : Wide {
  using Scalar = float;
  using Vector = __m256;
  using Mask = __m256;
  typedef std::uint32_t Bits __attribute__((vector_size(32)));
  static constexpr int lanes = 8;
  static constexpr int panel_vectors = 3;  // vectors of queries in a panel
  static constexpr int tile_scalars = 4;   // broadcasts in a full tile: 3 x 4 accumulators leave 4 registers
  static constexpr int edge_scalars = 8;   // broadcasts in a tile of one vector
  static constexpr bool fused_softmax = true;

  HEADWAY_INLINE static Vector zero() { return _mm256_setzero_ps(); }
  HEADWAY_INLINE static Vector set(float x) { return _mm256_set1_ps(x); }
  HEADWAY_INLINE static Vector load(const float* p) { return _mm256_loadu_ps(p); }
  HEADWAY_INLINE static void store(float* p, Vector x) { _mm256_storeu_ps(p, x); }
  HEADWAY_INLINE static Vector fma(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
  HEADWAY_INLINE static float fma_scalar(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
  HEADWAY_INLINE static Vector max(Vector a, Vector b) { return _mm256_max_ps(a, b); }  // b where one is NaN
  HEADWAY_INLINE static Vector min(Vector a, Vector b) { return _mm256_min_ps(a, b); }
  HEADWAY_INLINE static Vector abs(Vector a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
  HEADWAY_INLINE static Vector round(Vector a) {
    return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  HEADWAY_INLINE static Vector times_power_of_2(Vector a, Vector n) { return times_power_of_2_in_steps<F32>(a, n); }
  HEADWAY_INLINE static Vector select(Mask m, Vector yes, Vector no) { return _mm256_blendv_ps(no, yes, m); }
  HEADWAY_INLINE static Mask less(Vector a, Vector b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
  HEADWAY_INLINE static Mask less_equal(Vector a, Vector b) { return _mm256_cmp_ps(a, b, _CMP_LE_OQ); }
  HEADWAY_INLINE static Mask not_less_equal(Vector a, Vector b) { return _mm256_cmp_ps(a, b, _CMP_NLE_UQ); }
  HEADWAY_INLINE static Mask equal(Vector a, Vector b) { return _mm256_cmp_ps(a, b, _CMP_EQ_OQ); }
  HEADWAY_INLINE static Mask both(Mask a, Mask b) { return _mm256_and_ps(a, b); }
  HEADWAY_INLINE static bool any(Mask m) { return _mm256_movemask_ps(m) != 0; }
  HEADWAY_INLINE static Mask mask_from_bits(std::uint64_t bits) {
    const __m256i lane_bits = _mm256_set_epi32(128, 64, 32, 16, 8, 4, 2, 1);
    const __m256i wanted = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits)), lane_bits);
    return _mm256_castsi256_ps(_mm256_cmpeq_epi32(wanted, lane_bits));
  }

  // The first n elements of a row, n from 0 to lanes; the rest is 0 and not read.
  HEADWAY_INLINE static Vector load_first(const float* p, int n) {
    return n == lanes ? _mm256_loadu_ps(p) : _mm256_maskload_ps(p, first_words(n));
  }
  HEADWAY_INLINE static Vector load_first(const float16* p, int n) { return _mm256_cvtph_ps(load_halves<8>(p, n)); }
  HEADWAY_INLINE static Vector load_first(const bfloat16* p, int n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_halves<8>(p, n)), 16));
  }
  HEADWAY_INLINE static Vector load_first(const int8* p, int n) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load_bytes(p, n)));
  }
  // As the half numbers with the same bits in front, which are 2^8 times smaller.
  HEADWAY_INLINE static Vector load_first(const float8* p, int n) {
    const __m128i shifted =
        _mm_slli_epi16(_mm_cvtepi8_epi16(load_bytes(p, n)), 7);  // the sign also where it does not belong
    const __m128i half = _mm_and_si128(shifted, _mm_set1_epi16(static_cast<short>(0xbf80)));
    const __m128i magnitude = _mm_and_si128(half, _mm_set1_epi16(0x3f80));
    const __m128i nan = _mm_and_si128(_mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x3f80)), _mm_set1_epi16(0x7e00));
    return _mm256_cvtph_ps(_mm_or_si128(half, nan)) * set(0x1p8f);
  }
  HEADWAY_INLINE static void store_first(float* p, int n, Vector x) {
    n == lanes ? _mm256_storeu_ps(p, x) : _mm256_maskstore_ps(p, first_words(n), x);
  }
  HEADWAY_INLINE static void store_first(float16* p, int n, Vector x) {
    store_halves(p, n, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  HEADWAY_INLINE static void store_first(bfloat16* p, int n, Vector x) {
    const __m256i bits = __builtin_bit_cast(__m256i, bfloat16_bits<F32>(x));
    store_halves(p, n, _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1)));
  }

  // rows[i] lane j becomes rows[j] lane i.
  HEADWAY_INLINE static void transpose(Vector (&r)[lanes]) {
    Vector t[lanes];
    HEADWAY_UNROLL
    for (int i = 0; i < 8; i += 2) {
      t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
      t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    HEADWAY_UNROLL
    for (int i = 0; i < 8; i += 4) {
      r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
      r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
      r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
      r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    // Now r[4a + c] holds, in its two 128-bit parts, column 4 part + c of rows 4a .. 4a + 3.
    HEADWAY_UNROLL
    for (int c = 0; c < 4; ++c) {
      t[c] = _mm256_permute2f128_ps(r[c], r[4 + c], 0x20);
      t[4 + c] = _mm256_permute2f128_ps(r[c], r[4 + c], 0x31);
    }
    HEADWAY_UNROLL
    for (int c = 0; c < 8; ++c) {
      r[c] = t[c];
    }
  }

 private:
  template <class Half>
  HEADWAY_INLINE static void store_halves(Half* p, int n, __m128i x) {
    if (n == lanes) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(p), x);
    } else {
      std::memcpy(p, &x, static_cast<std::size_t>(n) * sizeof(Half));
    }
  }
};

struct F64 : Wide {
  using Scalar = double;
  using Vector = __m256d;
  using Mask = __m256d;
  typedef std::uint64_t Bits __attribute__((vector_size(32)));
  static constexpr int lanes = 4;
  static constexpr int panel_vectors = 3;
  static constexpr int tile_scalars = 4;
  static constexpr int edge_scalars = 8;
  static constexpr bool fused_softmax = true;

  HEADWAY_INLINE static Vector zero() { return _mm256_setzero_pd(); }
  HEADWAY_INLINE static Vector set(double x) { return _mm256_set1_pd(x); }
  HEADWAY_INLINE static Vector load(const double* p) { return _mm256_loadu_pd(p); }
  HEADWAY_INLINE static void store(double* p, Vector x) { _mm256_storeu_pd(p, x); }
  HEADWAY_INLINE static Vector fma(Vector a, Vector b, Vector c) { return _mm256_fmadd_pd(a, b, c); }
  HEADWAY_INLINE static double fma_scalar(double a, double b, double c) { return __builtin_fma(a, b, c); }
  HEADWAY_INLINE static Vector max(Vector a, Vector b) { return _mm256_max_pd(a, b); }
  HEADWAY_INLINE static Vector min(Vector a, Vector b) { return _mm256_min_pd(a, b); }
  HEADWAY_INLINE static Vector abs(Vector a) { return _mm256_andnot_pd(_mm256_set1_pd(-0.0), a); }
  HEADWAY_INLINE static Vector round(Vector a) {
    return _mm256_round_pd(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  HEADWAY_INLINE static Vector times_power_of_2(Vector a, Vector n) { return times_power_of_2_in_steps<F64>(a, n); }
  HEADWAY_INLINE static Vector select(Mask m, Vector yes, Vector no) { return _mm256_blendv_pd(no, yes, m); }
  HEADWAY_INLINE static Mask less(Vector a, Vector b) { return _mm256_cmp_pd(a, b, _CMP_LT_OQ); }
  HEADWAY_INLINE static Mask less_equal(Vector a, Vector b) { return _mm256_cmp_pd(a, b, _CMP_LE_OQ); }
  HEADWAY_INLINE static Mask not_less_equal(Vector a, Vector b) { return _mm256_cmp_pd(a, b, _CMP_NLE_UQ); }
  HEADWAY_INLINE static Mask equal(Vector a, Vector b) { return _mm256_cmp_pd(a, b, _CMP_EQ_OQ); }
  HEADWAY_INLINE static Mask both(Mask a, Mask b) { return _mm256_and_pd(a, b); }
  HEADWAY_INLINE static bool any(Mask m) { return _mm256_movemask_pd(m) != 0; }
  HEADWAY_INLINE static Mask mask_from_bits(std::uint64_t bits) {
    const __m256i lane_bits = _mm256_set_epi64x(8, 4, 2, 1);
    const __m256i wanted = _mm256_and_si256(_mm256_set1_epi64x(static_cast<long long>(bits)), lane_bits);
    return _mm256_castsi256_pd(_mm256_cmpeq_epi64(wanted, lane_bits));
  }
  HEADWAY_INLINE static Vector load_first(const double* p, int n) { return load_doubles(p, n); }
  HEADWAY_INLINE static Vector load_first(const float* p, int n) {
    return _mm256_cvtps_pd(_mm_maskload_ps(p, _mm256_castsi256_si128(first_words(n))));
  }
  HEADWAY_INLINE static Vector load_first(const float16* p, int n) {
    return _mm256_cvtps_pd(_mm_cvtph_ps(load_halves<4>(p, n)));
  }
  HEADWAY_INLINE static Vector load_first(const bfloat16* p, int n) {
    return _mm256_cvtps_pd(_mm_castsi128_ps(_mm_slli_epi32(_mm_cvtepu16_epi32(load_halves<4>(p, n)), 16)));
  }
  HEADWAY_INLINE static void store_first(double* p, int n, Vector x) {
    n == lanes ? _mm256_storeu_pd(p, x) : _mm256_maskstore_pd(p, first_words(2 * n), x);
  }

  HEADWAY_INLINE static void transpose(Vector (&r)[lanes]) {
    Vector t[lanes];
    HEADWAY_UNROLL
    for (int i = 0; i < 4; i += 2) {
      t[i] = _mm256_unpacklo_pd(r[i], r[i + 1]);
      t[i + 1] = _mm256_unpackhi_pd(r[i], r[i + 1]);
    }
    // t[2a + c] holds, in its two 128-bit parts, column 2 part + c of rows 2a and 2a + 1.
    HEADWAY_UNROLL
    for (int c = 0; c < 2; ++c) {
      r[c] = _mm256_permute2f128_pd(t[c], t[2 + c], 0x20);
      r[2 + c] = _mm256_permute2f128_pd(t[c], t[2 + c], 0x31);
    }
  }
};

}  // namespace
}  // namespace headway::cpu
