// The instruction sets of x86-64, by CPUID.
#include <cpuid.h>

#include "engines/cpu/kernels.h"

namespace headway::cpu {
namespace {

// Not every compiler's __builtin_cpu_supports knows this one.
bool has_f16c() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}

}  // namespace

std::vector<const Kernels*> available_kernels() {
  std::vector<const Kernels*> result;
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
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
