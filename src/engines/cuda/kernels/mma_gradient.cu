#include "engines/cuda/kernels/kernels.h"
#include "engines/cuda/kernels/launch.cuh"
#include "engines/cuda/kernels/mma_gradient.cuh"

namespace headway::cuda {
namespace {

template <class T, int Depth, bool KeysAreRows>
Launch chosen(const GradientArguments& arguments) {
  using Gradient = MmaGradient<T, Depth, KeysAreRows>;
  Launch launch;
  launch.name = "tensor core tiles";
  launch.kernel = reinterpret_cast<const void*>(mma_gradient<T, Depth, KeysAreRows>);
  launch.threads = mma_threads;
  launch.shared_bytes = Gradient::shared_bytes(arguments);
  launch.query_block = launch.key_block = mma_rows;
  launch.stages = Gradient::stages;
  launch.row_tiles = blocks(KeysAreRows ? arguments.key_len : arguments.query_len, mma_rows);
  launch.tasks = arguments.batch * (KeysAreRows ? arguments.kv_heads : arguments.heads) * launch.row_tiles;
  return launch;
}

}  // namespace

Launch mma_gradient_launch(const GradientArguments& arguments, DType dtype) {
  return of_half_type(dtype, widest(arguments), [&]<class T, int Depth>() {
    return arguments.of == GradientOf::query ? chosen<T, Depth, false>(arguments) : chosen<T, Depth, true>(arguments);
  });
}

}  // namespace headway::cuda
