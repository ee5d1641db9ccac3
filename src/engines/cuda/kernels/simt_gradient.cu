#include "engines/cuda/kernels/kernels.h"
#include "engines/cuda/kernels/launch.cuh"
#include "engines/cuda/kernels/simt_gradient.cuh"

namespace headway::cuda {
namespace {

template <class T, bool KeysAreRows>
Launch chosen(const GradientArguments& arguments) {
  using Gradient = SimtGradient<T, KeysAreRows>;
  Launch launch;
  launch.name = sizeof(RealOf<T>) == 4 ? "exact f32 tiles" : "exact f64 tiles";
  launch.kernel = reinterpret_cast<const void*>(simt_gradient<T, KeysAreRows>);
  launch.threads = simt_threads;
  launch.shared_bytes = Gradient::shared_bytes(arguments);
  launch.query_block = KeysAreRows ? Gradient::Shape::keys : Gradient::Shape::rows;
  launch.key_block = KeysAreRows ? Gradient::Shape::rows : Gradient::Shape::keys;
  launch.row_tiles = blocks(KeysAreRows ? arguments.key_len : arguments.query_len, Gradient::Shape::rows);
  const std::int64_t width = arguments.of == GradientOf::value ? arguments.value_dim : arguments.head_dim;
  launch.spans = blocks(width, Gradient::Width);
  launch.tasks =
      arguments.batch * (KeysAreRows ? arguments.kv_heads : arguments.heads) * launch.row_tiles * launch.spans;
  return launch;
}

template <bool KeysAreRows>
Launch of_type(const GradientArguments& arguments, DType dtype) {
  switch (dtype) {
    case DType::f64: return chosen<double, KeysAreRows>(arguments);
    case DType::bf16: return chosen<bfloat16, KeysAreRows>(arguments);
    case DType::f16: return chosen<float16, KeysAreRows>(arguments);
    default: return chosen<float, KeysAreRows>(arguments);
  }
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
