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

}  // namespace headway::cuda::ptx
