// The instruction sets of x86-64, by CPUID and what the system permits.
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "engines/cpu/kernels.h"

namespace headway::cpu {
namespace {

// Not every compiler's __builtin_cpu_supports knows this one.
bool has_f16c() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}

bool is_intel() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(0, &a, &b, &c, &d) != 0 && b == signature_INTEL_ebx && c == signature_INTEL_ecx &&
         d == signature_INTEL_edx;
}

// Tiles are 8 KB of additional registers for each thread, which a process must request from Linux. The request may be
// repeated. It fails on old kernels, on other systems, and if a signal stack is too small to save tiles on.
bool amx_is_permitted() {
#ifdef SYS_arch_prctl
  constexpr int request_permission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr int tile_data = 18;               // XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
  return false;
#endif
}

bool has_amx() {
  constexpr unsigned amx_bf16 = 1u << 22, amx_tile = 1u << 24;
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & amx_bf16) != 0 && (d & amx_tile) != 0 &&
         amx_is_permitted();
}

}  // namespace

std::vector<const Kernels*> available_kernels() {
  std::vector<const Kernels*> result;
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
  const bool avx512 = avx2 && avx512_is_built() && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  const bool avx512_bf16 = avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi");
  if (avx512_bf16 && amx_is_built() && has_amx()) {
    result.push_back(&amx_kernels());
  }
  // Intel's bf16 dot product does as many products a cycle as its float multiply-add, so bf16 as float is faster there.
  const bool pairs_are_faster = !is_intel();
  if (avx512_bf16 && pairs_are_faster) {
    result.push_back(&avx512_bf16_kernels());
  }
  if (avx512) {
    result.push_back(&avx512_kernels());
  }
  if (avx512_bf16 && !pairs_are_faster) {
    result.push_back(&avx512_bf16_kernels());
  }
  if (avx2) {
    result.push_back(&avx2_kernels());
  }
  result.push_back(&scalar_kernels());
  if (avx512_bf16 && emulated_amx_kernels() != nullptr) {
    result.push_back(emulated_amx_kernels());
  }
  return result;
}

}  // namespace headway::cpu
