// Single elements of a mask or bias [B,H,Sq,Sk] in device memory; hopper_units.cuh has their blocks.
#pragma once

#include "engines/cuda/elements.cuh"
#include "engines/cuda/kernels/hopper_shared.cuh"

namespace headway::cuda {

// The offset of (b, h, i, key); i is cut to the rows that exist.
__device__ __forceinline__ std::int64_t matrix_offset(const Matrix& matrix, const HopperWork& work, int tile_row,
                                                      int key) {
  const std::int64_t row = work.row + min(tile_row, work.stored_rows - 1);
  return work.batch * matrix.batch + work.head * matrix.head + row * matrix.query + key * matrix.key;
}

__device__ __forceinline__ float load_bias(const Matrix& bias, std::int64_t offset) {
  return load_number<float>(bias.data, bias.dtype, offset);
}

}  // namespace headway::cuda
