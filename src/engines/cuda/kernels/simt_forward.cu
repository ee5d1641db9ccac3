#include "engines/cuda/kernels/forward_kernels.h"
#include "engines/cuda/kernels/simt_forward.cuh"
#include "engines/cuda/kernels/simt_launch.cuh"

namespace headway::cuda {
namespace {

template <class T, int Width, class Shape, Sums Kind = Sums::running>
Launch chosen(const ForwardArguments& arguments) {
  return simt_forward_launch_of<T, Width, Shape, Kind, InTensor<T>>(
      sizeof(RealOf<T>) == 4 ? "exact f32 tiles" : "exact f64 tiles", arguments);
}

}  // namespace

Launch simt_compensated_f64_launch(const ForwardArguments& arguments) {
  const Launch usual = chosen<double, 64, SimtShape<double, 4>, Sums::compensated>(arguments);
  return has_shared(usual.shared_bytes) ? usual
                                        : chosen<double, 64, SmallSimtShape<double>, Sums::compensated>(arguments);
}

Launch simt_compensated_launch(const ForwardArguments& arguments) {
  const Launch narrow = chosen<float, 64, SimtShape<float, 4>, Sums::compensated>(arguments);
  if (arguments.value_dim <= 64) {
    return narrow;
  }
  const Launch wide = chosen<float, 128, SimtShape<float, 4, 16>, Sums::compensated>(arguments);
  return has_shared(wide.shared_bytes) ? wide : narrow;
}

namespace {

// Where a block may have no more than 99 KiB.
Launch small_launch(const ForwardArguments& arguments, DType dtype) {
  switch (dtype) {
    case DType::f64: return simt_compensated_f64_launch(arguments);
    case DType::bf16: return chosen<bfloat16, 64, SimtShape<float, 4>>(arguments);
    case DType::f16: return chosen<float16, 64, SimtShape<float, 4>>(arguments);
    default: return simt_compensated_launch(arguments);
  }
}

Launch usual_launch(const ForwardArguments& arguments, DType dtype) {
  using Narrow = SimtShape<float, 8>;         // two blocks a multiprocessor
  using Wide = SimtShape<float, 8, 16, 128>;  // one
  using Less = SimtShape<float, 8, 16>;       // one, where there is less shared memory
  switch (dtype) {
    case DType::f64: return chosen<double, 64, SimtShape<double, 4>>(arguments);
    case DType::bf16: return chosen<bfloat16, 64, Narrow>(arguments);
    case DType::f16: return chosen<float16, 64, Narrow>(arguments);
    default: break;
  }
  if (widest(arguments) <= 64) {
    return chosen<float, 64, Narrow>(arguments);
  }
  const Launch wide = chosen<float, 128, Wide>(arguments);
  return has_shared(wide.shared_bytes) ? wide : chosen<float, 128, Less>(arguments);
}

}  // namespace

Launch simt_forward_launch(const ForwardArguments& arguments, DType dtype) {
  const Launch usual = usual_launch(arguments, dtype);
  return has_shared(usual.shared_bytes) ? usual : small_launch(arguments, dtype);
}

cudaError_t launch_forward(const Launch& launch, const ForwardArguments& arguments, cudaStream_t stream) {
  ForwardArguments copy = arguments;
  std::int64_t row_tiles = launch.row_tiles, spans = launch.spans;
  void* parameters[] = {&copy, &row_tiles, &spans};
  return cudaLaunchKernel(launch.kernel, grid(launch.tasks), dim3(static_cast<unsigned>(launch.threads)), parameters,
                          launch.shared_bytes, stream);
}

}  // namespace headway::cuda
