#include "engines/cuda/driver.h"

#include <cuda_runtime_api.h>

namespace headway::cuda {

void* driver_function(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult status{};
#if CUDART_VERSION >= 12050
  const cudaError_t result = cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &status);
#else
  const cudaError_t result = cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &status);
#endif
  if (result != cudaSuccess) {
    cudaGetLastError();
    return nullptr;
  }
  return status == cudaDriverEntryPointSuccess ? found : nullptr;
}

}  // namespace headway::cuda
