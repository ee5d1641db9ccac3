#include "engines/cuda/kernels/decode_launch.cuh"
#include "engines/cuda/kernels/hopper_decode.cuh"
#include "engines/cuda/kernels/paged_kernels.h"

namespace headway::cuda {
namespace {

// choose<T, Depth>() for tiles of whole panels of 64 columns.
template <class Choose>
Launch of_panels(DType dtype, std::int64_t width, const Choose& choose) {
  if (width <= 128 || width > 192) {
    return of_half_type(dtype, width, choose);
  }
  return dtype == DType::bf16 ? choose.template operator()<bfloat16, 192>()
                              : choose.template operator()<float16, 192>();
}

}  // namespace

Launch hopper_decode_launch(const ForwardArguments& arguments, DType dtype, std::int64_t splits) {
  return of_panels(dtype, widest(arguments), [&]<class T, int Depth>() {
    return decode_launch_of<Decode<T, Depth, BoxedFeed<Depth, false>>>(
        "decode on tensor cores, bulk copies", hopper_decode<T, Depth, false>, arguments, splits);
  });
}

Launch hopper_paged_decode_launch(const ForwardArguments& arguments, DType dtype, std::int64_t splits) {
  return of_panels(dtype, widest(arguments), [&]<class T, int Depth>() {
    return decode_launch_of<Decode<T, Depth, BoxedFeed<Depth, true>>>("decode on tensor cores, bulk copies of pages",
                                                                      hopper_decode<T, Depth, true>, arguments, splits);
  });
}

}  // namespace headway::cuda
