// Dropout on the device: core/philox.h with the counter layout of core/dropout.h.
#pragma once

#include "core/philox.h"
#include "engines/cuda/arguments.h"

namespace headway::cuda {

// The words of keys 4 * quad to 4 * quad + 3 in row i of head h, item b.
__device__ inline Philox4x32::Counter dropout_words(const DropoutArguments& dropout, std::int64_t b, std::int64_t h,
                                                    std::int64_t i, std::int64_t quad) {
  return Philox4x32::words({static_cast<std::uint32_t>(quad), static_cast<std::uint32_t>(i),
                            static_cast<std::uint32_t>(h), static_cast<std::uint32_t>(b)},
                           dropout.seed);
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

}  // namespace headway::cuda
