#include "engines/cuda/kernels/decode.cuh"
#include "engines/cuda/kernels/decode_launch.cuh"
#include "engines/cuda/kernels/paged_kernels.h"

namespace headway::cuda {

Launch paged_decode_launch(const ForwardArguments& arguments, DType dtype, std::int64_t splits) {
  return of_half_type(dtype, widest(arguments), [&]<class T, int Depth>() {
    return decode_launch_of<Decode<T, Depth, CopiedFeed<T, Depth, true>>>("decode on tensor cores, keys in pages",
                                                                          decode<T, Depth, true>, arguments, splits);
  });
}

}  // namespace headway::cuda
