// A copy of a matrix whose rows begin at multiples of 16 bytes, as the copy engine wants them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/host_device.h"

namespace headway::cuda {

// [items, heads, rows] of `bytes` each; steps in bytes. The rest of a row's last 16 bytes becomes 0.
struct AlignedRows {
  const void* from;
  void* to;
  std::int64_t items, heads, rows;
  std::int64_t bytes;                           // of a row
  std::int64_t item_step, head_step, row_step;  // of `from`; `to` is dense
};

HEADWAY_HOST_DEVICE inline std::int64_t aligned_row_bytes(std::int64_t bytes) { return (bytes + 15) / 16 * 16; }

cudaError_t launch_aligned_rows(const AlignedRows& copy, cudaStream_t stream);

}  // namespace headway::cuda
