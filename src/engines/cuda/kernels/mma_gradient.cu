#include "engines/cuda/kernels/kernels.h"
#include "engines/cuda/kernels/mma_gradient.cuh"
#include "engines/cuda/kernels/simt_launch.cuh"

namespace headway::cuda {
namespace {

template <class T, int Depth, bool KeysAreRows, int Stages>
Launch in_stages(const GradientArguments& arguments) {
  using Gradient = MmaGradient<T, Depth, KeysAreRows, Stages>;
  Launch launch;
  launch.name = "tensor core tiles";
  launch.kernel = reinterpret_cast<const void*>(mma_gradient<T, Depth, KeysAreRows, Stages>);
  launch.threads = mma_threads;
  launch.shared_bytes = Gradient::shared_bytes(arguments);
  launch.query_block = launch.key_block = mma_rows;
  launch.stages = Gradient::stages;
  launch.row_tiles = blocks(KeysAreRows ? arguments.key_len : arguments.query_len, mma_rows);
  launch.tasks = arguments.batch * (KeysAreRows ? arguments.kv_heads : arguments.heads) * launch.row_tiles;
  return launch;
}

// Two stages where shared memory holds them.
template <class T, int Depth, bool KeysAreRows>
Launch chosen(const GradientArguments& arguments) {
  if constexpr (Depth == 256) {
    return in_stages<T, Depth, KeysAreRows, 1>(arguments);
  } else {
    const Launch two = in_stages<T, Depth, KeysAreRows, 2>(arguments);
    return Depth == 64 || has_shared(two.shared_bytes) ? two : in_stages<T, 128, KeysAreRows, 1>(arguments);
  }
}

}  // namespace

Launch mma_gradient_launch(const GradientArguments& arguments, DType dtype) {
  return of_half_type(dtype, widest(arguments), [&]<class T, int Depth>() {
    return arguments.of == GradientOf::query ? chosen<T, Depth, false>(arguments) : chosen<T, Depth, true>(arguments);
  });
}

}  // namespace headway::cuda
