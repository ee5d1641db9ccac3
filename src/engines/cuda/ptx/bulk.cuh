// Bulk copies of plain bytes between shared and device memory, and the flags with which blocks of threads hand such
// memory to each other. Addresses and sizes are multiples of 16 bytes.
#pragma once

#include <cstdint>

namespace headway::cuda::ptx {

// Reports to a barrier like a tensor copy.
__device__ __forceinline__ void bulk_load(std::uint32_t shared, const void* global, std::uint32_t bytes,
                                          std::uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(global), "r"(bytes), "r"(barrier)
               : "memory");
}

__device__ __forceinline__ void bulk_store(void* global, std::uint32_t shared, std::uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared), "r"(bytes)
               : "memory");
}

// Adds f32 numbers, each in one go; the order of several such copies to one place is nobody's unless someone waits.
__device__ __forceinline__ void bulk_add(void* global, std::uint32_t shared, std::uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global), "r"(shared),
               "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until shared memory has been read; until device memory has been written.
__device__ __forceinline__ void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Orders what this thread has seen of device memory before its bulk copies. (Without .global it costs a fence of
// everything.)
__device__ __forceinline__ void global_to_async_fence() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

__device__ __forceinline__ int load_acquire(const int* flag) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}

__device__ __forceinline__ void add_release(int* flag, int value) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

}  // namespace headway::cuda::ptx
