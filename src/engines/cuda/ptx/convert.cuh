// Conversions between the half types and f32, which C++ has no words for.
#pragma once

#include <cstdint>

#include "headway/dtype.h"

namespace headway::cuda::ptx {

__device__ inline float to_float(bfloat16 value) { return __uint_as_float(std::uint32_t{value.bits} << 16); }

__device__ inline float to_float(float16 value) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
  return result;
}

// As the bits of a half it is 2^-8 of itself.
__device__ inline float to_float(float8_e4m3 value) {
  const std::uint32_t size = value.bits & 0x7Fu;
  float16 half;
  half.bits = static_cast<std::uint16_t>((value.bits & 0x80u) << 8 | size << 7);
  return size == 0x7Fu ? __uint_as_float(0x7FC00000u) : to_float(half) * 256.0f;
}

__device__ inline void convert(float value, bfloat16& result) {
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
}

__device__ inline void convert(float value, float16& result) {
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
}

// Two values in one register, the first in the low half.
template <class Half>
__device__ inline std::uint32_t packed_pair(float low, float high);

template <>
__device__ inline std::uint32_t packed_pair<bfloat16>(float low, float high) {
  std::uint32_t result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}

template <>
__device__ inline std::uint32_t packed_pair<float16>(float low, float high) {
  std::uint32_t result;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}

// sum + 0 * pair, in both halves: NaN where the pair holds an infinity or a NaN.
template <class Half>
__device__ inline std::uint32_t add_not_finite(std::uint32_t pair, std::uint32_t sum);

template <>
__device__ inline std::uint32_t add_not_finite<bfloat16>(std::uint32_t pair, std::uint32_t sum) {
  asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(pair), "r"(0));
  return sum;
}

template <>
__device__ inline std::uint32_t add_not_finite<float16>(std::uint32_t pair, std::uint32_t sum) {
  asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(pair), "r"(0));
  return sum;
}

// The lower of both halves; the other where one is NaN.
template <class Half>
__device__ inline std::uint32_t lower_pair(std::uint32_t a, std::uint32_t b);

template <>
__device__ inline std::uint32_t lower_pair<bfloat16>(std::uint32_t a, std::uint32_t b) {
  std::uint32_t result;
  asm("min.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

template <>
__device__ inline std::uint32_t lower_pair<float16>(std::uint32_t a, std::uint32_t b) {
  std::uint32_t result;
  asm("min.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

template <class Half>
__device__ inline float2 unpacked_pair(std::uint32_t pair);

template <>
__device__ inline float2 unpacked_pair<bfloat16>(std::uint32_t pair) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u)};
}

template <>
__device__ inline float2 unpacked_pair<float16>(std::uint32_t pair) {
  float2 result;
  asm("{\n"
      ".reg .f16 low, high;\n"
      "mov.b32 {low, high}, %2;\n"
      "cvt.f32.f16 %0, low;\n"
      "cvt.f32.f16 %1, high;\n"
      "}"
      : "=f"(result.x), "=f"(result.y)
      : "r"(pair));
  return result;
}

}  // namespace headway::cuda::ptx
