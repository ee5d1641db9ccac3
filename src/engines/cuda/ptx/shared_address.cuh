// Addresses in shared memory as instructions take them: 32 bits, without the space that they are in.
#pragma once

#include <cstdint>

namespace headway::cuda::ptx {

__device__ __forceinline__ std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

}  // namespace headway::cuda::ptx
