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

}  // namespace

Launch mma_matrix_launch(const ScoresArguments& arguments, DType dtype) {
  return of_half_type(dtype, arguments.head_dim, [&]<class T, int Depth>() { return chosen<T, Depth>(arguments); });
}

}  // namespace headway::cuda
