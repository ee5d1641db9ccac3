// Dropout on the device: the counters of core/dropout.h.
#pragma once

#include "core/dropout.h"
#include "engines/cuda/arguments.h"
#include "engines/cuda/ptx/carry.cuh"

namespace headway::cuda {

// The words of keys 4 * quad to 4 * quad + 3 in row i of head h, item b.
__device__ inline Philox4x32::Counter dropout_words(const DropoutArguments& dropout, std::int64_t b, std::int64_t h,
                                                    std::int64_t i, std::int64_t quad) {
  return Philox4x32::words({static_cast<std::uint32_t>(quad), static_cast<std::uint32_t>(i),
                            static_cast<std::uint32_t>(h), static_cast<std::uint32_t>(b)},
                           dropout.keys);
}

__device__ inline bool is_kept(const DropoutArguments& dropout, std::uint32_t word) {
  return word >= dropout.threshold;
}

// Whether the weight of (b, h, i, j) is kept; kernels that walk along j draw four at a time instead.
__device__ inline bool is_kept(const DropoutArguments& dropout, std::int64_t b, std::int64_t h, std::int64_t i,
                               std::int64_t j) {
  const Philox4x32::Counter words = dropout_words(dropout, b, h, i, j >> 2);
  const std::uint32_t low = (j & 1) != 0 ? words[1] : words[0];
  const std::uint32_t high = (j & 1) != 0 ? words[3] : words[2];
  return is_kept(dropout, (j & 2) != 0 ? high : low);
}

// The last rounds of several draws, side by side: each waits for the one before it.
template <int count>
__device__ __forceinline__ void finish_draws(const DropoutArguments& dropout, Philox4x32::Counter (&draws)[count]) {
#pragma unroll
  for (int round = QuadDraw::rounds; round < Philox4x32::rounds; ++round) {
#pragma unroll
    for (int n = 0; n < count; ++n) {
      draws[n] = Philox4x32::round(draws[n], dropout.keys[round]);
    }
  }
}

// Which of four keys are kept, for up to eight draws in turn.
class KeptBytes {
 public:
  __device__ __forceinline__ void add(const DropoutArguments& dropout, const Philox4x32::Counter& words) {
    const auto missing = static_cast<std::uint32_t>(-dropout.threshold);  // in words that are not kept
#pragma unroll
    for (int key = 0; key < 4; ++key) {
      bits_[key] = ptx::shift_in_carry(bits_[key], words[key], missing);
    }
  }

  // A byte for each key, the first draw in its highest bit.
  template <int draws>
  __device__ __forceinline__ std::uint32_t bytes(const DropoutArguments& dropout) const {
    const std::uint32_t bytes = (bits_[0] | bits_[1] << 8 | bits_[2] << 16 | bits_[3] << 24) << (8 - draws);
    return dropout.threshold == 0 ? ~0u : bytes;  // where 2^32 words are missing, which is no sum's addend
  }

 private:
  std::uint32_t bits_[4] = {0, 0, 0, 0};
};

}  // namespace headway::cuda
