// Comparisons by a sum's carry.
#pragma once

#include <cstdint>

namespace headway::cuda::ptx {

// bits with one more at its low end: whether word + addend reaches 2^32.
__device__ __forceinline__ std::uint32_t shift_in_carry(std::uint32_t bits, std::uint32_t word, std::uint32_t addend) {
  std::uint32_t result;
  asm("{\n\t"
      ".reg .b32 sum;\n\t"
      "add.cc.u32 sum, %1, %2;\n\t"
      "addc.u32 %0, %3, %3;\n\t"
      "}"
      : "=r"(result)
      : "r"(word), "r"(addend), "r"(bits));
  return result;
}

}  // namespace headway::cuda::ptx
