// The Hopper forward kernels of head dims up to 128.
#include "engines/cuda/kernels/hopper_instances.cuh"

namespace headway::cuda {

HopperKernel hopper_kernel_128(DType dtype, HopperVariant variant) {
  return variant == HopperVariant::plain_long ? hopper_instance<128, HopperVariant::plain_long>(dtype)
                                              : hopper_instance<128>(dtype, variant);
}

}  // namespace headway::cuda
