#include "engines/cuda/kernels/short_gradient_instances.cuh"

namespace headway::cuda {

Launch short_gradient_128(const ShortGradientArguments& arguments, DType dtype) {
  return arguments.key_len <= 64 ? short_gradient_of<128, 4, 2, 2>(arguments, dtype)
                                 : short_gradient_of<128, 8, 2, 1>(arguments, dtype);
}

}  // namespace headway::cuda
