// The Hopper kernels; one file for each head dim of the forward, one for decoding.
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
HopperKernel hopper_kernel_256(DType dtype, HopperVariant variant);

// Decoding: as decode_launch and launch_decode, for layouts that the copy engine can read.
Launch hopper_decode_launch(const ForwardArguments& arguments, DType dtype, std::int64_t splits);
cudaError_t launch_hopper_decode(const Launch& launch, const HopperDecodeArguments& arguments, DType dtype,
                                 cudaStream_t stream);

}  // namespace headway::cuda
