#include "engines/cuda/kernels/hopper_split_products.cuh"
#include "engines/cuda/kernels/split_gradient_launch.cuh"

namespace headway::cuda {
namespace {

template <bool KeysAreRows>
Launch of_width(const GradientArguments& arguments) {
  constexpr const char* name = "f32 tiles in three bf16 parts, by warpgroups";
  const std::int64_t width = widest(arguments);
  return width <= 32    ? split_gradient_launch_of<WarpgroupProducts, 64, KeysAreRows, 32>(name, arguments)
         : width <= 48  ? split_gradient_launch_of<WarpgroupProducts, 64, KeysAreRows, 48>(name, arguments)
         : width <= 64  ? split_gradient_launch_of<WarpgroupProducts, 64, KeysAreRows>(name, arguments)
         : width <= 128 ? split_gradient_launch_of<WarpgroupProducts, 128, KeysAreRows>(name, arguments)
                        : split_gradient_launch_of<WarpgroupProducts, 256, KeysAreRows>(name, arguments);
}

}  // namespace

Launch hopper_split_gradient_launch(const GradientArguments& arguments, DType) {
  return arguments.of == GradientOf::query ? of_width<false>(arguments) : of_width<true>(arguments);
}

}  // namespace headway::cuda
