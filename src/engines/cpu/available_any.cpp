// A machine without vector operations of its own.
#include "engines/cpu/kernels.h"

namespace headway::cpu {

std::vector<const Kernels*> available_kernels() { return {&scalar_kernels()}; }

}  // namespace headway::cpu
