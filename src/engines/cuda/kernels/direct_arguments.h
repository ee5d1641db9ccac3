// What the kernels take whose operands go straight to registers (direct_tile.cuh).
#pragma once

#include "engines/cuda/arguments.h"

namespace headway::cuda {

struct DirectArguments : ForwardArguments {
  unsigned row_tiles;  // of 16 rows, of a kv head
  unsigned tasks;      // row tiles of all kv heads
  // Of direct_decode:
  unsigned rows;     // of a tile, that calls have: up to 16
  unsigned cluster;  // blocks that share the keys of a tile
};

}  // namespace headway::cuda
