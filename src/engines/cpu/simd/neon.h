// The SIMD vocabulary for AArch64's Advanced SIMD: 4 floats or 2 doubles a vector, 32 registers. Masks are vectors
// whose lanes are all ones or all zeros. Nothing beyond ARMv8.0 is used.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

#include "engines/cpu/simd/common.h"

namespace headway::cpu {
namespace {

// What the two element types have in common.
struct Wide {
  // 64-bit lanes for Philox, of which the low 32 bits count.
  using Words = uint64x2_t;
  static constexpr int word_lanes = 2;
  HEADWAY_INLINE static Words words(std::uint32_t x) { return vdupq_n_u64(x); }
  HEADWAY_INLINE static Words consecutive_words(std::uint64_t first_word) {
    return vaddq_u64(vdupq_n_u64(first_word), vcombine_u64(vcreate_u64(0), vcreate_u64(1)));
  }
  HEADWAY_INLINE static Words multiply_low_words(Words a, Words b) { return vmull_u32(vmovn_u64(a), vmovn_u64(b)); }
  HEADWAY_INLINE static Words high_words(Words a) { return vshrq_n_u64(a, 32); }
  HEADWAY_INLINE static Words exclusive_or(Words a, Words b, Words c) { return veorq_u64(veorq_u64(a, b), c); }
  HEADWAY_INLINE static std::uint64_t low_words_at_least(Words a, std::uint64_t limit) {
    const Words low = vandq_u64(a, vdupq_n_u64(0xffffffff));
    const Words enough = vcgeq_u64(low, vdupq_n_u64(limit));
    return (vgetq_lane_u64(enough, 0) & 1) | (vgetq_lane_u64(enough, 1) & 2);
  }

 protected:
  // The first n of 4 half numbers.
  template <class Half>
  HEADWAY_INLINE static uint16x4_t load_halves(const Half* p, int n) {
    uint16x4_t halves;
    if (n == 4) {
      std::memcpy(&halves, p, sizeof(halves));
    } else {
      const PaddedRow<4, Half> row = padded_row<4>(p, n);
      std::memcpy(&halves, row.elements, sizeof(halves));
    }
    return halves;
  }
  HEADWAY_INLINE static float32x4_t load_floats(const float* p, int n) {
    return n == 4 ? vld1q_f32(p) : vld1q_f32(padded_row<4>(p, n).elements);
  }
  HEADWAY_INLINE static float64x2_t load_doubles(const double* p, int n) {
    return n == 2 ? vld1q_f64(p) : vld1q_f64(padded_row<2>(p, n).elements);
  }
  HEADWAY_INLINE static float32x4_t load_floats(const float16* p, int n) {
    return vcvt_f32_f16(vreinterpret_f16_u16(load_halves(p, n)));
  }
  HEADWAY_INLINE static float32x4_t load_floats(const bfloat16* p, int n) {
    return vreinterpretq_f32_u32(vshll_n_u16(load_halves(p, n), 16));
  }
  // The first n of 4 bytes, with zeros behind them.
  template <class Byte>
  HEADWAY_INLINE static uint8x8_t load_bytes(const Byte* p, int n) {
    std::uint64_t bytes = 0;
    if (n == 4) {
      std::memcpy(&bytes, p, 4);
    } else {
      std::memcpy(&bytes, p, static_cast<std::size_t>(n));
    }
    return vcreate_u8(bytes);
  }
  HEADWAY_INLINE static float32x4_t load_floats(const int8* p, int n) {
    const int16x8_t wide = vmovl_s8(vreinterpret_s8_u8(load_bytes(p, n)));
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)));
  }
  // As the half numbers with the same bits in front, which are 2^8 times smaller.
  HEADWAY_INLINE static float32x4_t load_floats(const float8* p, int n) {
    const uint16x4_t wide = vget_low_u16(vmovl_u8(load_bytes(p, n)));
    const uint16x4_t magnitude = vand_u16(wide, vdup_n_u16(0x7f));
    const uint16x4_t sign = vshl_n_u16(vand_u16(wide, vdup_n_u16(0x80)), 8);
    const uint16x4_t nan = vand_u16(vceq_u16(magnitude, vdup_n_u16(0x7f)), vdup_n_u16(0x7e00));
    const uint16x4_t half = vorr_u16(vorr_u16(sign, nan), vshl_n_u16(magnitude, 7));
    return vmulq_n_f32(vcvt_f32_f16(vreinterpret_f16_u16(half)), 0x1p8f);
  }
  template <class T, class V>
  HEADWAY_INLINE static void store_part(T* p, int n, V x) {
    if (n * sizeof(T) == sizeof(V)) {
      std::memcpy(p, &x, sizeof(V));
    } else {
      std::memcpy(p, &x, static_cast<std::size_t>(n) * sizeof(T));
    }
  }
};

