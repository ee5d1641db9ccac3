// The Hopper forward kernels by head dim; one file each holds them.
#pragma once

#include "engines/cuda/kernels/hopper_arguments.h"

namespace headway::cuda {

struct HopperKernel {
  const void* function = nullptr;
  HopperTile tile{};
  std::size_t shared_bytes = 0;
};

HopperKernel hopper_kernel_64(DType dtype, HopperVariant variant);
HopperKernel hopper_kernel_128(DType dtype, HopperVariant variant);
HopperKernel hopper_kernel_256(DType dtype, HopperVariant variant);

}  // namespace headway::cuda
