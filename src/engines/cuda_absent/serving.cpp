// RoPE and caches on a device in a build without the CUDA engine.
#include "core/text.h"
#include "serving/on_device.h"

namespace headway {
namespace {

[[noreturn]] void refuse(const char* operation, Device device) {
  throw Unsupported(
      text(operation, ": the tensors are on ", device, ", and the CUDA engine is not built into this library"));
}

}  // namespace

void rope_on_device(const char* operation, const ConstTensorView& x, const ConstTensorView&, const TensorView&,
                    const DeviceRotation&, void*) {
  refuse(operation, x.device());
}

void append_on_device(const char* operation, const DeviceAppend& append, void*) {
  refuse(operation, append.rows.device());
}

}  // namespace headway
