// The end of a tile: normalised rows, converted and stored, and their lse.
#pragma once

#include "engines/cuda/kernels/hopper_modifiers.cuh"
#include "engines/cuda/kernels/hopper_shared.cuh"
#include "engines/cuda/kernels/hopper_softmax.cuh"
#include "engines/cuda/ptx/convert.cuh"
#include "engines/cuda/ptx/transpose.cuh"

namespace headway::cuda {

using ptx::transpose_quad;

// Two neighbouring lanes exchange words: the even one ends with the first words of both, the odd one with the second.
__device__ __forceinline__ void transpose_pair(std::uint32_t (&words)[2], bool odd) {
  const std::uint32_t other = __shfl_xor_sync(~0u, odd ? words[0] : words[1], 1);
  (odd ? words[0] : words[1]) = other;
}

// One row of the tile, of which this lane of a quad holds every fourth pair of columns: 8 bytes a store, 32 of a row
// together. (16 bytes a store take more exchanges than they save.) A row that is empty (padding, or without a key) is 0
// whatever the sums hold. False if something else is not finite.
template <class Half, int count>
__device__ __forceinline__ bool store_row(Half* row, const float (&out)[count], int i, float factor, int q, int columns,
                                          bool stored, bool empty) {
  std::uint32_t not_finite[2] = {0, 0};
#pragma unroll
  for (int group = 0; group < count / 8; ++group) {
    std::uint32_t words[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int at = (2 * group + k) * 4 + 2 * i;
      words[k] = empty ? 0 : ptx::packed_pair<Half>(out[at] * factor, out[at + 1] * factor);
      not_finite[k] = ptx::add_not_finite<Half>(words[k], not_finite[k]);
    }
    transpose_pair(words, q & 1);
    const int column = group * 16 + (q & 1) * 8 + (q & 2) * 2;
    if (stored && column < columns) {
      *reinterpret_cast<uint2*>(row + column) = make_uint2(words[0], words[1]);
    }
  }
  return ((not_finite[0] | not_finite[1]) & 0x7FFF7FFFu) == 0;
}

// The same in f32, of what will be added to others.
template <int count>
__device__ __forceinline__ void store_part(float* row, const float (&out)[count], int i, float factor, int q,
                                           int columns) {
#pragma unroll
  for (int j = 0; j < count / 4; ++j) {
    if (8 * j + 2 * q < columns) {
      *reinterpret_cast<float2*>(row + 8 * j + 2 * q) =
          make_float2(out[4 * j + 2 * i] * factor, out[4 * j + 2 * i + 1] * factor);
    }
  }
}

__device__ __forceinline__ std::int64_t row_offset(const Rows& rows, std::int64_t b, std::int64_t h, std::int64_t row) {
  return b * rows.batch + h * rows.head + row * rows.row;
}

// A thread's two rows of the tile: divided by their sums, with the sink in them, and their lse. False if a row is not
// finite.
template <class Half, HopperVariant variant, class Softmax, int count>
__device__ __forceinline__ bool store_rows(const HopperArguments& args, const HopperWork& work, int tile_row,
                                           int quad_lane, Softmax& softmax, const float (&out)[count]) {
  bool finite = true;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = tile_row + 8 * i;
    const bool stored = row < work.stored_rows;
    const bool real = row < work.real_rows;
    const bool empty = !real || softmax.sum[i] == 0.0f;  // whatever the sink is
    float factor = 1.0f;
    if (!is_plain(variant) && args.sinks.data != nullptr) {
      factor = softmax.add_sink(i, load_per_head(args.sinks, work.head));
    }
    factor = factor / softmax.sum[i];
    if constexpr (variant == HopperVariant::dropped) {
      factor *= args.kept;
    }
    const std::int64_t position = work.query_begin + work.row + row;
    Half* to = static_cast<Half*>(args.out.data) + row_offset(args.out, work.batch, work.head, position);
    finite &= store_row(to, out, i, factor, quad_lane, static_cast<int>(args.value_dim), stored, empty);
    if (args.lse.data != nullptr && stored && quad_lane == 0) {
      static_cast<float*>(args.lse.data)[row_offset(args.lse, work.batch, work.head, position)] =
          real ? softmax.lse(i) : minus_infinity;
    }
  }
  return finite;
}

}  // namespace headway::cuda
