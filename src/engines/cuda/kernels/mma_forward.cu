#include "engines/cuda/kernels/kernels.h"
#include "engines/cuda/kernels/mma_forward.cuh"

namespace headway::cuda {

Launch mma_forward_launch(const ForwardArguments& arguments, DType dtype) {
  return of_half_type(dtype, widest(arguments), [&]<class T, int Depth>() {
    return words_suffice(arguments) ? mma_forward_launch_of<T, Depth, true, false>(arguments)
                                    : mma_forward_launch_of<T, Depth, false, false>(arguments);
  });
}

}  // namespace headway::cuda
