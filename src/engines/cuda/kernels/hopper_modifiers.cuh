// Score modifiers and dropout on a warpgroup's block of scores, in the order of the definition: scale, softcap, bias,
// ALiBi, mask. A thread holds columns 8 j + c (c = 0, 1) of two rows, counted from its own first column.
#pragma once

#include "engines/cuda/dropout.cuh"
#include "engines/cuda/elements.cuh"
#include "engines/cuda/kernels/hopper_shared.cuh"
#include "engines/cuda/kernels/hopper_softmax.cuh"
#include "engines/cuda/ptx/bytes.cuh"

namespace headway::cuda {

__device__ __forceinline__ float load_per_head(const PerHead& values, std::int64_t head) {
  return load_number<float>(values.data, values.dtype, head * values.stride);
}

// ---- softcap ----

// How large a block's products are: most stay far below the cap, where a short polynomial does. The exponential unit is
// the softmax's bottleneck.
enum class CapRange : std::uint8_t { small, medium, any };

// cap * tanh(unit * product) is the product times this polynomial in its square, to half a unit in the last place of
// f32.
template <int terms>
__device__ __forceinline__ float cap_factor(const float (&factors)[terms], float product) {
  const float square = product * product;
  float factor = factors[terms - 1];
#pragma unroll
  for (int k = terms - 2; k >= 0; --k) {
    factor = fmaf(square, factor, factors[k]);
  }
  return factor;
}

template <CapRange range>
__device__ __forceinline__ float capped(const HopperArguments& args, float product) {
  if constexpr (range == CapRange::small) {
    return product * cap_factor(args.small_factors, product);
  } else if constexpr (range == CapRange::medium) {
    return product * cap_factor(args.medium_factors, product);
  } else {
    const float power = ptx::exp2_fast(fabsf(product) * (2 * log2_e) * fabsf(args.unit));
    const float large = copysignf(args.cap - 2.0f * args.cap * ptx::reciprocal_fast(power + 1.0f), product * args.unit);
    return fabsf(product) <= args.medium_product ? product * cap_factor(args.medium_factors, product) : large;
  }
}

// The same for a score that may stand beside forbidden ones: those choose the range too, but must not change it.
template <CapRange range>
__device__ __forceinline__ float capped_alone(const HopperArguments& args, float product) {
  const float score = capped<range>(args, product);
  return fabsf(product) <= args.small_product ? capped<CapRange::small>(args, product) : score;
}

template <int count>
__device__ __forceinline__ float largest_magnitude(const float (&products)[count]) {
  float largest[4] = {0.0f, 0.0f, 0.0f, 0.0f};  // apart: each waits for its predecessor
#pragma unroll
  for (int i = 0; i < count; ++i) {
    largest[i % 4] = fmaxf(largest[i % 4], fabsf(products[i]));
  }
  return fmaxf(fmaxf(largest[0], largest[1]), fmaxf(largest[2], largest[3]));
}

// visit(the warp's range as a constant), for products up to `largest`, which are taken for small ones if `small`.
template <class Visit>
__device__ __forceinline__ void with_cap_range(const HopperArguments& args, float largest, bool small,
                                               const Visit& visit) {
  if (__all_sync(~0u, small)) [[likely]] {
    visit(std::integral_constant<CapRange, CapRange::small>());
  } else if (__all_sync(~0u, largest <= args.medium_product)) {
    visit(std::integral_constant<CapRange, CapRange::medium>());
  } else {
    visit(std::integral_constant<CapRange, CapRange::any>());
  }
}

template <int count>
__device__ __forceinline__ void cap_scores(const HopperArguments& args, float (&scores)[count]) {
  const float largest = largest_magnitude(scores);
  with_cap_range(args, largest, largest <= args.small_product, [&](auto range) {
#pragma unroll
    for (int i = 0; i < count; ++i) {
      scores[i] = capped_alone<range()>(args, scores[i]);
    }
  });
}

// ---- ALiBi ----

// Adds - slope * |i + offset - j|, but for a part of it that is the same for a row's whole block: the softmax adds
// that (rest[i] for row i). On one side of the diagonal the distance has no bend, so one multiply-add does; a thread
// that may have keys of both sides adds everything here, and so do all where such a part may be coarse (TileSoftmax).
template <int count>
__device__ __forceinline__ void add_alibi(float slope, bool coarse, const HopperWork& work, int tile_row, int column,
                                          float (&scores)[count], float (&rest)[2]) {
  const float distance = static_cast<float>(work.row + tile_row + work.offset - column);  // of the first row and key
  const bool before = distance >= static_cast<float>(2 * count), behind = distance + 8.0f <= 0.0f;
  if ((before || behind) && !coarse) {
    const float growth = before ? slope : -slope;
    rest[0] = -growth * distance;
    rest[1] = -growth * (distance + 8.0f);
#pragma unroll
    for (int j = 0; j < count / 4; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        scores[4 * j + e] = fmaf(growth, static_cast<float>(8 * j + e % 2), scores[4 * j + e]);
      }
    }
    return;
  }
  rest[0] = rest[1] = 0.0f;
#pragma unroll
  for (int j = 0; j < count / 4; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float from_row = distance + static_cast<float>(8 * (e / 2) - 8 * j - e % 2);
      scores[4 * j + e] = fmaf(-slope, fabsf(from_row), scores[4 * j + e]);
    }
  }
}

