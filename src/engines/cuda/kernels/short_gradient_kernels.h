// The backward of short sequences as the host side calls it.
#pragma once

#include "engines/cuda/kernels/kernels.h"

namespace headway::cuda {

// Inputs, gradients and the list of coarse rows, as the kernel behind it takes them too.
using ShortGradientArguments = CoarseGradientArguments;

constexpr int short_gradient_rows_a_tile = 64;  // of CoarseRows::found

// The most keys that a block has room for, of heads so wide; 0 where the kernel does not take them.
constexpr std::int64_t short_gradient_keys(std::int64_t widest) {
  return widest <= 64 ? 256 : widest <= 128 ? 128 : widest <= 256 ? 64 : 0;
}

// A launch's `stages` say how many tiles of queries are in flight.
Launch short_gradient_launch(const ShortGradientArguments& arguments, DType dtype);
cudaError_t launch_short_gradient(const Launch& launch, const ShortGradientArguments& arguments, cudaStream_t stream);

}  // namespace headway::cuda
