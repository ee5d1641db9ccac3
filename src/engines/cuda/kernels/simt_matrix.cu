#include "engines/cuda/kernels/kernels.h"
#include "engines/cuda/kernels/launch.cuh"
#include "engines/cuda/kernels/simt_matrix.cuh"

namespace headway::cuda {
namespace {

template <class T>
Launch chosen(const ScoresArguments& arguments) {
  using Shape = typename SimtMatrix<T>::Shape;
  Launch launch;
  launch.name = sizeof(RealOf<T>) == 4 ? "exact f32 matrix" : "exact f64 matrix";
  launch.kernel = reinterpret_cast<const void*>(simt_matrix<T>);
  launch.threads = Shape::threads;
  launch.shared_bytes = SimtMatrix<T>::walk_bytes(arguments.head_dim);
  launch.query_block = Shape::rows;
  launch.key_block = Shape::keys;
  launch.row_tiles = blocks(arguments.query_len, Shape::rows);
  launch.tasks = arguments.batch * arguments.heads * launch.row_tiles;
  return launch;
}

}  // namespace

Launch simt_matrix_launch(const ScoresArguments& arguments, DType dtype) {
  switch (dtype) {
    case DType::f64: return chosen<double>(arguments);
    case DType::bf16: return chosen<bfloat16>(arguments);
    case DType::f16: return chosen<float16>(arguments);
    default: return chosen<float>(arguments);
  }
}

cudaError_t launch_matrix(const Launch& launch, const ScoresArguments& arguments, cudaStream_t stream) {
  ScoresArguments copy = arguments;
  std::int64_t row_tiles = launch.row_tiles;
  void* parameters[] = {&copy, &row_tiles};
  return cudaLaunchKernel(launch.kernel, grid(launch.tasks), dim3(static_cast<unsigned>(launch.threads)), parameters,
                          launch.shared_bytes, stream);
}

}  // namespace headway::cuda
