// What the exact kernels' launches share.
#pragma once

#include "engines/cuda/device.h"
#include "engines/cuda/kernels/launch.cuh"

namespace headway::cuda {

// Whether a block of the current device may have this much shared memory, with a little more of its own.
inline bool has_shared(std::size_t bytes, std::size_t own = 4096) {
  return bytes + own <= static_cast<std::size_t>(device_properties(current_device()).shared_bytes);
}

}  // namespace headway::cuda
