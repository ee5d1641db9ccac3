#include "engines/cuda/kernels/decode_launch.cuh"
#include "engines/cuda/kernels/hopper_decode.cuh"

namespace headway::cuda {

Launch hopper_decode_launch(const ForwardArguments& arguments, DType dtype, std::int64_t splits) {
  return of_half_type(dtype, widest(arguments), [&]<class T, int Depth>() {
    return decode_launch_of<Decode<T, Depth, BoxedFeed<Depth>>>("decode on tensor cores, bulk copies",
                                                                hopper_decode<T, Depth>, arguments, splits);
  });
}

}  // namespace headway::cuda
