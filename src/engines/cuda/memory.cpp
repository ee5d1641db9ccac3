// Device memory for tensors, and copies from and to it.
#include "engines/cuda/memory.h"

#include <algorithm>

#include "core/device_memory.h"
#include "core/text.h"
#include "engines/cuda/device.h"

namespace headway {
namespace cuda {

void require_device(Device device, std::string_view operation) {
  if (device.type != DeviceType::cuda || device.index < 0 || device.index >= device_count()) {
    throw Unsupported(text(operation, ": there is no ", device, ": CUDA has ",
                           device_count() == 0 ? std::string("no device") : std::to_string(device_count()), " here"));
  }
}

void queue_strided_copy(const ConstTensorView& from, const TensorView& to, cudaStream_t stream,
                        std::string_view operation) {
  StridedCopy copy;
  copy.from = from.data();
  copy.to = to.data();
  copy.rank = from.rank();
  copy.elements = from.elements();
  copy.element_bytes = static_cast<int>(size_of(from.dtype()));
  std::copy(from.sizes().begin(), from.sizes().end(), copy.sizes);
  std::copy(from.strides().begin(), from.strides().end(), copy.from_strides);
  std::copy(to.strides().begin(), to.strides().end(), copy.to_strides);
  check(launch_strided_copy(copy, stream), operation, "launching a copy between layouts");
}

namespace {

std::size_t bytes_of(const ConstTensorView& view) {
  return static_cast<std::size_t>(view.elements()) * size_of(view.dtype());
}

bool on_host(const ConstTensorView& view) { return view.device() == Device{}; }

// The elements of a view side by side, where they are.
Tensor packed(const ConstTensorView& view, cudaStream_t stream) {
  Tensor result = Tensor::uninitialized(view.sizes(), view.dtype(), view.device(), stream);
  copy(view, result, stream);
  return result;
}

// Both are contiguous.
void copy_bytes(const ConstTensorView& from, const TensorView& to, cudaStream_t stream) {
  check(cudaMemcpyAsync(to.data(), from.data(), bytes_of(from), cudaMemcpyDefault, stream), "copy",
        text("copying ", bytes_of(from), " bytes from ", from.device(), " to ", to.device()));
  if (on_host(to)) {
    check(cudaStreamSynchronize(stream), "copy", "waiting for what was copied");
  }
}

}  // namespace
}  // namespace cuda

void* take_device_memory(std::size_t bytes, Device device, void* stream) {
  cuda::require_device(device, "tensor");
  const cuda::DeviceScope scope(device.index, "tensor");
  return cuda::take_from_pool(bytes, device.index, static_cast<cudaStream_t>(stream), "tensor",
                              cuda::MemoryFor::tensors);
}

void give_back_device_memory(void* memory, Device device, void* stream) noexcept {
  if (memory == nullptr) {
    return;
  }
  try {
    const cuda::DeviceScope scope(device.index, "tensor");  // whose null stream it may be
    cudaFreeAsync(memory, static_cast<cudaStream_t>(stream));
  } catch (const Error&) {  // the driver is shutting down: the memory goes with it
  }
}

void clear_device_memory(void* memory, std::size_t bytes, Device device, void* stream) {
  if (bytes > 0) {
    const cuda::DeviceScope scope(device.index, "tensor");
    cuda::check(cudaMemsetAsync(memory, 0, bytes, static_cast<cudaStream_t>(stream)), "tensor", "clearing a tensor");
  }
}

void copy_with_device(const ConstTensorView& from, const TensorView& to, void* stream) {
  const Device device = cuda::on_host(from) ? to.device() : from.device();
  for (const Device used : {from.device(), to.device()}) {
    if (used != Device{}) {
      cuda::require_device(used, "copy");
    }
  }
  const cuda::DeviceScope scope(device.index, "copy");
  auto* queue = static_cast<cudaStream_t>(stream);
  if (from.is_contiguous() && to.is_contiguous()) {
    cuda::copy_bytes(from, to, queue);
  } else if (from.device() == to.device()) {
    cuda::queue_strided_copy(from, to, queue, "copy");
  } else if (!from.is_contiguous()) {
    copy_with_device(cuda::packed(from, queue), to, stream);
  } else {
    Tensor whole = Tensor::uninitialized(to.sizes(), to.dtype(), to.device(), stream);
    cuda::copy_bytes(from, whole, queue);
    copy(whole, to, stream);
  }
}

}  // namespace headway
