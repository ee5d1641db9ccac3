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

// A 4 x 4 matrix of bytes, a row in each of the lanes that differ in bits 2 and 3: the lane's column instead.
__device__ __forceinline__ std::uint32_t transposed_bytes(std::uint32_t row, int lane) {
  const std::uint32_t near = __shfl_xor_sync(~0u, row, 4);
  const std::uint32_t pairs = __byte_perm(row, near, (lane & 4) == 0 ? 0x6240 : 0x3715);
  const std::uint32_t far = __shfl_xor_sync(~0u, pairs, 8);
  return __byte_perm(pairs, far, (lane & 8) == 0 ? 0x5410 : 0x3276);
}

// Exchanges words between the four lanes of a quad: lane q gives its word k to lane k and ends with word q of each.
__device__ __forceinline__ void transpose_quad(std::uint32_t (&words)[4], int q) {
#pragma unroll
  for (int k = 0; k < 4; k += 2) {
    const std::uint32_t other = __shfl_xor_sync(~0u, (q & 1) ? words[k] : words[k + 1], 1);
    ((q & 1) ? words[k] : words[k + 1]) = other;
  }
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const std::uint32_t other = __shfl_xor_sync(~0u, (q & 2) ? words[k] : words[k + 2], 2);
    ((q & 2) ? words[k] : words[k + 2]) = other;
  }
}

}  // namespace headway::cuda::ptx
