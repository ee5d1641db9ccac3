// Counting blocks, and choosing a kernel by type and width.
#pragma once

#include <cstdint>
#include <utility>

#include "engines/cuda/kernels/kernels.h"

namespace headway::cuda {

inline std::int64_t blocks(std::int64_t size, std::int64_t block) { return (size + block - 1) / block; }

// One axis, which may have 2^31 - 1 blocks; kernels loop over what is left.
inline dim3 grid(std::int64_t tasks) {
  constexpr std::int64_t most = (std::int64_t{1} << 31) - 1;
  return dim3(static_cast<unsigned>(tasks < most ? tasks : most));
}

// Launches a kernel and returns what CUDA says of that: what cudaGetLastError would say may be another library's.
template <class... Parameters, class... Values>
cudaError_t start(void (*kernel)(Parameters...), dim3 blocks, int threads, cudaStream_t stream, Values&&... values) {
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Values>(values)...);
}

// For a kernel that may begin before the one in front of it has ended (ptx/dependent_launch.cuh).
inline cudaLaunchAttribute early_start() {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  return attribute;
}

// choose<T, Depth>() for a half type, with the smallest depth that holds `width`.
template <class Choose>
Launch of_half_type(DType dtype, std::int64_t width, const Choose& choose) {
  const auto of_type = [&]<class T>() {
    return width <= 64    ? choose.template operator()<T, 64>()
           : width <= 128 ? choose.template operator()<T, 128>()
                          : choose.template operator()<T, 256>();
  };
  return dtype == DType::bf16 ? of_type.template operator()<bfloat16>() : of_type.template operator()<float16>();
}

inline std::int64_t widest(const Arguments& arguments) {
  return arguments.head_dim > arguments.value_dim ? arguments.head_dim : arguments.value_dim;
}

}  // namespace headway::cuda
