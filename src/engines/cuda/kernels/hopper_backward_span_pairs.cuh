// Which pairs of a tile spans allow, at the edges of the Hopper backward's walks: as bits, by which products and score
// gradients are forbidden.
#pragma once

#include "engines/cuda/kernels/hopper_backward_allowed.cuh"
#include "engines/cuda/kernels/hopper_backward_weights.cuh"
#include "engines/cuda/spans.cuh"

namespace headway::cuda {

// The warp's 16 keys that two neighbouring queries see, as forbid_by_pieces takes them: each lane looks them up.
__device__ __forceinline__ std::uint32_t span_piece(const HopperBackwardArguments& args,
                                                    const BackwardSequence& sequence, const BackwardPairs& pairs,
                                                    int lane) {
  const int first_key = pairs.first_key - lane / 4, query = pairs.first_query - 2 * (lane & 3) + 2 * lane;
  const std::int64_t begin =
      args.cu_seqlens_q.data == nullptr ? 0 : length_at(args.cu_seqlens_q, pairs.batch, 0, args.total_queries);
  const auto spans_of = [&](int n) {  // rows past the last real one read its spans: ranges forbid them
    return RowSpans(args.spans, pairs.batch, pairs.head, begin + min(query + n, sequence.real_queries - 1));
  };
  const RowSpans lists[2] = {spans_of(0), spans_of(1)};
  std::uint32_t bits[2] = {0, 0};
  constexpr std::int64_t few = 4;
  if (args.spans.count <= few) {  // all are looked at, so that their loads do not wait for each other
    const auto count = static_cast<int>(args.spans.count);
    const auto bits_of = [&](const Span& span) {
      const int end = min(max(span.end - first_key, 0), 16), start = min(max(span.begin - first_key, 0), end);
      return (1u << end) - (1u << start);
    };
#pragma unroll 2
    for (int s = 0; s < count; ++s) {
      const Span own[2] = {lists[0][s], lists[1][s]};
      bits[0] |= bits_of(own[0]);
      bits[1] |= bits_of(own[1]);
    }
  } else {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      bits[n] = static_cast<std::uint32_t>(lists[n].word(first_key)) & 0xFFFFu;
    }
  }
  return bits[0] | bits[1] << 16;
}

__device__ __forceinline__ void find_allowed(const HopperBackwardArguments& args, const BackwardSequence& sequence,
                                             const BackwardPairs& pairs, int lane, AllowedPairs<32>& allowed) {
  allowed.set_all();
  allowed.keep_range(sequence, pairs);
  forbid_by_pieces(span_piece(args, sequence, pairs, lane), lane, allowed);
}

// As forbid_products of the range rule.
template <int count, class LseOf>
__device__ __forceinline__ void forbid_products(const HopperBackwardArguments& args, const AllowedPairs<count>& allowed,
                                                const LseOf& lse_of, float (&products)[count]) {
  const float forbidden_product = args.weight_unit > 0.0f ? -INFINITY : INFINITY;
#pragma unroll
  for (int k = 0; k < count / 8; ++k) {
    const float4 lse = lse_of(k);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const float row = of_column(lse, e);
      float& product = products[8 * k + e];
      product = !allowed.get(8 * k + e) ? forbidden_product : row == row ? product : row;
    }
  }
}

}  // namespace headway::cuda
