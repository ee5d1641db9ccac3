// How much shared memory a launch asked for.
#pragma once

#include <cstdint>

namespace headway::cuda::ptx {

__device__ inline std::uint32_t dynamic_shared_bytes() {
  std::uint32_t bytes;
  asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
  return bytes;
}

}  // namespace headway::cuda::ptx
