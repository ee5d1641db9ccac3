// Copying between views on one device, whatever their strides.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace headway::cuda {

struct StridedCopy {
  static constexpr int most_axes = 8;
  const void* from = nullptr;
  void* to = nullptr;
  int rank = 0;
  std::int64_t elements = 0;
  int element_bytes = 0;  // 1, 2, 4 or 8
  std::int64_t sizes[most_axes], from_strides[most_axes], to_strides[most_axes];
};

cudaError_t launch_strided_copy(const StridedCopy& copy, cudaStream_t stream);

}  // namespace headway::cuda
