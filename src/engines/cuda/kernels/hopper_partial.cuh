// The end of a tile that has one part of the keys: its rows' sums and statistics, in f32 and not normalised, for
// merge_splits.cuh.
#pragma once

#include "engines/cuda/kernels/hopper_shared.cuh"
#include "engines/cuda/kernels/hopper_softmax.cuh"

namespace headway::cuda {

// Where the arrays of splits have a row of the tile.
__device__ __forceinline__ std::int64_t partial_row(const HopperArguments& args, const HopperWork& work, int row) {
  const SplitArguments& split = args.split;
  return ((work.batch * args.heads + work.head) * split.splits + work.split) * split.rows + work.row + row;
}

// A thread's two rows. Weights that were lifted (TileSoftmax::shift) come down again. A row that sees no key of this
// part is 0 whatever the sums hold. False if something else is not finite.
template <class Softmax, int count>
__device__ __forceinline__ bool store_partial(const HopperArguments& args, const HopperWork& work, int tile_row,
                                              int quad_lane, const Softmax& softmax, const float (&out)[count]) {
  constexpr float lowered = 1.0f / static_cast<float>(1 << static_cast<int>(Softmax::shift));
  const auto columns = static_cast<int>(args.value_dim);
  const std::int64_t width = sum_width(args.value_dim);
  float not_finite = 0.0f;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = tile_row + 8 * i;
    const bool empty = row >= work.real_rows || softmax.sum[i] == 0.0f;
    const std::int64_t at = partial_row(args, work, row);
    float* to = args.split.sums + at * width + 2 * quad_lane;
#pragma unroll
    for (int j = 0; j < count / 4; ++j) {
      const float first = empty ? 0.0f : out[4 * j + 2 * i] * lowered;
      const float second = empty ? 0.0f : out[4 * j + 2 * i + 1] * lowered;
      not_finite = fmaf(first, 0.0f, fmaf(second, 0.0f, not_finite));  // 0 or NaN
      if (8 * j + 2 * quad_lane < columns) {
        *reinterpret_cast<float2*>(to + 8 * j) = make_float2(first, second);
      }
    }
    if (quad_lane == 0) {
      *reinterpret_cast<float2*>(args.split.statistics + 2 * at) =
          empty ? make_float2(minus_infinity, 0.0f) : make_float2(softmax.reference[i], softmax.sum[i] * lowered);
    }
  }
  return not_finite == 0.0f;
}

}  // namespace headway::cuda
