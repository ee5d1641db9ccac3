// In place of amx_emulated.cpp where no tests are built, or AVX-512 is left out.
#include "engines/cpu/kernels.h"

namespace headway::cpu {

const Kernels* emulated_amx_kernels() { return nullptr; }

}  // namespace headway::cpu
