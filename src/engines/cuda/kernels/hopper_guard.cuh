// Keeps what a row may not see out of the tensor cores, where a weight of 0 times a NaN or infinite value is NaN.
//
// Keys are harmless: their scores are replaced, not multiplied. Values in a block that every row sees belong into every
// sum. What is left are value blocks at the edge of somebody's range, or under a mask or bias. Such values are rare, so
// a tile is first done without looking. Only if its output holds a NaN or an infinity it is done again, carefully: two
// warps beside the producer look through those blocks in shared memory, replace what is not finite by 0 and report it,
// and hopper_repair.cuh adds the values that were replaced to the rows that do see them. All other rows get the same
// bits both times.
#pragma once

#include <type_traits>

#include "engines/cuda/kernels/hopper_shared.cuh"
#include "engines/cuda/ptx/convert.cuh"
#include "engines/cuda/ptx/tma.cuh"

namespace headway::cuda {

inline constexpr int guard_warps = 2;  // the last ones of the producer's warpgroup
inline constexpr int guard_threads = 32 * guard_warps;

// Bits of a half's exponent, in both halves of a word.
template <class Half>
inline constexpr std::uint32_t exponent_bits = std::is_same_v<Half, float16> ? 0x7C007C00u : 0x7F807F80u;

// Sets the sign bit of each half that is infinite or NaN: adding the lowest exponent bit carries into it only from an
// exponent that is all ones.
template <class Half>
__device__ __forceinline__ std::uint32_t not_finite(std::uint32_t pair) {
  constexpr std::uint32_t lowest = exponent_bits<Half> & ~(exponent_bits<Half> << 1);
  return ((pair & 0x7FFF7FFFu) + lowest) & 0x80008000u;
}

template <class Half>
__device__ __forceinline__ std::uint32_t without_not_finite(std::uint32_t pair) {
  const std::uint32_t bad = not_finite<Half>(pair);
  return pair & ~((bad >> 15) * 0xFFFFu);
}

// Whether this thread's part of a block holds something that is not finite: one product with 0 for each pair of values.
template <class Half, int chunks_each>
__device__ __forceinline__ bool is_poisoned(const uint4* chunks, int thread) {
  constexpr int together = 4;  // loads in flight
  std::uint32_t sums[4] = {0, 0, 0, 0};
#pragma unroll 1
  for (int i = 0; i < chunks_each; i += together) {
    uint4 loaded[together];
#pragma unroll
    for (int k = 0; k < together; ++k) {
      loaded[k] = chunks[(i + k) * guard_threads + thread];
    }
#pragma unroll
    for (int k = 0; k < together; ++k) {
      sums[0] = ptx::add_not_finite<Half>(loaded[k].x, sums[0]);
      sums[1] = ptx::add_not_finite<Half>(loaded[k].y, sums[1]);
      sums[2] = ptx::add_not_finite<Half>(loaded[k].z, sums[2]);
      sums[3] = ptx::add_not_finite<Half>(loaded[k].w, sums[3]);
    }
  }
  return ((sums[0] | sums[1] | sums[2] | sums[3]) & exponent_bits<Half>) != 0;  // they are 0 or NaN
}

// Looks through one block; true where this thread replaced something.
template <class Half, std::uint32_t bytes>
__device__ __forceinline__ bool check_block(std::uint8_t* block, int thread) {
  constexpr int chunks_each = bytes / sizeof(uint4) / guard_threads;
  static_assert(chunks_each % 4 == 0);
  auto* chunks = reinterpret_cast<uint4*>(block);
  if (!is_poisoned<Half, chunks_each>(chunks, thread)) {
    return false;
  }
#pragma unroll 1
  for (int i = 0; i < chunks_each; ++i) {
    uint4& chunk = chunks[i * guard_threads + thread];
    chunk = {without_not_finite<Half>(chunk.x), without_not_finite<Half>(chunk.y), without_not_finite<Half>(chunk.z),
             without_not_finite<Half>(chunk.w)};
  }
  return true;
}

// Looks through one slot of the ring and says what it found to the consumers.
template <class Half, class Memory>
__device__ __forceinline__ void check_slot(Memory& memory, std::uint32_t slot, int warp, int lane) {
  const bool found = check_block<Half, Memory::tile.block_bytes()>(memory.ring[slot], warp * 32 + lane);
  const bool any = __any_sync(~0u, found);
  if (lane == 0) {
    memory.guard_found[slot][warp] = any;
  }
  if (any) {
    ptx::shared_writes_to_async_fence();
  }
}

}  // namespace headway::cuda
