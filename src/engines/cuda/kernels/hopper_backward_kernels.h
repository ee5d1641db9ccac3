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
HopperBackwardKernel hopper_backward_kernel_96(DType dtype, HopperBackwardVariant variant);
HopperBackwardKernel hopper_backward_kernel_128(DType dtype, HopperBackwardVariant variant);
// Of calls with spans: head dims up to 64, or up to 128.
HopperBackwardKernel hopper_backward_kernel_spans(DType dtype, bool wide);
// Up to 256: one for dK and dV, one for dQ.
HopperBackwardKernel hopper_key_gradients_kernel(DType dtype, HopperBackwardVariant variant);
HopperBackwardKernel hopper_query_gradients_kernel(DType dtype, HopperBackwardVariant variant);

// Before: lse and delta of each row in tiles, and counters at 0.
cudaError_t launch_backward_rows(const HopperBackwardArguments& arguments, const Rows& out, DType dtype,
                                 HopperBackwardTile tile, cudaStream_t stream);
// Between: parts of dK and dV, of so many teams for a kv head, are added up.
cudaError_t launch_backward_parts(const HopperBackwardArguments& arguments, DType dtype, int parts,
                                  cudaStream_t stream);
// After: sums of dQ become its rows (where they are not already), and dV gets what it has from a dO that is not finite.
cudaError_t launch_backward_finish(const HopperBackwardArguments& arguments, DType dtype, HopperBackwardTile tile,
                                   cudaStream_t stream);

}  // namespace headway::cuda
