// The kernels for AVX-512.
#include "engines/cpu/simd/avx512.h"

#include "engines/cpu/kernel/kernels.h"

namespace headway::cpu {

bool avx512_is_built() { return true; }

const Kernels& avx512_kernels() {
  static const Kernels kernels = make_kernels("avx512", avx512_f64_kernels());
  return kernels;
}

}  // namespace headway::cpu
