#include "engines/cuda/kernels/forward_kernels.h"
#include "engines/cuda/kernels/split_forward.cuh"

namespace headway::cuda {
namespace {

template <int Depth>
Launch chosen(const ForwardArguments& arguments) {
  using Forward = SplitForward<Depth>;
  Launch launch;
  launch.name = "f32 tiles in three bf16 parts";
  launch.kernel = reinterpret_cast<const void*>(split_forward<Depth>);
  launch.threads = Forward::threads;
  launch.shared_bytes = Forward::shared_bytes();
  launch.query_block = Forward::rows;
  launch.key_block = Forward::keys;
  launch.stages = 2;
  launch.row_tiles = blocks(arguments.query_len, Forward::rows);
  launch.tasks = arguments.batch * arguments.heads * launch.row_tiles;
  return launch;
}

}  // namespace

Launch split_forward_launch(const ForwardArguments& arguments) {
  const std::int64_t width = widest(arguments);
  return width <= 64 ? chosen<64>(arguments) : width <= 128 ? chosen<128>(arguments) : chosen<256>(arguments);
}

}  // namespace headway::cuda
