// In place of the files for AVX-512 in a build for a machine without it (HEADWAY_CPU_KERNELS=RUNNABLE).
#include "engines/cpu/kernels.h"

namespace headway::cpu {

bool avx512_is_built() { return false; }

// Nobody calls these then.
const Kernels& avx512_kernels() { return scalar_kernels(); }
const Kernels& avx512_bf16_kernels() { return scalar_kernels(); }

}  // namespace headway::cpu
