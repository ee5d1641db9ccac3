// The Hopper backward kernels of head dims up to 96.
#include "engines/cuda/kernels/hopper_backward_instances.cuh"

namespace headway::cuda {

HopperBackwardKernel hopper_backward_kernel_96(DType dtype, HopperBackwardVariant variant) {
  return hopper_backward_instance<96>(dtype, variant);
}

}  // namespace headway::cuda
