// The exact kernels over pages. Of f32 and f64 these are the compensated ones alone: what an invariant call takes for
// keys in one tensor too, and decoding.
#include "engines/cuda/kernels/paged_kernels.h"
#include "engines/cuda/kernels/simt_forward.cuh"

namespace headway::cuda {
namespace {

template <class T, int Width, class Shape, Sums Kind>
Launch chosen(const ForwardArguments& arguments) {
  return simt_forward_launch_of<T, Width, Shape, Kind, InPages<T>>(
      sizeof(RealOf<T>) == 4 ? "exact f32 tiles, keys in pages" : "exact f64 tiles, keys in pages", arguments);
}

template <class T, class Stored>
Launch chosen_bytes(const ForwardArguments& arguments) {
  return simt_forward_launch_of<T, 128, SimtShape<float, 4, 16>, Sums::compensated, InPages<Stored>>(
      "exact f32 tiles, keys in 8-bit pages", arguments);
}

template <class T>
Launch chosen_bytes(const ForwardArguments& arguments, DType stored) {
  return stored == DType::i8 ? chosen_bytes<T, std::int8_t>(arguments) : chosen_bytes<T, float8_e4m3>(arguments);
}

}  // namespace

Launch paged_exact_launch(const ForwardArguments& arguments, DType dtype) {
  switch (dtype) {
    case DType::f64: return chosen<double, 64, SimtShape<double, 4>, Sums::compensated>(arguments);
    case DType::bf16: return chosen<bfloat16, 64, SimtShape<float, 8>, Sums::running>(arguments);
    case DType::f16: return chosen<float16, 64, SimtShape<float, 8>, Sums::running>(arguments);
    default: break;
  }
  return arguments.value_dim <= 64 ? chosen<float, 64, SimtShape<float, 4>, Sums::compensated>(arguments)
                                   : chosen<float, 128, SimtShape<float, 4, 16>, Sums::compensated>(arguments);
}

Launch paged_bytes_launch(const ForwardArguments& arguments, DType dtype, DType stored) {
  switch (dtype) {
    case DType::bf16: return chosen_bytes<bfloat16>(arguments, stored);
    case DType::f16: return chosen_bytes<float16>(arguments, stored);
    default: return chosen_bytes<float>(arguments, stored);
  }
}

}  // namespace headway::cuda
