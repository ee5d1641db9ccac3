// The kernels for NEON.
#include "engines/cpu/simd/neon.h"

#include "engines/cpu/kernel/kernels.h"

namespace headway::cpu {

const Kernels& neon_kernels() {
  static constexpr Kernels kernels = make_kernels("neon");
  return kernels;
}

}  // namespace headway::cpu
