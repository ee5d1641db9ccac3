// The Hopper forward kernels of head dims up to 192.
#include "engines/cuda/kernels/hopper_instances.cuh"

namespace headway::cuda {

HopperKernel hopper_kernel_192(DType dtype, HopperVariant variant) { return hopper_instance<192>(dtype, variant); }

}  // namespace headway::cuda
