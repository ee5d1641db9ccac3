#include "engines/cuda/kernels/kernels.h"
#include "engines/cuda/kernels/launch.cuh"
#include "engines/cuda/kernels/mma_forward.cuh"

namespace headway::cuda {
namespace {

template <class T, int Depth>
Launch chosen(const ForwardArguments& arguments) {
  Launch launch;
  launch.name = "tensor core tiles";
  launch.kernel = reinterpret_cast<const void*>(mma_forward<T, Depth>);
  launch.threads = mma_threads;
  launch.shared_bytes = MmaForward<T, Depth>::shared_bytes();
  launch.query_block = launch.key_block = mma_rows;
  launch.stages = MmaForward<T, Depth>::stages;
  launch.row_tiles = blocks(arguments.query_len, mma_rows);
  launch.tasks = arguments.batch * arguments.heads * launch.row_tiles;
  return launch;
}

}  // namespace

Launch mma_forward_launch(const ForwardArguments& arguments, DType dtype) {
  return of_half_type(dtype, widest(arguments), [&]<class T, int Depth>() { return chosen<T, Depth>(arguments); });
}

}  // namespace headway::cuda
