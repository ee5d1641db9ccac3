// The kernels of f64 for AVX2 with FMA and F16C.
#include "engines/cpu/simd/avx2.h"
// After the vocabulary, which it uses:
#include "engines/cpu/kernel/kernels.h"

namespace headway::cpu {

DoubleKernels avx2_f64_kernels() { return make_double_kernels(); }

}  // namespace headway::cpu
