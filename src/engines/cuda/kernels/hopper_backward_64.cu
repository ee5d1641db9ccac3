// The Hopper backward kernels of head dims up to 64.
#include "engines/cuda/kernels/hopper_backward_instances.cuh"

namespace headway::cuda {

HopperBackwardKernel hopper_backward_kernel_64(DType dtype, HopperBackwardVariant variant) {
  return hopper_backward_instance<64>(dtype, variant);
}

}  // namespace headway::cuda
