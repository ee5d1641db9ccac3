// The bulk tensor copy engine: one thread asks for a box of a tensor, which lands in shared memory and reports to a
// barrier. What lies outside the tensor arrives as zeros.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace headway::cuda::ptx {

struct BoxOrigin {
  int column, row, head, batch;
};

__device__ __forceinline__ void copy_box(std::uint32_t shared, const CUtensorMap* map, BoxOrigin origin,
                                         std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(origin.column), "r"(origin.row), "r"(origin.head), "r"(origin.batch)
      : "memory");
}

// The other way, as one of the copies that bulk_commit and bulk_wait_read are about; what lies outside the tensor is
// not written.
__device__ __forceinline__ void store_box(std::uint32_t shared, const CUtensorMap* map, BoxOrigin origin) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
               "r"(shared), "r"(origin.column), "r"(origin.row), "r"(origin.head), "r"(origin.batch)
               : "memory");
}

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Orders this thread's ordinary writes to shared memory before what the tensor cores read; a barrier has to follow.
__device__ __forceinline__ void shared_writes_to_async_fence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace headway::cuda::ptx
