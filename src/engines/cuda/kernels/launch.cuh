// Counting blocks.
#pragma once

#include <cstdint>

namespace headway::cuda {

inline std::int64_t blocks(std::int64_t size, std::int64_t block) { return (size + block - 1) / block; }

// One axis, which may have 2^31 - 1 blocks; kernels loop over what is left.
inline dim3 grid(std::int64_t tasks) {
  constexpr std::int64_t most = (std::int64_t{1} << 31) - 1;
  return dim3(static_cast<unsigned>(tasks < most ? tasks : most));
}

}  // namespace headway::cuda
