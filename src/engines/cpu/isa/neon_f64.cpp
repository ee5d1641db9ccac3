// The kernels of f64 for NEON.
#include "engines/cpu/simd/neon.h"
// After the vocabulary, which it uses:
#include "engines/cpu/kernel/kernels.h"

namespace headway::cpu {

DoubleKernels neon_f64_kernels() { return make_double_kernels(); }

}  // namespace headway::cpu
