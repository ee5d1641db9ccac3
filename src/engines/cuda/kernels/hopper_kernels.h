// The Hopper forward kernels; one file for each head dim.
#pragma once

#include "engines/cuda/kernels/hopper_arguments.h"
#include "engines/cuda/kernels/kernels.h"

namespace headway::cuda {

struct HopperKernel {
  const void* function = nullptr;
  HopperTile tile{};
  std::size_t shared_bytes = 0;
};

HopperKernel hopper_kernel_64(DType dtype, HopperVariant variant);
HopperKernel hopper_kernel_128(DType dtype, HopperVariant variant);
HopperKernel hopper_kernel_192(DType dtype, HopperVariant variant);
HopperKernel hopper_kernel_256(DType dtype, HopperVariant variant);
HopperKernel hopper_kernel_spans(DType dtype, std::int64_t widest);  // of head dims up to 256

// As many blocks of threads as are given take all tiles.
cudaError_t launch_hopper(const Launch& launch, int blocks, const HopperArguments& arguments, cudaStream_t stream);

}  // namespace headway::cuda
