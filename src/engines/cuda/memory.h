// What this folder's other files use of memory.cpp.
#pragma once

#include <string_view>

#include "engines/cuda/device.h"
#include "engines/cuda/kernels/strided_copy.h"
#include "headway/tensor.h"

namespace headway::cuda {

// Unsupported unless there is such a device.
void require_device(Device device, std::string_view operation);

// Between views of equal sizes and one type on the current device.
void queue_strided_copy(const ConstTensorView& from, const TensorView& to, cudaStream_t stream,
                        std::string_view operation);

}  // namespace headway::cuda
