// Device memory in a build without the CUDA engine.
#include "core/device_memory.h"
#include "core/text.h"

namespace headway {
namespace {

[[noreturn]] void refuse_memory(const char* operation, Device device) {
  throw Unsupported(text(operation, ": expected host memory, found ", device,
                         ", and the CUDA engine is not built into this library"));
}

}  // namespace

void* take_device_memory(std::size_t, Device device, void*) { refuse_memory("tensor", device); }

void give_back_device_memory(void*, Device, void*) noexcept {}

void clear_device_memory(void*, std::size_t, Device device, void*) { refuse_memory("tensor", device); }

void copy_with_device(const ConstTensorView& from, const TensorView& to, void*) {
  refuse_memory("copy", from.device() == Device{} ? to.device() : from.device());
}

}  // namespace headway
