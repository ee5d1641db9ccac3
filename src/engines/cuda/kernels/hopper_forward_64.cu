// The Hopper forward kernels of head dims up to 64.
#include "engines/cuda/kernels/hopper_instances.cuh"

namespace headway::cuda {

HopperKernel hopper_kernel_64(DType dtype, HopperVariant variant) {
  switch (variant) {
    case HopperVariant::plain_short: return hopper_instance<64, HopperVariant::plain_short>(dtype);
    case HopperVariant::ranged_short: return hopper_instance<64, HopperVariant::ranged_short>(dtype);
    default: return hopper_instance<64>(dtype, variant);
  }
}

}  // namespace headway::cuda
