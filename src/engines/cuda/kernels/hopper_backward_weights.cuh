// Products of queries and keys become weights: what a consumer of the Hopper backward does between its products. Rows
// are keys and columns queries, as in hopper_backward_pairs.cuh.
#pragma once

#include "engines/cuda/kernels/hopper_backward_pairs.cuh"
#include "engines/cuda/kernels/hopper_modifiers.cuh"

namespace headway::cuda {

// lse or delta of the columns of elements 8 k to 8 k + 7, from a tile of them in shared memory (place_of_row).
__device__ __forceinline__ float4 four_columns(std::uint32_t tile, int lane, int k) {
  return ptx::load_four(tile + (16 * k + 4 * (lane & 3)) * 4);
}

__device__ __forceinline__ float of_column(const float4& four, int element) {
  return element / 4 == 0 ? (element % 2 == 0 ? four.x : four.y) : (element % 2 == 0 ? four.z : four.w);
}

// Which pairs are allowed, and their bias; nothing where the tile is no edge.
template <bool masked, int count>
__device__ __forceinline__ void find_allowed(const HopperBackwardArguments& args, const BackwardPost& post,
                                             const BackwardPairs& own, bool edge, int lane, PairBits<count>& allowed,
                                             float (&bias)[masked ? count : 1]) {
  if (!edge) {
    return;
  }
  allowed.set_all();
  for_range<count>(post.sequence, own, [&](int e, bool forbidden) { allowed.clear(e, forbidden); });
  if constexpr (masked) {
    const bool whole = has_all(args, own, lane, 2 * count);
    if (args.own_ends) {
      forbid_by_ends(args, own, post.sequence.real_queries, post.key_count, allowed);
    }
    if (args.mask.data != nullptr) {
      if (args.mask_in_pieces && whole) {
        forbid_by_pieces(args.mask, own, lane, allowed);
      } else {
        forbid_by_mask(args.mask, own, allowed);
      }
    }
    if (args.bias.data == nullptr) {
#pragma unroll
      for (int e = 0; e < count; ++e) {
        bias[e] = 0.0f;
      }
    } else if (!args.bias_in_pairs || !whole) {
      load_bias(args.bias, own, allowed, bias);
    } else if (args.bias.dtype == DType::bf16) {
      load_bias_pairs<bfloat16>(args.bias, own, lane, allowed, bias);
    } else {
      load_bias_pairs<float16>(args.bias, own, lane, allowed, bias);
    }
  }
}

// Products become weights, 0 where forbidden: f32 for dS, packed for dV. own() and lse_of(k) are asked for when needed.
template <class Half, int count, class Own, class LseOf>
__device__ __forceinline__ void make_weights(const HopperBackwardArguments& args, const BackwardPost& post,
                                             const Own& own, bool edge, const LseOf& lse_of, float (&scores)[count],
                                             std::uint32_t (&packed)[count / 2]) {
#pragma unroll
  for (int k = 0; k < count / 8; ++k) {
    const float4 lse = lse_of(k);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      float& score = scores[8 * k + e];
      score = ptx::exp2_fast(fmaf(score, args.weight_unit, -of_column(lse, e)));
    }
  }
  if (edge) {
    for_range<count>(post.sequence, own(), [&](int e, bool forbidden) { scores[e] = forbidden ? 0.0f : scores[e]; });
  }
#pragma unroll
  for (int k = 0; k < count / 2; ++k) {
    packed[k] = ptx::packed_pair<Half>(scores[2 * k], scores[2 * k + 1]);
  }
}

// A weight from a score with its bias: ALiBi over a distance, and the exponential.
__device__ __forceinline__ float modified_weight(float score, float alibi, float distance, float lse) {
  return ptx::exp2_fast((fmaf(alibi, fabsf(distance), score) - lse) * log2_e);
}

// How a score moves with its product, for a score that the cap lets through: 1 without one.
__device__ __forceinline__ float cap_slope(const HopperBackwardArguments& args, float score) {
  const float share = score * args.inverse_cap;
  return fmaf(-share, share, 1.0f);
}

// The same with modifiers: dropout is applied to what dV takes, softcap's slope to what dS takes.
template <class Half, int count, int biases>
__device__ __forceinline__ void make_modified_weights(const HopperBackwardArguments& args, const BackwardPost& post,
                                                      const BackwardPairs& own, bool edge, std::uint32_t lse_tile,
                                                      const PairBits<count>& allowed, const PairBits<count>& kept,
                                                      const float (&bias)[biases], float (&scores)[count],
                                                      std::uint32_t (&packed)[count / 2]) {
  scale_scores(args, scores);
  const float alibi = args.slopes.data != nullptr ? -load_per_head(args.slopes, own.head) : 0.0f;
  const auto distance = static_cast<float>(own.first_key - own.first_query - post.sequence.offset);
#pragma unroll
  for (int k = 0; k < count / 8; ++k) {
    const float4 lse = four_columns(lse_tile, threadIdx.x, k);
    float taken[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const int element = 8 * k + e;
      float& score = scores[element];
      const float slope = cap_slope(args, score);
      const auto apart = static_cast<float>(e / 2 % 2 * 8 - 8 * (element / 4) - e % 2);
      if constexpr (biases == count) {
        score += bias[element];
      }
      const float weight = modified_weight(score, alibi, distance + apart, of_column(lse, e));
      const bool forbidden = edge && !allowed.get(element);
      taken[e] = forbidden || (args.dropout.active && !kept.get(element)) ? 0.0f : weight;
      score = forbidden ? 0.0f : weight * slope;
    }
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      packed[4 * k + x] = ptx::packed_pair<Half>(taken[2 * x], taken[2 * x + 1]);
    }
  }
}

}  // namespace headway::cuda
