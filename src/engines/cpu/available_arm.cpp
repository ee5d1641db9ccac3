// The instruction sets of 64-bit ARM: every one has NEON.
#include "engines/cpu/kernels.h"

namespace headway::cpu {

std::vector<const Kernels*> available_kernels() { return {&neon_kernels(), &scalar_kernels()}; }

}  // namespace headway::cpu
