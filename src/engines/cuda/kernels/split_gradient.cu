#include "engines/cuda/kernels/kernels.h"
#include "engines/cuda/kernels/launch.cuh"
#include "engines/cuda/kernels/split_gradient.cuh"

namespace headway::cuda {
namespace {

template <int Depth, bool KeysAreRows>
Launch chosen(const GradientArguments& arguments) {
  using Gradient = SplitGradient<Depth, KeysAreRows>;
  Launch launch;
  launch.name = "f32 tiles in three bf16 parts";
  launch.kernel = reinterpret_cast<const void*>(split_gradient<Depth, KeysAreRows>);
  launch.threads = Gradient::threads;
  launch.shared_bytes = Gradient::shared_bytes(arguments);
  launch.query_block = KeysAreRows ? Gradient::cols : Gradient::rows;
  launch.key_block = KeysAreRows ? Gradient::rows : Gradient::cols;
  launch.stages = 2;
  launch.row_tiles = blocks(KeysAreRows ? arguments.key_len : arguments.query_len, Gradient::rows);
  launch.tasks = arguments.batch * (KeysAreRows ? arguments.kv_heads : arguments.heads) * launch.row_tiles;
  return launch;
}

template <bool KeysAreRows>
Launch of_width(const GradientArguments& arguments) {
  const std::int64_t width = widest(arguments);
  return width <= 64    ? chosen<64, KeysAreRows>(arguments)
         : width <= 128 ? chosen<128, KeysAreRows>(arguments)
                        : chosen<256, KeysAreRows>(arguments);
}

}  // namespace

Launch split_gradient_launch(const GradientArguments& arguments, DType) {
  return arguments.of == GradientOf::query ? of_width<false>(arguments) : of_width<true>(arguments);
}

}  // namespace headway::cuda
