// What both decode kernels say of their launch.
#pragma once

#include "engines/cuda/kernels/decode_kernels.h"
#include "engines/cuda/kernels/launch.cuh"
#include "engines/cuda/kernels/mma_tile.cuh"

namespace headway::cuda {

template <class Kernel>
Launch decode_launch_of(const char* name, void (*kernel)(DecodeArguments), const ForwardArguments& arguments,
                        std::int64_t splits) {
  const std::int64_t rows = arguments.group * arguments.query_len;
  static_assert(Kernel::rows == decode_rows && mma_rows == decode_keys);
  Launch launch;
  launch.name = name;
  launch.kernel = reinterpret_cast<const void*>(kernel);
  launch.threads = mma_threads;
  launch.shared_bytes = Kernel::shared_bytes();
  launch.query_block = decode_rows;
  launch.key_block = decode_keys;
  launch.stages = Kernel::stages;
  launch.splits = splits;
  launch.row_tiles = (rows + decode_rows - 1) / decode_rows;
  launch.tasks = arguments.batch * arguments.kv_heads * splits * launch.row_tiles;
  return launch;
}

}  // namespace headway::cuda
