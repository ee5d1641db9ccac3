#include "engines/cuda/kernels/kernels.h"
#include "engines/cuda/kernels/simt_gradient.cuh"
#include "engines/cuda/kernels/simt_launch.cuh"

namespace headway::cuda {
namespace {

template <class T, bool KeysAreRows, int Width, class Shape>
Launch chosen(const GradientArguments& arguments) {
  using Gradient = SimtGradient<T, KeysAreRows, Width, Shape>;
  Launch launch;
  launch.name = sizeof(RealOf<T>) == 4 ? "exact f32 tiles" : "exact f64 tiles";
  launch.kernel = reinterpret_cast<const void*>(simt_gradient<T, KeysAreRows, Width, Shape>);
  launch.threads = Shape::threads;
  launch.shared_bytes = Gradient::shared_bytes(arguments);
  launch.query_block = KeysAreRows ? Shape::keys : Shape::rows;
  launch.key_block = KeysAreRows ? Shape::rows : Shape::keys;
  launch.row_tiles = blocks(KeysAreRows ? arguments.key_len : arguments.query_len, Shape::rows);
  const std::int64_t width = arguments.of == GradientOf::value ? arguments.value_dim : arguments.head_dim;
  launch.spans = blocks(width, Width);
  launch.tasks =
      arguments.batch * (KeysAreRows ? arguments.kv_heads : arguments.heads) * launch.row_tiles * launch.spans;
  return launch;
}

template <bool KeysAreRows>
Launch of_type(const GradientArguments& arguments, DType dtype) {
  using Small = SimtShape<float, 4>;      // two blocks a multiprocessor
  using Large = SimtShape<float, 8, 16>;  // one
  switch (dtype) {
    case DType::f64: return chosen<double, KeysAreRows, 64, SimtShape<double, 4>>(arguments);
    case DType::bf16: return chosen<bfloat16, KeysAreRows, 64, Small>(arguments);
    case DType::f16: return chosen<float16, KeysAreRows, 64, Small>(arguments);
    default: break;
  }
  const Launch large = widest(arguments) <= 64 ? chosen<float, KeysAreRows, 64, Large>(arguments)
                                               : chosen<float, KeysAreRows, 128, Large>(arguments);
  return widest(arguments) <= 128 && has_shared(large.shared_bytes) ? large
                                                                    : chosen<float, KeysAreRows, 64, Small>(arguments);
}

}  // namespace

Launch simt_gradient_launch(const GradientArguments& arguments, DType dtype) {
  return arguments.of == GradientOf::query ? of_type<false>(arguments, dtype) : of_type<true>(arguments, dtype);
}

cudaError_t launch_gradient(const Launch& launch, const GradientArguments& arguments, cudaStream_t stream) {
  GradientArguments copy = arguments;
  std::int64_t row_tiles = launch.row_tiles, spans = launch.spans;
  void* parameters[] = {&copy, &row_tiles, &spans};
  return cudaLaunchKernel(launch.kernel, grid(launch.tasks), dim3(static_cast<unsigned>(launch.threads)), parameters,
                          launch.shared_bytes, stream);
}

}  // namespace headway::cuda
