// In place of the files for AVX-512 and AMX in a build for a machine without them (HEADWAY_CPU_KERNELS=RUNNABLE).
#include "engines/cpu/kernels.h"

namespace headway::cpu {

bool avx512_is_built() { return false; }

// Nobody calls these then.
const Kernels& avx512_kernels() { return scalar_kernels(); }
const Kernels& avx512_bf16_kernels() { return scalar_kernels(); }
const Kernels& amx_kernels() { return scalar_kernels(); }
const Kernels* emulated_amx_kernels() { return nullptr; }

}  // namespace headway::cpu
