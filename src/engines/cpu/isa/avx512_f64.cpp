// The kernels of f64 for AVX-512.
#include "engines/cpu/simd/avx512.h"
// After the vocabulary, which it uses:
#include "engines/cpu/kernel/kernels.h"

namespace headway::cpu {

DoubleKernels avx512_f64_kernels() { return make_double_kernels(); }

}  // namespace headway::cpu
