// Single instructions of a thread or a warp: register budgets, matrix loads, exponentials.
#pragma once

#include <cstdint>

namespace headway::cuda::ptx {

template <int registers>
__device__ __forceinline__ void raise_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

template <int registers>
__device__ __forceinline__ void lower_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

// Chunks of 16 bytes.
__device__ __forceinline__ uint4 load_chunk(std::uint32_t address) {
  uint4 result;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(result.x), "=r"(result.y), "=r"(result.z), "=r"(result.w)
               : "r"(address)
               : "memory");
  return result;
}

__device__ __forceinline__ void store_chunk(std::uint32_t shared, const uint4& chunk) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(chunk.x), "r"(chunk.y), "r"(chunk.z),
               "r"(chunk.w)
               : "memory");
}

__device__ __forceinline__ float2 load_shared_pair(std::uint32_t address) {
  float2 result;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(result.x), "=f"(result.y) : "r"(address) : "memory");
  return result;
}

// Four 8 x 8 matrices of 16-bit elements; each lane gives the address of one row. warp_matrix.cuh loads them.
__device__ __forceinline__ void store_matrices(const std::uint32_t (&values)[4], std::uint32_t row_address) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address), "r"(values[0]),
               "r"(values[1]), "r"(values[2]), "r"(values[3])
               : "memory");
}

// Four neighbouring numbers; stays where it is among other such instructions, so that its registers are taken late.
__device__ __forceinline__ float4 load_four(std::uint32_t shared) {
  float4 result;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(result.x), "=f"(result.y), "=f"(result.z), "=f"(result.w)
               : "r"(shared)
               : "memory");
  return result;
}

// Over a warp, of numbers from 0 on, whose bits are in order.
__device__ __forceinline__ float warp_maximum(float value) {
  return __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(value)));
}

// 2^x to 2 units in the last place; -inf gives 0.
__device__ __forceinline__ float exp2_fast(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

__device__ __forceinline__ float log2_fast(float x) {
  float result;
  asm("lg2.approx.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

__device__ __forceinline__ float reciprocal_fast(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// A value that the compiler keeps in a register instead of computing it again where it is used.
__device__ __forceinline__ std::uint32_t kept(std::uint32_t value) {
  std::uint32_t result;
  asm volatile("mov.b32 %0, %1;" : "=r"(result) : "r"(value));
  return result;
}

// Keeps the computation of a value in front of the volatile instructions that follow: a store that never happens,
// because the value is never above the largest float. An empty asm does not hold it back.
__device__ __forceinline__ void pin(float value, std::uint32_t shared) {
  asm volatile(
      "{\n"
      ".reg .pred never;\n"
      "setp.gt.f32 never, %0, 0f7f7fffff;\n"
      "@never st.shared.f32 [%1], %0;\n"
      "}" ::"f"(value),
      "r"(shared)
      : "memory");
}

}  // namespace headway::cuda::ptx
