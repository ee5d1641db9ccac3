// The instruction sets of x86-64, by CPUID.
#include "engines/cpu/kernels.h"

namespace headway::cpu {

std::vector<const Kernels*> available_kernels() {
  std::vector<const Kernels*> result;
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    result.push_back(&avx512_kernels());
  }
  return result;
}

}  // namespace headway::cpu
