// For work that a kernel nearly never does: it must not take registers from the rest.
#pragma once

#include <cstdint>

namespace headway::cuda::ptx {

// Says that the block of code around it runs once at most. Loops of rare work lie deepest in a kernel, and the compiler
// would keep their values in registers rather than those of the loops that matter. A hint that CUDA has from 13.0 on.
__device__ __forceinline__ void rarely() {
#if __CUDACC_VER_MAJOR__ >= 13
  asm volatile(".pragma \"frequency 1\";");
#endif
}

// The same object by an address of which the compiler knows nothing: what is computed from it stays behind this place,
// and is not moved out of loops around it.
template <class T>
__device__ __forceinline__ const T& hidden(const T& object) {
  const T* address = &object;
  asm volatile("" : "+l"(address));
  return *address;
}

}  // namespace headway::cuda::ptx
