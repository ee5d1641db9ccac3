#include "engines/cuda/kernels/hopper_split_products.cuh"
#include "engines/cuda/kernels/split_forward_launch.cuh"

namespace headway::cuda {

Launch hopper_split_forward_launch(const ForwardArguments& arguments) {
  constexpr const char* name = "f32 tiles in three bf16 parts, by warpgroups";
  const std::int64_t width = widest(arguments);
  return width <= 32    ? split_forward_launch_of<WarpgroupProducts, 64, 3, 32>(name, arguments)
         : width <= 48  ? split_forward_launch_of<WarpgroupProducts, 64, 3, 48>(name, arguments)
         : width <= 64  ? split_forward_launch_of<WarpgroupProducts, 64, 3>(name, arguments)
         : width <= 80  ? split_forward_launch_of<WarpgroupProducts, 128, 2, 80>(name, arguments)
         : width <= 96  ? split_forward_launch_of<WarpgroupProducts, 128, 2, 96>(name, arguments)
         : width <= 128 ? split_forward_launch_of<WarpgroupProducts, 128, 2>(name, arguments)
                        : split_forward_launch_of<WarpgroupProducts, 256, 1>(name, arguments);
}

}  // namespace headway::cuda
