#include "engines/cuda/kernels/split_gradient_launch.cuh"

namespace headway::cuda {
namespace {

template <bool KeysAreRows>
Launch of_width(const GradientArguments& arguments) {
  constexpr const char* name = "f32 tiles in three bf16 parts";
  const std::int64_t width = widest(arguments);
  return width <= 64    ? split_gradient_launch_of<WarpProducts, 64, KeysAreRows>(name, arguments)
         : width <= 128 ? split_gradient_launch_of<WarpProducts, 128, KeysAreRows>(name, arguments)
                        : split_gradient_launch_of<WarpProducts, 256, KeysAreRows>(name, arguments);
}

constexpr int adding_threads = 256;

// A thread for each number: parts are read once and side by side, so memory bounds it.
__global__ void __launch_bounds__(adding_threads)
    add_gradient_parts(const __grid_constant__ GradientPartsArguments all, std::int64_t numbers) {
  for (std::int64_t task = std::int64_t{blockIdx.x} * adding_threads + threadIdx.x; task < numbers;
       task += std::int64_t{gridDim.x} * adding_threads) {
    const std::int64_t d = task % all.width, row = task / all.width % all.rows;
    const std::int64_t head = task / all.width / all.rows % all.heads, b = task / all.width / all.rows / all.heads;
    const float* from = head_of<float>(all.parts, b, head) + row * all.parts.row + d;
    float sum = 0;
#pragma unroll 4
    for (int part = 0; part < all.count; ++part) {
      sum += from[part * all.part_step];
    }
    head_of<float>(all.gradient, b, head)[row * all.gradient.row + d * all.gradient.feature] = sum;
  }
}

}  // namespace

cudaError_t launch_gradient_parts(const GradientPartsArguments& arguments, cudaStream_t stream) {
  const std::int64_t numbers = arguments.batch * arguments.heads * arguments.rows * arguments.width;
  return numbers == 0 ? cudaSuccess
                      : start(add_gradient_parts, grid(blocks(numbers, adding_threads)), adding_threads, stream,
                              arguments, numbers);
}

Launch split_gradient_launch(const GradientArguments& arguments, DType) {
  return arguments.of == GradientOf::query ? of_width<false>(arguments) : of_width<true>(arguments);
}

}  // namespace headway::cuda
