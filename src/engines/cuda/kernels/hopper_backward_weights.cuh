// Products of queries and keys become weights: what a consumer of the Hopper backward does between its products. Rows
// are keys and columns queries, as in hopper_backward_pairs.cuh.
#pragma once

#include "engines/cuda/kernels/hopper_backward_allowed.cuh"
#include "engines/cuda/kernels/hopper_modifiers.cuh"

namespace headway::cuda {

// lse or delta of the columns of elements 8 k to 8 k + 7, from a tile of them in shared memory (place_of_row).
__device__ __forceinline__ float4 four_columns(std::uint32_t tile, int lane, int k) {
  return ptx::load_four(tile + (16 * k + 4 * (lane & 3)) * 4);
}

__device__ __forceinline__ float of_column(const float4& four, int element) {
  return element / 4 == 0 ? (element % 2 == 0 ? four.x : four.y) : (element % 2 == 0 ? four.z : four.w);
}

// Products of pairs that the range rule forbids become such that their weights are 0. No product would do for a row
// whose lse is NaN: there the allowed ones become NaN, and lse is raised to `lowest_lse`. lse_of(k) is asked for 16
// rows.
inline constexpr float lowest_lse = -3.4e38f;

template <int count, class LseOf>
__device__ __forceinline__ void forbid_products(const HopperBackwardArguments& args, const BackwardSequence& sequence,
                                                const BackwardPairs& own, const LseOf& lse_of,
                                                float (&products)[count]) {
#pragma unroll
  for (int k = 0; k < count / 8; ++k) {
    const float4 lse = lse_of(k);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const float row = of_column(lse, e);
      products[8 * k + e] = row == row ? products[8 * k + e] : row;
    }
  }
  const float forbidden_product = args.weight_unit > 0.0f ? -INFINITY : INFINITY;
  for_range<count>(sequence, own,
                   [&](int e, bool forbidden) { products[e] = forbidden ? forbidden_product : products[e]; });
}

// Products of 16 queries become weights. `lowest` is what lse is raised to where it is NaN; NaN leaves it as it is.
template <int count>
__device__ __forceinline__ void make_weights(const HopperBackwardArguments& args, const float4& lse, float lowest,
                                             int k, float (&scores)[count]) {
#pragma unroll
  for (int e = 8 * k; e < 8 * k + 8; ++e) {
    scores[e] = ptx::exp2_fast(fmaf(scores[e], args.weight_unit, -fmaxf(of_column(lse, e % 8), lowest)));
  }
}

template <class Half, int count>
__device__ __forceinline__ void pack_weights(int k, const float (&weights)[count], std::uint32_t (&packed)[count / 2]) {
#pragma unroll
  for (int x = 4 * k; x < 4 * k + 4; ++x) {
    packed[x] = ptx::packed_pair<Half>(weights[2 * x], weights[2 * x + 1]);
  }
}

// A weight from a score with its bias: ALiBi over a distance, and the exponential.
__device__ __forceinline__ float modified_weight(float score, float alibi, float distance, float lse) {
  return ptx::exp2_fast((fmaf(alibi, fabsf(distance), score) - lse) * log2_e);
}

__device__ __forceinline__ float alibi_of(const HopperBackwardArguments& args, int head) {
  return args.slopes.data != nullptr ? -load_per_head(args.slopes, head) : 0.0f;
}

// How a score moves with its product, for a score that the cap lets through: 1 without one.
__device__ __forceinline__ float cap_slope(const HopperBackwardArguments& args, float score) {
  const float share = score * args.inverse_cap;
  return fmaf(-share, share, 1.0f);
}

// What changes scores of a tile on their way to weights.
template <int count, int biases>
struct ScoreModifiers {
  float alibi;
  float distance;  // from the thread's first query to its first key
  bool edge;       // some pair is forbidden
  PairBits<count> allowed;
  AllowedPairs<count> kept;
  float bias[biases];
};

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
      if (args.mask_end != nullptr) {
        MaskPieces pieces;
        load_mask_pieces(args, own, lane, pieces);
        forbid_by_pieces(pieces.bits(args), lane, allowed);
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

// Everything about a tile's pairs but their products: what masks and the like say, and what dropout keeps.
template <bool masked, int count, int biases>
__device__ __forceinline__ void find_modifiers(const HopperBackwardArguments& args, const BackwardPost& post,
                                               const BackwardPairs& own, bool edge, int lane,
                                               ScoreModifiers<count, biases>& modifiers) {
  modifiers.alibi = alibi_of(args, own.head);
  modifiers.distance = static_cast<float>(own.first_key - own.first_query - post.sequence.offset);
  modifiers.edge = edge;
  find_allowed<masked>(args, post, own, edge, lane, modifiers.allowed, modifiers.bias);
  if (args.dropout.active) {
    draw_kept<2>(args.dropout, own, lane, modifiers.kept);
  }
}

// Does something to one part of a tile's scores; with all at once it would take more registers than there are.
template <int part_count, int count, class Change>
__device__ __forceinline__ void in_part(int part, float (&scores)[count], const Change& change) {
  float own[part_count];
#pragma unroll
  for (int e = 0; e < part_count; ++e) {
    own[e] = scores[part * part_count + e];
  }
  change(own);
#pragma unroll
  for (int e = 0; e < part_count; ++e) {
    scores[part * part_count + e] = own[e];
  }
}

// Scores of 16 queries become weights: dropout is applied to what dV takes (packed), softcap's slope to what dS takes.
template <class Half, int count, int biases>
__device__ __forceinline__ void make_modified_weights(const HopperBackwardArguments& args,
                                                      const ScoreModifiers<count, biases>& modifiers, const float4& lse,
                                                      int k, float (&scores)[count],
                                                      std::uint32_t (&packed)[count / 2]) {
  float taken[8];
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    const int element = 8 * k + e;
    float& score = scores[element];
    const float slope = cap_slope(args, score);
    const auto apart = static_cast<float>(e / 2 % 2 * 8 - 8 * (element / 4) - e % 2);
    if constexpr (biases == count) {
      score += modifiers.bias[element];
    }
    taken[e] = modified_weight(score, modifiers.alibi, modifiers.distance + apart, of_column(lse, e));
    const bool forbidden = modifiers.edge && !modifiers.allowed.get(element);
    taken[e] = forbidden ? 0.0f : taken[e];
    score = forbidden ? 0.0f : taken[e] * slope;
    taken[e] = args.dropout.active ? modifiers.kept.or_zero(element, taken[e]) : taken[e];
  }
#pragma unroll
  for (int x = 0; x < 4; ++x) {
    packed[4 * k + x] = ptx::packed_pair<Half>(taken[2 * x], taken[2 * x + 1]);
  }
}

}  // namespace headway::cuda
