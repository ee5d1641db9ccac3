#include "engines/cuda/kernels/byte_decode.cuh"
#include "engines/cuda/kernels/decode_launch.cuh"
#include "engines/cuda/kernels/paged_kernels.h"

namespace headway::cuda {

Launch byte_decode_launch(const ForwardArguments& arguments, DType dtype, DType stored, std::int64_t splits) {
  return of_half_type(dtype, widest(arguments), [&]<class T, int Depth>() {
    constexpr const char* name = "decode on tensor cores, keys in 8-bit pages";
    return stored == DType::i8 ? decode_launch_of<ByteDecode<T, Depth, std::int8_t>>(
                                     name, byte_decode<T, Depth, std::int8_t>, arguments, splits)
                               : decode_launch_of<ByteDecode<T, Depth, float8_e4m3>>(
                                     name, byte_decode<T, Depth, float8_e4m3>, arguments, splits);
  });
}

}  // namespace headway::cuda
