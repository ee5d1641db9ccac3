// For work that a kernel nearly never does: it must not take registers from the rest.
#pragma once

#include <cstdint>

namespace headway::cuda::ptx {

// The same object by an address of which the compiler knows nothing: what is computed from it stays behind this place,
// and is not moved out of loops around it.
template <class T>
__device__ __forceinline__ const T& hidden(const T& object) {
  const T* address = &object;
  asm volatile("" : "+l"(address));
  return *address;
}

// The same number, of which the compiler knows nothing any more: what is computed from it is computed again in each
// turn of a loop instead of being kept in registers.
__device__ __forceinline__ void hide(int& number) { asm volatile("" : "+r"(number)); }
__device__ __forceinline__ void hide(std::int64_t& number) { asm volatile("" : "+l"(number)); }

}  // namespace headway::cuda::ptx
