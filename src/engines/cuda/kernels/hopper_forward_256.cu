// The Hopper forward kernels of head dims up to 256.
#include "engines/cuda/kernels/hopper_instances.cuh"

namespace headway::cuda {

HopperKernel hopper_kernel_256(DType dtype, HopperVariant variant) { return hopper_instance<256>(dtype, variant); }

}  // namespace headway::cuda
