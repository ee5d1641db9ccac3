// What the kernels with a producer and consumers have in common: how a block of threads begins and parts.
#pragma once

#include <cstdint>

#include "engines/cuda/ptx/mbarrier.cuh"
#include "engines/cuda/ptx/shared_address.cuh"
#include "engines/cuda/ptx/warp.cuh"

namespace headway::cuda {

__device__ __forceinline__ void init_barrier(std::uint64_t& barrier, int arrivals) {
  ptx::barrier_init(ptx::shared_address(&barrier), arrivals);
}

// init() by one thread. Then the first warpgroup gives registers to the others: feed(warp, lane) in it, and in each of
// the others consume(which, warp, lane).
template <int producer_registers, int consumer_registers, class Init, class Feed, class Consume>
__device__ __forceinline__ void part_block(const Init& init, const Feed& feed, const Consume& consume) {
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0);
  const int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    init();
  }
  __syncthreads();
  if (group == 0) {
    ptx::lower_registers<producer_registers>();
    feed(warp, lane);
  } else {
    ptx::raise_registers<consumer_registers>();
    consume(group - 1, warp, lane);
  }
}

}  // namespace headway::cuda
