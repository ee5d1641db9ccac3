// What to launch for a forward of f32 in three bf16 parts.
#pragma once

#include "engines/cuda/kernels/forward_kernels.h"
#include "engines/cuda/kernels/split_forward.cuh"

namespace headway::cuda {

// `resident` blocks share a multiprocessor.
template <class Products, int Depth, int resident, int Width = Depth>
Launch split_forward_launch_of(const char* name, const ForwardArguments& arguments) {
  using Forward = SplitForward<Products, Depth, Width>;
  Launch launch;
  launch.name = name;
  launch.kernel = reinterpret_cast<const void*>(split_forward<Forward, resident>);
  launch.threads = Forward::threads;
  launch.shared_bytes = Forward::shared_bytes();
  launch.query_block = Forward::rows;
  launch.key_block = Forward::keys;
  launch.stages = 2;
  launch.row_tiles = blocks(arguments.query_len, Forward::rows);
  launch.tasks = arguments.batch * arguments.heads * launch.row_tiles;
  return launch;
}

}  // namespace headway::cuda
