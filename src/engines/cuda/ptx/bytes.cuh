// Bytes and halves of words.
#pragma once

#include <cstdint>

#include "headway/dtype.h"

namespace headway::cuda::ptx {

// The sign of one byte of a word in all bits of the low half, that of another in all bits of the high half.
template <int low, int high>
__device__ __forceinline__ std::uint32_t signs_of_bytes(std::uint32_t word) {
  constexpr int selector = (8 | low) * 0x11 | (8 | high) * 0x1100;
  std::uint32_t result;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(result) : "r"(word), "n"(selector));
  return result;
}

// Ones in each half of a word whose number differs from the other word's: NaN differs from all.
template <class Half>
__device__ __forceinline__ std::uint32_t not_equal_halves(std::uint32_t a, std::uint32_t b);

template <>
__device__ __forceinline__ std::uint32_t not_equal_halves<bfloat16>(std::uint32_t a, std::uint32_t b) {
  std::uint32_t result;
  asm("set.neu.u32.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

template <>
__device__ __forceinline__ std::uint32_t not_equal_halves<float16>(std::uint32_t a, std::uint32_t b) {
  std::uint32_t result;
  asm("set.neu.u32.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

}  // namespace headway::cuda::ptx
