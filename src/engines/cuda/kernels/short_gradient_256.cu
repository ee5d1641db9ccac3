// And the launches of all.
#include "engines/cuda/kernels/short_gradient_instances.cuh"

namespace headway::cuda {

Launch short_gradient_256(const ShortGradientArguments& arguments, DType dtype) {
  return short_gradient_of<256, 4, 2, 1>(arguments, dtype);
}

Launch short_gradient_launch(const ShortGradientArguments& arguments, DType dtype) {
  const std::int64_t width = widest(arguments);
  return width <= 64    ? short_gradient_64(arguments, dtype)
         : width <= 128 ? short_gradient_128(arguments, dtype)
                        : short_gradient_256(arguments, dtype);
}

cudaError_t launch_short_gradient(const Launch& launch, const ShortGradientArguments& arguments, cudaStream_t stream) {
  int stages = launch.stages;
  void* parameters[] = {const_cast<ShortGradientArguments*>(&arguments), &stages};
  return cudaLaunchKernel(launch.kernel, grid(launch.tasks), dim3(static_cast<unsigned>(launch.threads)), parameters,
                          launch.shared_bytes, stream);
}

}  // namespace headway::cuda
