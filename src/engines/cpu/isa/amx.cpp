// The kernels for AMX with bf16.
#include "engines/cpu/isa/with_tiles.h"
#include "engines/cpu/simd/tiles_amx.h"

namespace headway::cpu {

const Kernels& amx_kernels() {
  static const Kernels kernels = kernels_with_tiles<AmxTiles>("amx");
  return kernels;
}

}  // namespace headway::cpu
