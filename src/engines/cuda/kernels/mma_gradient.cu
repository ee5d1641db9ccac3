#include "engines/cuda/kernels/kernels.h"
#include "engines/cuda/kernels/launch.cuh"
#include "engines/cuda/kernels/mma_gradient.cuh"

namespace headway::cuda {
namespace {

template <class T, int Depth, bool KeysAreRows>
Launch chosen(const GradientArguments& arguments) {
  using Gradient = MmaGradient<T, Depth, KeysAreRows>;
  Launch launch;
  launch.name = "tensor core tiles";
  launch.kernel = reinterpret_cast<const void*>(mma_gradient<T, Depth, KeysAreRows>);
  launch.threads = mma_threads;
  launch.shared_bytes = Gradient::shared_bytes(arguments);
  launch.query_block = launch.key_block = mma_rows;
  launch.stages = Gradient::stages;
  launch.row_tiles = blocks(KeysAreRows ? arguments.key_len : arguments.query_len, mma_rows);
  launch.tasks = arguments.batch * (KeysAreRows ? arguments.kv_heads : arguments.heads) * launch.row_tiles;
  return launch;
}

template <class T, bool KeysAreRows>
Launch of_width(const GradientArguments& arguments) {
  const std::int64_t width = arguments.head_dim > arguments.value_dim ? arguments.head_dim : arguments.value_dim;
  return width <= 64    ? chosen<T, 64, KeysAreRows>(arguments)
         : width <= 128 ? chosen<T, 128, KeysAreRows>(arguments)
                        : chosen<T, 256, KeysAreRows>(arguments);
}

template <class T>
Launch of_type(const GradientArguments& arguments) {
  return arguments.of == GradientOf::query ? of_width<T, false>(arguments) : of_width<T, true>(arguments);
}

}  // namespace

Launch mma_gradient_launch(const GradientArguments& arguments, DType dtype) {
  return dtype == DType::bf16 ? of_type<bfloat16>(arguments) : of_type<float16>(arguments);
}

}  // namespace headway::cuda
