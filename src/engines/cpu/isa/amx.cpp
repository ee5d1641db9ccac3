// The kernels for AMX with bf16.
#pragma GCC diagnostic ignored "-Wignored-attributes"  // g++ 13: of vector types among template arguments
#include "engines/cpu/isa/with_tiles.h"
#include "engines/cpu/simd/tiles_amx.h"

namespace headway::cpu {

bool amx_is_built() { return true; }

const Kernels& amx_kernels() {
  static const Kernels kernels = kernels_with_tiles<AmxTiles>("amx");
  return kernels;
}

}  // namespace headway::cpu
