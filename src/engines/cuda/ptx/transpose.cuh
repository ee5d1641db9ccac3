// Transposes in registers.
#pragma once

#include <cstdint>

namespace headway::cuda::ptx {

// An 8 x 8 matrix of 16-bit elements, of which a lane holds (lane / 4, 2 (lane % 4) + c) in the two halves of a word.
__device__ __forceinline__ std::uint32_t transposed(std::uint32_t pair) {
  std::uint32_t result;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
  return result;
}

}  // namespace headway::cuda::ptx