struct F32 : Wide {
  using Scalar = float;
  using Vector = float32x4_t;
  using Mask = uint32x4_t;
  typedef std::uint32_t Bits __attribute__((vector_size(16)));
  static constexpr int lanes = 4;
  static constexpr int panel_vectors = 4;  // vectors of queries in a panel
  static constexpr int tile_scalars = 4;  // broadcasts in a full tile: 4 x 4 accumulators feed 4 FMA units of latency 4
  static constexpr int edge_scalars = 16;  // broadcasts in a tile of one vector
  static constexpr bool fused_softmax = true;

  HEADWAY_INLINE static Vector zero() { return vdupq_n_f32(0); }
  HEADWAY_INLINE static Vector set(float x) { return vdupq_n_f32(x); }
  HEADWAY_INLINE static Vector load(const float* p) { return vld1q_f32(p); }
  HEADWAY_INLINE static void store(float* p, Vector x) { vst1q_f32(p, x); }
  HEADWAY_INLINE static Vector fma(Vector a, Vector b, Vector c) { return vfmaq_f32(c, a, b); }
  HEADWAY_INLINE static float fma_scalar(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
  HEADWAY_INLINE static Vector max(Vector a, Vector b) { return select(vcgtq_f32(a, b), a, b); }  // b where one is NaN
  HEADWAY_INLINE static Vector min(Vector a, Vector b) { return select(vcltq_f32(a, b), a, b); }
  HEADWAY_INLINE static Vector abs(Vector a) { return vabsq_f32(a); }
  HEADWAY_INLINE static Vector round(Vector a) { return vrndnq_f32(a); }
  HEADWAY_INLINE static Vector times_power_of_2(Vector a, Vector n) { return times_power_of_2_in_steps<F32>(a, n); }
  HEADWAY_INLINE static Vector select(Mask m, Vector yes, Vector no) { return vbslq_f32(m, yes, no); }
  HEADWAY_INLINE static Mask less(Vector a, Vector b) { return vcltq_f32(a, b); }
  HEADWAY_INLINE static Mask less_equal(Vector a, Vector b) { return vcleq_f32(a, b); }
  HEADWAY_INLINE static Mask not_less_equal(Vector a, Vector b) { return vmvnq_u32(vcleq_f32(a, b)); }
  HEADWAY_INLINE static Mask equal(Vector a, Vector b) { return vceqq_f32(a, b); }
  HEADWAY_INLINE static Mask both(Mask a, Mask b) { return vandq_u32(a, b); }
  HEADWAY_INLINE static bool any(Mask m) { return vmaxvq_u32(m) != 0; }
  HEADWAY_INLINE static Mask mask_from_bits(std::uint64_t bits) {
    const Bits lane_bits = {1, 2, 4, 8};
    return vtstq_u32(vdupq_n_u32(static_cast<std::uint32_t>(bits)), __builtin_bit_cast(uint32x4_t, lane_bits));
  }

  // The first n elements of a row, n from 0 to lanes; the rest is 0 and not read.
  template <class In>
  HEADWAY_INLINE static Vector load_first(const In* p, int n) {
    return load_floats(p, n);
  }
  HEADWAY_INLINE static void store_first(float* p, int n, Vector x) { store_part(p, n, x); }
  HEADWAY_INLINE static void store_first(float16* p, int n, Vector x) { store_part(p, n, vcvt_f16_f32(x)); }
  HEADWAY_INLINE static void store_first(bfloat16* p, int n, Vector x) {
    store_part(p, n, vmovn_u32(__builtin_bit_cast(uint32x4_t, bfloat16_bits<F32>(x))));
  }

  // rows[i] lane j becomes rows[j] lane i.
  HEADWAY_INLINE static void transpose(Vector (&r)[lanes]) {
    const float64x2_t even_low = vreinterpretq_f64_f32(vtrn1q_f32(r[0], r[1]));
    const float64x2_t odd_low = vreinterpretq_f64_f32(vtrn2q_f32(r[0], r[1]));
    const float64x2_t even_high = vreinterpretq_f64_f32(vtrn1q_f32(r[2], r[3]));
    const float64x2_t odd_high = vreinterpretq_f64_f32(vtrn2q_f32(r[2], r[3]));
    r[0] = vreinterpretq_f32_f64(vtrn1q_f64(even_low, even_high));
    r[1] = vreinterpretq_f32_f64(vtrn1q_f64(odd_low, odd_high));
    r[2] = vreinterpretq_f32_f64(vtrn2q_f64(even_low, even_high));
    r[3] = vreinterpretq_f32_f64(vtrn2q_f64(odd_low, odd_high));
  }
};

struct F64 : Wide {
  using Scalar = double;
  using Vector = float64x2_t;
  using Mask = uint64x2_t;
  typedef std::uint64_t Bits __attribute__((vector_size(16)));
  static constexpr int lanes = 2;
  static constexpr int panel_vectors = 4;
  static constexpr int tile_scalars = 4;
  static constexpr int edge_scalars = 16;
  static constexpr bool fused_softmax = true;

