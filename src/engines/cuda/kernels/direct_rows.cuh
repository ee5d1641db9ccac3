// Rows of keys or values that go straight to registers.
#pragma once

#include <cstdint>

namespace headway::cuda {

// A lane's rows of keys or values: 32-bit steps in bytes from one address (the host refuses larger ones).
struct DirectRows {
  const char* data;
  int row;    // bytes from one to the next
  int count;  // rows from here on that may be read

  // 16 bytes of row r; 0 where there is none.
  __device__ __forceinline__ uint4 chunk(int r, int byte, bool inside) const {
    uint4 result{};
    if (inside && r < count) {
      result = __ldg(reinterpret_cast<const uint4*>(data + static_cast<std::int64_t>(r) * row + byte));
    }
    return result;
  }
};

}  // namespace headway::cuda
