// The kernels of f64 for any machine.
#include "engines/cpu/simd/scalar.h"
// After the vocabulary, which it uses:
#include "engines/cpu/kernel/kernels.h"

namespace headway::cpu {

DoubleKernels scalar_f64_kernels() { return make_double_kernels(); }

}  // namespace headway::cpu