  HEADWAY_INLINE static Vector zero() { return vdupq_n_f64(0); }
  HEADWAY_INLINE static Vector set(double x) { return vdupq_n_f64(x); }
  HEADWAY_INLINE static Vector load(const double* p) { return vld1q_f64(p); }
  HEADWAY_INLINE static void store(double* p, Vector x) { vst1q_f64(p, x); }
  HEADWAY_INLINE static Vector fma(Vector a, Vector b, Vector c) { return vfmaq_f64(c, a, b); }
  HEADWAY_INLINE static double fma_scalar(double a, double b, double c) { return __builtin_fma(a, b, c); }
  HEADWAY_INLINE static Vector max(Vector a, Vector b) { return select(vcgtq_f64(a, b), a, b); }
  HEADWAY_INLINE static Vector min(Vector a, Vector b) { return select(vcltq_f64(a, b), a, b); }
  HEADWAY_INLINE static Vector abs(Vector a) { return vabsq_f64(a); }
  HEADWAY_INLINE static Vector round(Vector a) { return vrndnq_f64(a); }
  HEADWAY_INLINE static Vector times_power_of_2(Vector a, Vector n) { return times_power_of_2_in_steps<F64>(a, n); }
  HEADWAY_INLINE static Vector select(Mask m, Vector yes, Vector no) { return vbslq_f64(m, yes, no); }
  HEADWAY_INLINE static Mask less(Vector a, Vector b) { return vcltq_f64(a, b); }
  HEADWAY_INLINE static Mask less_equal(Vector a, Vector b) { return vcleq_f64(a, b); }
  HEADWAY_INLINE static Mask not_less_equal(Vector a, Vector b) {
    return veorq_u64(vcleq_f64(a, b), vdupq_n_u64(~std::uint64_t{0}));
  }
  HEADWAY_INLINE static Mask equal(Vector a, Vector b) { return vceqq_f64(a, b); }
  HEADWAY_INLINE static Mask both(Mask a, Mask b) { return vandq_u64(a, b); }
  HEADWAY_INLINE static bool any(Mask m) { return vmaxvq_u32(vreinterpretq_u32_u64(m)) != 0; }
  HEADWAY_INLINE static Mask mask_from_bits(std::uint64_t bits) {
    const Bits lane_bits = {1, 2};
    return vtstq_u64(vdupq_n_u64(bits), __builtin_bit_cast(uint64x2_t, lane_bits));
  }
  HEADWAY_INLINE static Vector load_first(const double* p, int n) { return load_doubles(p, n); }
  template <class In>
  HEADWAY_INLINE static Vector load_first(const In* p, int n) {
    return vcvt_f64_f32(vget_low_f32(load_floats(padded_row<4>(p, n).elements, 4)));
  }
  HEADWAY_INLINE static void store_first(double* p, int n, Vector x) { store_part(p, n, x); }

  HEADWAY_INLINE static void transpose(Vector (&r)[lanes]) {
    const Vector first = r[0];
    r[0] = vtrn1q_f64(first, r[1]);
    r[1] = vtrn2q_f64(first, r[1]);
  }
};

}  // namespace
}  // namespace headway::cpu
