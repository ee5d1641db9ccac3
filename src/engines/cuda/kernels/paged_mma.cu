#include "engines/cuda/kernels/mma_forward.cuh"
#include "engines/cuda/kernels/paged_kernels.h"

namespace headway::cuda {

Launch paged_mma_launch(const ForwardArguments& arguments, DType dtype) {
  return of_half_type(dtype, widest(arguments),
                      [&]<class T, int Depth>() { return mma_forward_launch_of<T, Depth, false, true>(arguments); });
}

}  // namespace headway::cuda
