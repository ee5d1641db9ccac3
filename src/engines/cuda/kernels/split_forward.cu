#include "engines/cuda/kernels/split_forward_launch.cuh"

namespace headway::cuda {

Launch split_forward_launch(const ForwardArguments& arguments) {
  constexpr const char* name = "f32 tiles in three bf16 parts";
  const std::int64_t width = widest(arguments);
  return width <= 64    ? split_forward_launch_of<WarpProducts, 64, 3>(name, arguments)
         : width <= 128 ? split_forward_launch_of<WarpProducts, 128, 1>(name, arguments)
                        : split_forward_launch_of<WarpProducts, 256, 1>(name, arguments);
}

}  // namespace headway::cuda
