#include "engines/cuda/kernels/decode_launch.cuh"
#include "engines/cuda/kernels/hopper_decode.cuh"
#include "engines/cuda/kernels/paged_kernels.h"

namespace headway::cuda {

Launch hopper_decode_launch(const ForwardArguments& arguments, DType dtype, std::int64_t splits) {
  return of_half_type(dtype, widest(arguments), [&]<class T, int Depth>() {
    return decode_launch_of<Decode<T, Depth, BoxedFeed<Depth, false>>>(
        "decode on tensor cores, bulk copies", hopper_decode<T, Depth, false>, arguments, splits);
  });
}

Launch hopper_paged_decode_launch(const ForwardArguments& arguments, DType dtype, std::int64_t splits) {
  return of_half_type(dtype, widest(arguments), [&]<class T, int Depth>() {
    return decode_launch_of<Decode<T, Depth, BoxedFeed<Depth, true>>>("decode on tensor cores, bulk copies of pages",
                                                                      hopper_decode<T, Depth, true>, arguments, splits);
  });
}

}  // namespace headway::cuda
