// For work that a kernel nearly never does: it must not take registers from the rest.
#pragma once

namespace headway::cuda::ptx {

// The same object by an address of which the compiler knows nothing: what is computed from it stays behind this place,
// and is not moved out of loops around it.
template <class T>
__device__ __forceinline__ const T& hidden(const T& object) {
  const T* address = &object;
  asm volatile("" : "+l"(address));
  return *address;
}

}  // namespace headway::cuda::ptx
