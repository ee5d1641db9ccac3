// The kernels for AVX-512.
#include "engines/cpu/simd/avx512.h"

#include "engines/cpu/kernel/kernels.h"

namespace headway::cpu {

bool avx512_is_built() { return true; }

const Kernels& avx512_kernels() {
  static constexpr Kernels kernels = make_kernels("avx512");
  return kernels;
}

}  // namespace headway::cpu
