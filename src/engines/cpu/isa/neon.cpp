// The kernels for NEON.
#include "engines/cpu/simd/neon.h"

#include "engines/cpu/kernel/kernels.h"

namespace headway::cpu {

const Kernels& neon_kernels() {
  static const Kernels kernels = make_kernels("neon", neon_f64_kernels());
  return kernels;
}

}  // namespace headway::cpu
