// Asynchronous copies from global to shared memory (sm_80 and later), 16 bytes each.
#pragma once

#include <cstdint>

#include "engines/cuda/ptx/shared_address.cuh"

namespace headway::cuda::ptx {

// Copies the first `bytes` (0 to 16) of 16 and fills the rest with 0. `from`
// is not read when bytes is 0.
__device__ inline void copy_16(std::uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

// The same for the first `bytes` (0 to 4) of a word.
__device__ inline void copy_word(std::uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

// One element of 4 or 8 bytes, or a 0 of that size.
template <int Bytes>
__device__ inline void copy_element(std::uint32_t to, const void* from, bool any) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(Bytes), "r"(any ? Bytes : 0)
               : "memory");
}

__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `Pending` of this thread's groups are unfinished.
template <int Pending>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

}  // namespace headway::cuda::ptx
