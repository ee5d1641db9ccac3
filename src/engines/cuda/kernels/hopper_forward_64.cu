// The Hopper forward kernels of head dims up to 64.
#include "engines/cuda/kernels/hopper_instances.cuh"

namespace headway::cuda {

HopperKernel hopper_kernel_64(DType dtype, HopperVariant variant) { return hopper_instance<64>(dtype, variant); }

}  // namespace headway::cuda
