// Launches a Hopper forward kernel.
#include "engines/cuda/kernels/hopper_kernels.h"
#include "engines/cuda/kernels/launch.cuh"
#include "engines/cuda/ptx/dependent_launch.cuh"

namespace headway::cuda {
namespace {

// The forward kernel may begin at once: its blocks of threads know their first tiles without the counter.
__global__ void clear_counter(int* counter) {
  ptx::let_next_kernel_start();
  *counter = 0;
}

}  // namespace

cudaError_t launch_hopper(const Launch& launch, int blocks, const HopperArguments& arguments, cudaStream_t stream) {
  cudaLaunchConfig_t config{};
  config.stream = stream;
  cudaLaunchAttribute early = early_start();
  if (arguments.next_tile != nullptr) {
    config.gridDim = config.blockDim = dim3(1);
    if (const cudaError_t result = cudaLaunchKernelEx(&config, clear_counter, arguments.next_tile)) {
      return result;
    }
    config.attrs = &early;
    config.numAttrs = 1;
  }
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(launch.threads));
  config.dynamicSmemBytes = launch.shared_bytes;
  void* parameters[] = {const_cast<HopperArguments*>(&arguments)};
  return cudaLaunchKernelExC(&config, launch.kernel, parameters);
}

}  // namespace headway::cuda
