#include "engines/cuda/kernels/kernels.h"
#include "engines/cuda/kernels/launch.cuh"
#include "engines/cuda/kernels/mma_matrix.cuh"

namespace headway::cuda {
namespace {

template <class T, int Depth>
Launch chosen(const ScoresArguments& arguments) {
  Launch launch;
  launch.name = "tensor core matrix";
  launch.kernel = reinterpret_cast<const void*>(mma_matrix<T, Depth>);
  launch.threads = mma_threads;
  launch.shared_bytes = MmaMatrix<T, Depth>::shared_bytes();
  launch.query_block = launch.key_block = mma_rows;
  launch.stages = MmaMatrix<T, Depth>::stages;
  launch.row_tiles = blocks(arguments.query_len, mma_rows);
  launch.tasks = arguments.batch * arguments.heads * launch.row_tiles;
  return launch;
}

template <class T>
Launch of_type(const ScoresArguments& arguments) {
  const std::int64_t width = arguments.head_dim;
  return width <= 64 ? chosen<T, 64>(arguments) : width <= 128 ? chosen<T, 128>(arguments) : chosen<T, 256>(arguments);
}

}  // namespace

Launch mma_matrix_launch(const ScoresArguments& arguments, DType dtype) {
  return dtype == DType::bf16 ? of_type<bfloat16>(arguments) : of_type<float16>(arguments);
}

}  // namespace headway::cuda
