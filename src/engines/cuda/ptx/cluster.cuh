// Blocks of a cluster, which run at once and may read each other's shared memory (sm_90).
#pragma once

#include <cstdint>

namespace headway::cuda::ptx {

// All threads of the cluster's blocks; what they wrote before it can be read behind it.
__device__ __forceinline__ void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

// The same place in the shared memory of another block of the cluster.
__device__ __forceinline__ std::uint32_t address_in_block(std::uint32_t shared, unsigned rank) {
  std::uint32_t result;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(result) : "r"(shared), "r"(rank));
  return result;
}

__device__ __forceinline__ float load_from_block(std::uint32_t address) {
  float result;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(result) : "r"(address) : "memory");
  return result;
}

__device__ __forceinline__ float4 load_four_from_block(std::uint32_t address) {
  float4 result;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(result.x), "=f"(result.y), "=f"(result.z), "=f"(result.w)
               : "r"(address)
               : "memory");
  return result;
}

}  // namespace headway::cuda::ptx
