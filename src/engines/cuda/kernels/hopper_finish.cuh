// The end of a tile: normalised rows, converted and stored, and their lse.
#pragma once

#include "engines/cuda/kernels/hopper_shared.cuh"
#include "engines/cuda/kernels/hopper_softmax.cuh"
#include "engines/cuda/ptx/convert.cuh"

namespace headway::cuda {

// Exchanges words between the four lanes of a quad: lane q gives its word k to lane k and ends with word q of each.
__device__ __forceinline__ void transpose_quad(std::uint32_t (&words)[4], int q) {
#pragma unroll
  for (int k = 0; k < 4; k += 2) {
    const std::uint32_t other = __shfl_xor_sync(~0u, (q & 1) ? words[k] : words[k + 1], 1);
    ((q & 1) ? words[k] : words[k + 1]) = other;
  }
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const std::uint32_t other = __shfl_xor_sync(~0u, (q & 2) ? words[k] : words[k + 2], 2);
    ((q & 2) ? words[k] : words[k + 2]) = other;
  }
}

// One row of the tile, of which this lane of a quad holds every fourth pair of columns: 16 bytes a store. A row that is
// empty (padding, or without a key) is 0 whatever the sums hold.
template <class Half, int count>
__device__ __forceinline__ void store_row(Half* row, const float (&out)[count], int i, float factor, int q, int columns,
                                          bool stored, bool empty) {
#pragma unroll
  for (int group = 0; group < count / 16; ++group) {
    std::uint32_t words[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int at = (4 * group + k) * 4 + 2 * i;
      words[k] = empty ? 0 : ptx::packed_pair<Half>(out[at] * factor, out[at + 1] * factor);
    }
    transpose_quad(words, q);
    const int column = group * 32 + q * 8;
    if (stored && column < columns) {
      *reinterpret_cast<uint4*>(row + column) = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

__device__ __forceinline__ std::int64_t row_offset(const Rows& rows, std::int64_t b, std::int64_t h, std::int64_t row) {
  return b * rows.batch + h * rows.head + row * rows.row;
}

}  // namespace headway::cuda
