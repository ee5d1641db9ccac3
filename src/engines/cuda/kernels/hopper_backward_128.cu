// The Hopper backward kernels of head dims up to 128.
#include "engines/cuda/kernels/hopper_backward_instances.cuh"

namespace headway::cuda {

HopperBackwardKernel hopper_backward_kernel_128(DType dtype, HopperBackwardVariant variant) {
  return hopper_backward_instance<128>(dtype, variant);
}

}  // namespace headway::cuda
