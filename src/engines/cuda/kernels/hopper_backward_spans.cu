// The Hopper backward of calls with spans.
#include "engines/cuda/kernels/hopper_backward_instances.cuh"

namespace headway::cuda {

HopperBackwardKernel hopper_backward_kernel_spans(DType dtype, bool wide) {
  return wide ? hopper_backward_instance<128, HopperBackwardVariant::spanned>(dtype)
              : hopper_backward_instance<64, HopperBackwardVariant::spanned>(dtype);
}

}  // namespace headway::cuda
