// The Hopper backward's kernels by head dim, one file each, and what runs before and after them.
#pragma once

#include <cuda_runtime_api.h>

#include "engines/cuda/kernels/hopper_backward_arguments.h"

namespace headway::cuda {

struct HopperBackwardKernel {
  const void* function = nullptr;
  HopperBackwardTile tile{};
  std::size_t shared_bytes = 0;
};

HopperBackwardKernel hopper_backward_kernel_64(DType dtype, HopperBackwardVariant variant);
HopperBackwardKernel hopper_backward_kernel_128(DType dtype, HopperBackwardVariant variant);

// Before: lse and delta of each row in tiles, and counters at 0.
cudaError_t launch_backward_rows(const HopperBackwardArguments& arguments, const Rows& out, DType dtype,
                                 HopperBackwardTile tile, cudaStream_t stream);
// After: sums of dQ become its rows.
cudaError_t launch_backward_finish(const HopperBackwardArguments& arguments, DType dtype, HopperBackwardTile tile,
                                   cudaStream_t stream);

}  // namespace headway::cuda
