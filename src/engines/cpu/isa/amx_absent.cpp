// In place of amx.cpp in a build for a machine without AMX (HEADWAY_CPU_KERNELS=RUNNABLE).
#include "engines/cpu/kernels.h"

namespace headway::cpu {

bool amx_is_built() { return false; }

const Kernels& amx_kernels() { return scalar_kernels(); }  // nobody calls it then

}  // namespace headway::cpu
