// The instruction sets of x86-64, by CPUID.
#include "engines/cpu/kernels.h"

namespace headway::cpu {

std::vector<const Kernels*> available_kernels() {
  std::vector<const Kernels*> result;
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx512 && __builtin_cpu_supports("avx512bf16")) {
    result.push_back(&avx512_bf16_kernels());
  }
  if (avx512) {
    result.push_back(&avx512_kernels());
  }
  if (avx2) {
    result.push_back(&avx2_kernels());
  }
  result.push_back(&scalar_kernels());
  return result;
}

}  // namespace headway::cpu
