#include "engines/cuda/kernels/kernels.h"
#include "engines/cuda/kernels/mma_forward.cuh"

namespace headway::cuda {

namespace {

bool fits_one_tile(const Arguments& args) {
  const bool halves = args.bias.dtype == DType::bf16 || args.bias.dtype == DType::f16;
  return args.key_len <= mma_rows && args.softcap == 0 && args.slopes.data == nullptr &&
         (args.bias.data == nullptr || halves);
}

}  // namespace

Launch mma_forward_launch(const ForwardArguments& arguments, DType dtype) {
  return of_half_type(dtype, widest(arguments), [&]<class T, int Depth>() {
    return fits_one_tile(arguments) ? mma_forward_launch_of<T, Depth, true, false>(arguments)
                                    : mma_forward_launch_of<T, Depth, false, false>(arguments);
  });
}

}  // namespace headway::cuda
