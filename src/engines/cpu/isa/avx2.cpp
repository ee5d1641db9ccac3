// The kernels for AVX2 with FMA and F16C.
#include "engines/cpu/simd/avx2.h"

#include "engines/cpu/kernel/kernels.h"

namespace headway::cpu {

const Kernels& avx2_kernels() {
  static const Kernels kernels = make_kernels("avx2", avx2_f64_kernels());
  return kernels;
}

}  // namespace headway::cpu
