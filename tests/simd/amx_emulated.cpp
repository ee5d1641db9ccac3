#pragma GCC diagnostic ignored "-Wignored-attributes"  // g++ 13: of vector types among template arguments
#include "engines/cpu/simd/tiled_bf16.h"
#include "engines/cpu/simd/tiles_emulated.h"
#include "simd/checks.h"
#include "simd/pair_checks.h"
#include "simd/tile_checks.h"

namespace headway::cpu {

void check_amx_emulated(const CheckReport& report) {
  Checks<TiledBF16<EmulatedTiles>>(report, true).run();
  PairChecks<TiledBF16<EmulatedTiles>>(report).run();
  TileChecks<EmulatedTiles>(report).run();
}

}  // namespace headway::cpu
