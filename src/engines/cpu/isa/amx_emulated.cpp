// The kernels for AMX on tiles that are emulated, for tests on machines without AMX.
#pragma GCC diagnostic ignored "-Wignored-attributes"  // g++ 13: of vector types among template arguments
#include "engines/cpu/isa/with_tiles.h"
#include "engines/cpu/simd/tiles_emulated.h"

namespace headway::cpu {

const Kernels* emulated_amx_kernels() {
  static const Kernels kernels = kernels_with_tiles<EmulatedTiles>("amx_emulated");
  return &kernels;
}

}  // namespace headway::cpu
