// The kernels for AVX2 with FMA and F16C.
#include "engines/cpu/simd/avx2.h"

#include "engines/cpu/kernel/kernels.h"

namespace headway::cpu {

const Kernels& avx2_kernels() {
  static constexpr Kernels kernels = make_kernels("avx2");
  return kernels;
}

}  // namespace headway::cpu
