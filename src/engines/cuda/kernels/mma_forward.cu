#include "engines/cuda/kernels/kernels.h"
#include "engines/cuda/kernels/mma_forward.cuh"

namespace headway::cuda {

Launch mma_forward_launch(const ForwardArguments& arguments, DType dtype) {
  return of_half_type(dtype, widest(arguments),
                      [&]<class T, int Depth>() { return mma_forward_launch_of<T, Depth, false>(arguments); });
}

}  // namespace headway::cuda
