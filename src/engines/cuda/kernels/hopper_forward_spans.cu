// The Hopper forward kernels of calls with spans.
#include "engines/cuda/kernels/hopper_instances.cuh"

namespace headway::cuda {

HopperKernel hopper_kernel_spans(DType dtype, std::int64_t widest) {
  return widest <= 64    ? hopper_instance<64, HopperVariant::spanned>(dtype)
         : widest <= 128 ? hopper_instance<128, HopperVariant::spanned>(dtype)
                         : hopper_instance<256, HopperVariant::spanned>(dtype);
}

}  // namespace headway::cuda