template <int count>
__device__ __forceinline__ void multiply_scores(float unit, float (&scores)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) {
    scores[i] *= unit;
  }
}

// Products become scores, but for biases and masks.
template <int count>
__device__ __forceinline__ void scale_scores(const HopperArguments& args, float (&scores)[count]) {
  if (args.cap != 0.0f) {
    cap_scores(args, scores);
  } else if (args.multiply) {
    multiply_scores(args.unit, scores);
  }
}

// ---- Dropout ----

// Which of a thread's weights of a block are kept: of the two words one is for even groups of eight keys, one for odd.
// Column c of row r has byte 2 r + c, and there group j the highest bit but j / 2.
template <int count>
class KeptWeights {
 public:
  // One draw covers four keys, and two lanes of a quad share them: the even lane draws even groups, the odd one odd
  // groups, both rows of each, and hands over the half that the other needs. `together` pairs of draws are under way at
  // a time.
  template <int together>
  __device__ __forceinline__ void draw(const DropoutArguments& dropout, int batch, int head, int row, int first_key,
                                       int quad_lane) {
    static_assert(count % 8 == 0 && count <= 64);
    const bool odd = quad_lane & 1;
    const RowDraw rows[2] = {RowDraw::of(dropout.keys, row, head), RowDraw::of(dropout.keys, row + 8, head)};
    KeptBytes kept[2];
    int quad = first_key / 4 + (odd ? 2 : 0) + quad_lane / 2;
#pragma unroll
    for (int j = 0; j < count / 8; j += together) {
      Philox4x32::Counter draws[2 * together];
#pragma unroll
      for (int n = 0; n < together; ++n) {
        const QuadDraw keys = QuadDraw::of(dropout.keys, quad, head, batch);
        draws[2 * n] = keys.with(rows[0]);
        draws[2 * n + 1] = keys.with(rows[1]);
        quad += 4;
      }
      finish_draws(dropout, draws);
#pragma unroll
      for (int n = 0; n < 2 * together; ++n) {
        kept[n % 2].add(dropout, draws[n]);
      }
    }
    constexpr int low_halves = 0x5410, high_halves = 0x7632;
    const std::uint32_t bytes[2] = {kept[0].template bytes<count / 8>(dropout),
                                    kept[1].template bytes<count / 8>(dropout)};
    const std::uint32_t own = __byte_perm(bytes[0], bytes[1], odd ? high_halves : low_halves);
    const std::uint32_t other = __byte_perm(bytes[0], bytes[1], odd ? low_halves : high_halves);
    const std::uint32_t received = __shfl_xor_sync(~0u, other, 1);
    words_[0] = odd ? received : own;
    words_[1] = odd ? own : received;
  }

  // Ones in the halves of packed weights 2 x and 2 x + 1 that are kept.
  __device__ __forceinline__ std::uint32_t halves(int x) const {
    const std::uint32_t shifted = words_[x / 2 % 2] << (x / 4);
    return x % 2 == 0 ? ptx::signs_of_bytes<0, 1>(shifted) : ptx::signs_of_bytes<2, 3>(shifted);
  }

  __device__ __forceinline__ bool get(int element) const {
    return (words_[element / 4 % 2] >> (8 * (element % 4) + 7 - element / 8) & 1) != 0;
  }

 private:
  std::uint32_t words_[2];
};

}  // namespace headway::cuda
