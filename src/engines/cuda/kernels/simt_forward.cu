#include "engines/cuda/kernels/launch.cuh"
#include "engines/cuda/kernels/simt_forward.cuh"
#include "engines/cuda/kernels/simt_kernels.h"

namespace headway::cuda {
namespace {

template <class T, int Width, Sums Kind>
Launch chosen(const ForwardArguments& arguments) {
  using Forward = SimtForward<T, Width, Kind>;
  using Shape = typename Forward::Shape;
  Launch launch;
  launch.name = sizeof(RealOf<T>) == 4 ? "exact f32 tiles" : "exact f64 tiles";
  launch.kernel = reinterpret_cast<const void*>(simt_forward<T, Width, Kind>);
  launch.threads = simt_threads;
  launch.shared_bytes = Forward::shared_bytes(arguments.head_dim);
  launch.query_block = Shape::rows;
  launch.key_block = Shape::keys;
  launch.row_tiles = blocks(arguments.query_len, Shape::rows);
  launch.spans = arguments.value_dim <= Width ? 1 : blocks(arguments.value_dim, Width);
  launch.tasks = arguments.batch * arguments.heads * launch.row_tiles * launch.spans;
  return launch;
}

}  // namespace

Launch simt_compensated_launch(const ForwardArguments& arguments) {
  return chosen<float, 64, Sums::compensated>(arguments);
}

Launch simt_forward_launch(const ForwardArguments& arguments, DType dtype) {
  using enum Sums;
  switch (dtype) {
    case DType::f64: return chosen<double, 64, running>(arguments);
    case DType::bf16: return chosen<bfloat16, 64, running>(arguments);
    case DType::f16: return chosen<float16, 64, running>(arguments);
    default:
      return arguments.value_dim <= 64 ? chosen<float, 64, running>(arguments) : chosen<float, 128, running>(arguments);
  }
}

cudaError_t launch_forward(const Launch& launch, const ForwardArguments& arguments, cudaStream_t stream) {
  ForwardArguments copy = arguments;
  std::int64_t row_tiles = launch.row_tiles, spans = launch.spans;
  void* parameters[] = {&copy, &row_tiles, &spans};
  return cudaLaunchKernel(launch.kernel, grid(launch.tasks), dim3(static_cast<unsigned>(launch.threads)), parameters,
                          launch.shared_bytes, stream);
}

}  // namespace headway::cuda
