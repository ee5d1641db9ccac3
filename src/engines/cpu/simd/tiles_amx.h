// The tile vocabulary for AMX: eight registers of 16 rows of 64 bytes. The compiler does not know them, so every
// instruction is an asm with a memory clobber: it stays where it is written among loads and stores.
#pragma once

#include <cstdint>

#include "engines/cpu/simd/common.h"

namespace headway::cpu {
namespace {

struct AmxTiles {
  // While one lives, its thread has tiles of full size; without one they take no room in a context switch.
  class InUse {
   public:
    InUse() {
      struct alignas(64) Configuration {
        std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
        std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
      };
      const Configuration configuration;
      asm volatile("ldtilecfg %0" : : "m"(configuration));
    }
    ~InUse() { asm volatile("tilerelease"); }
    InUse(const InUse&) = delete;
    InUse& operator=(const InUse&) = delete;
  };

  template <int tile>
  HEADWAY_INLINE static void zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(tile) : "memory");
  }
  // Rows `stride` bytes apart.
  template <int tile>
  HEADWAY_INLINE static void load(const void* rows, std::int64_t stride) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(tile), "r"(rows), "r"(stride) : "memory");
  }
  // The same for what is not needed soon again: it leaves the first-level cache to the rest.
  template <int tile>
  HEADWAY_INLINE static void load_passing(const void* rows, std::int64_t stride) {
    asm volatile("tileloaddt1 (%1,%2,1), %%tmm%c0" : : "i"(tile), "r"(rows), "r"(stride) : "memory");
  }
  template <int tile>
  HEADWAY_INLINE static void store(void* rows, std::int64_t stride) {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(tile), "r"(rows), "r"(stride) : "memory");
  }
  // sum [16][16 floats] += a [16][32 bf16] * b [16 pairs][16], where b's row k holds elements 2k and 2k + 1 of each
  // column. Denormals count as 0.
  template <int sum, int a, int b>
  HEADWAY_INLINE static void multiply_add() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sum), "i"(a), "i"(b) : "memory");
  }
};

}  // namespace
}  // namespace headway::cpu
