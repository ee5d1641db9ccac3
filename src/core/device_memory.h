// A device's memory as tensors own and copy it. The CUDA engine's folder defines these functions; in builds without it,
// the folder that replaces it throws that it was not built.
#pragma once

#include <cstddef>

#include "headway/tensor.h"

namespace headway {

// In the order of `stream`. Throws Unsupported, OutOfMemory or DeviceError, with CUDA's error text; null for 0 bytes.
void* take_device_memory(std::size_t bytes, Device device, void* stream);
void give_back_device_memory(void* memory, Device device, void* stream) noexcept;
void clear_device_memory(void* memory, std::size_t bytes, Device device, void* stream);

// Copies between non-empty views of equal sizes and one type, at least one of them on a device. Waits if `to` is in
// host memory.
void copy_with_device(const ConstTensorView& from, const TensorView& to, void* stream);

}  // namespace headway
