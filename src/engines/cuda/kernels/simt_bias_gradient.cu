#include "engines/cuda/kernels/kernels.h"
#include "engines/cuda/kernels/simt_bias_gradient.cuh"
#include "engines/cuda/kernels/simt_launch.cuh"

namespace headway::cuda {
namespace {

template <class T, class Shape>
Launch in_tiles(const BiasGradientArguments& arguments) {
  using Gradient = SimtBiasGradient<T, Shape>;
  Launch launch;
  launch.name = "bias gradient";
  launch.kernel = reinterpret_cast<const void*>(simt_bias_gradient<T, Shape>);
  launch.threads = Shape::threads;
  launch.shared_bytes = Gradient::shared_bytes(arguments);
  launch.query_block = Shape::rows;
  launch.key_block = Shape::keys;
  return launch;
}

template <class T>
Launch chosen(const BiasGradientArguments& arguments) {
  const Launch usual = in_tiles<T, SimtShape<RealOf<T>, 4>>(arguments);
  return has_shared(usual.shared_bytes) ? usual : in_tiles<T, SmallSimtShape<RealOf<T>>>(arguments);
}

}  // namespace

Launch simt_bias_gradient_launch(const BiasGradientArguments& arguments, DType dtype) {
  switch (dtype) {
    case DType::f64: return chosen<double>(arguments);
    case DType::bf16: return chosen<bfloat16>(arguments);
    case DType::f16: return chosen<float16>(arguments);
    default: return chosen<float>(arguments);
  }
}

cudaError_t launch_bias_gradient(const Launch& launch, const BiasGradientArguments& arguments, cudaStream_t stream) {
  BiasGradientArguments copy = arguments;
  const auto count = [&](int axis, std::int64_t size, std::int64_t block) {
    return arguments.sums[axis] ? std::int64_t{1} : blocks(size, block);
  };
  std::int64_t heads = count(1, arguments.heads, 1);
  std::int64_t row_tiles = count(2, arguments.query_len, launch.query_block);
  std::int64_t key_tiles = count(3, arguments.key_len, launch.key_block);
  std::int64_t tasks = count(0, arguments.batch, 1) * heads * row_tiles * key_tiles;
  if (tasks == 0) {
    return cudaSuccess;
  }
  void* parameters[] = {&copy, &heads, &row_tiles, &key_tiles, &tasks};
  return cudaLaunchKernel(launch.kernel, grid(tasks), dim3(static_cast<unsigned>(launch.threads)), parameters,
                          launch.shared_bytes, stream);
}

}  // namespace headway::cuda
