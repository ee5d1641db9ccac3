// One modifier by itself, on the way from products to weights: softcap, ALiBi, a mask, a bias or dropout, each with the
// range rule. What every pair would pay for all the others (hopper_backward_weights.cuh) is left out, and what lies in
// memory is loaded a step ahead.
//
// A consumer calls, for each step (and where drops is set leaves out what is not `kept`):
//   load     ahead, if loads_ahead is set: issues loads, into the room of its WarpTile if stages is set
//   prepare  while products of queries and keys run: what is allowed, and everything else but the products
//   look     when they are there
//   weigh    of 16 queries: weights in place of products. Where caps is set they are packed too, since dS takes others
//            than dV
#pragma once

#include "engines/cuda/kernels/hopper_backward_allowed.cuh"
#include "engines/cuda/kernels/hopper_backward_weights.cuh"
#include "engines/cuda/kernels/hopper_guard.cuh"
#include "engines/cuda/ptx/copy_async.cuh"
#include "engines/cuda/ptx/warp_matrix.cuh"

namespace headway::cuda {

// A warp's part of a tile: its pairs, and where shared memory has room for 16 bits of each. That may be the place of
// the step's score gradients, until those are stored.
struct WarpTile {
  BackwardPairs pairs;  // this lane's
  std::uint32_t room;   // laid out as score gradients are
  int first_key;        // of the warp, counted in the tile
  int lane;

  // The chunk of 16 bytes that belongs to one of 16 rows, one of two halves and block k of 16 queries.
  __device__ __forceinline__ std::uint32_t chunk(int row, int k, int half) const {
    return score_chunk(room, first_key + row, k, half);
  }
};

// Without a modifier of its own.
template <class Half, int count, HopperBackwardVariant variant>
struct SingleModifier {
  static constexpr bool exists = false, loads_ahead = false, stages = false, caps = false, drops = false;
};

// What those have in common that need no more than this.
template <int count>
struct SingleBase {
  static constexpr bool exists = true, loads_ahead = true, stages = false, caps = false, drops = false;

  __device__ __forceinline__ void look(const HopperBackwardArguments&, const float (&)[count]) {}

 protected:
  // `cut`: the range rule forbids some pair of the tile.
  __device__ __forceinline__ static void begin_allowed(const BackwardPost& post, const BackwardPairs& pairs, bool cut,
                                                       AllowedPairs<count>& allowed) {
    allowed.set_all();
    if (cut) {
      allowed.keep_range(post.sequence, pairs);
    }
  }
};

// Products become tanh(product * scale / cap), which both the score and its slope are made of.
template <class Half, int count>
struct SingleModifier<Half, count, HopperBackwardVariant::capped> : SingleBase<count> {
  static constexpr bool loads_ahead = false, caps = true;

  __device__ __forceinline__ void prepare(const HopperBackwardArguments&, const BackwardPost& post,
                                          const WarpTile& tile, bool cut, AllowedPairs<count>& allowed) {
    this->begin_allowed(post, tile.pairs, cut, allowed);
  }

  // Which polynomial does for all of the warp's products, if one does.
  __device__ __forceinline__ void look(const HopperBackwardArguments& args, const float (&products)[count]) {
    small = __all_sync(~0u, largest_magnitude(products) <= args.small_product);
  }

  template <int some>
  __device__ __forceinline__ void cap(const HopperBackwardArguments& args, float (&products)[some]) const {
    if (small) [[likely]] {
#pragma unroll
      for (int e = 0; e < some; ++e) {
        products[e] = capped<CapRange::small>(args, products[e]);
      }
    } else {
#pragma unroll
      for (int e = 0; e < some; ++e) {
        products[e] = capped_alone<CapRange::any>(args, products[e]);
      }
    }
  }

  // dS takes the weight times the cap's slope.
  __device__ __forceinline__ void weigh(const HopperBackwardArguments& args, const WarpTile&, const float4& lse, int k,
                                        float (&shares)[count], std::uint32_t (&packed)[count / 2],
                                        AllowedPairs<count>&) {
    float weights[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      float& share = shares[8 * k + e];
      weights[e] = ptx::exp2_fast(fmaf(share, args.weight_unit, -of_column(lse, e)));
      share = weights[e] * fmaf(-share, share, 1.0f);
    }
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      packed[4 * k + x] = ptx::packed_pair<Half>(weights[2 * x], weights[2 * x + 1]);
    }
  }

 private:
  bool small;
};

template <class Half, int count>
struct SingleModifier<Half, count, HopperBackwardVariant::sloped> : SingleBase<count> {
  __device__ __forceinline__ void load(const HopperBackwardArguments& args, const BackwardPost&, const WarpTile& tile) {
    alibi = load_per_head(args.slopes, tile.pairs.head) * -log2_e;
  }

  __device__ __forceinline__ void prepare(const HopperBackwardArguments&, const BackwardPost& post,
                                          const WarpTile& tile, bool cut, AllowedPairs<count>& allowed) {
    distance = static_cast<float>(tile.pairs.first_key - tile.pairs.first_query - post.sequence.offset);
    this->begin_allowed(post, tile.pairs, cut, allowed);
  }

  __device__ __forceinline__ void weigh(const HopperBackwardArguments& args, const WarpTile&, const float4& lse, int k,
                                        float (&scores)[count], std::uint32_t (&)[count / 2], AllowedPairs<count>&) {
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const int element = 8 * k + e;
      const auto apart = static_cast<float>(e / 2 % 2 * 8 - 8 * (element / 4) - e % 2);
      const float score = fmaf(scores[element], args.weight_unit, -of_column(lse, e));
      scores[element] = ptx::exp2_fast(fmaf(alibi, fabsf(distance + apart), score));
    }
  }

 private:
  float alibi;     // times log2(e), and negative
  float distance;  // from the thread's first query to its first key
};

template <class Half, int count>
struct SingleModifier<Half, count, HopperBackwardVariant::dropped> : SingleBase<count> {
  static constexpr bool drops = true;

  // Draws: beside products they would take longer than ahead of them.
  __device__ __forceinline__ void load(const HopperBackwardArguments& args, const BackwardPost&, const WarpTile& tile) {
    draw_kept<4>(args.dropout, tile.pairs, tile.lane, kept);
  }

  __device__ __forceinline__ void prepare(const HopperBackwardArguments&, const BackwardPost& post,
                                          const WarpTile& tile, bool cut, AllowedPairs<count>& allowed) {
    this->begin_allowed(post, tile.pairs, cut, allowed);
  }

  __device__ __forceinline__ void weigh(const HopperBackwardArguments& args, const WarpTile&, const float4& lse, int k,
                                        float (&scores)[count], std::uint32_t (&)[count / 2], AllowedPairs<count>&) {
#pragma unroll
    for (int e = 8 * k; e < 8 * k + 8; ++e) {
      scores[e] = ptx::exp2_fast(fmaf(scores[e], args.weight_unit, -of_column(lse, e % 8)));
    }
  }

  AllowedPairs<count> kept;
};

// Masks and biases make a weight by the same steps as hopper_backward_weights.cuh: a pair that is forbidden by one or
// by the other leaves the same bits.
__device__ __forceinline__ float weight_of(float score, float lse) { return ptx::exp2_fast((score - lse) * log2_e); }

template <class Half, int count>
struct SingleModifier<Half, count, HopperBackwardVariant::bit_masked> : SingleBase<count> {
  __device__ __forceinline__ void load(const HopperBackwardArguments& args, const BackwardPost&, const WarpTile& tile) {
    load_mask_pieces(args, tile.pairs, tile.lane, pieces);
  }

  __device__ __forceinline__ void prepare(const HopperBackwardArguments& args, const BackwardPost& post,
                                          const WarpTile& tile, bool cut, AllowedPairs<count>& allowed) {
    this->begin_allowed(post, tile.pairs, cut, allowed);
    forbid_by_pieces(pieces.bits(args), tile.lane, allowed);
  }

  __device__ __forceinline__ void weigh(const HopperBackwardArguments& args, const WarpTile&, const float4& lse, int k,
                                        float (&scores)[count], std::uint32_t (&)[count / 2], AllowedPairs<count>&) {
#pragma unroll
    for (int e = 8 * k; e < 8 * k + 8; ++e) {
      scores[e] = weight_of(scores[e] * args.unit, of_column(lse, e % 8));
    }
  }

 private:
  MaskPieces pieces;
};

// Of the type of the inputs. It waits in shared memory as chunks of eight keys of one query, those of each 16 queries
// where score gradients of the same queries may be.
template <class Half, int count>
struct SingleModifier<Half, count, HopperBackwardVariant::biased> : SingleBase<count> {
  static constexpr bool stages = true;

  __device__ __forceinline__ void load(const HopperBackwardArguments& args, const BackwardPost&, const WarpTile& tile) {
    const int query = tile.lane / 2, half = tile.lane & 1;
    const Half* from = warp_corner<Half>(args.bias, tile.pairs, tile.lane) + query * args.bias.query + 8 * half;
    if (args.bias_in_chunks && has_all(args, tile.pairs, tile.lane, 2 * count)) {
#pragma unroll
      for (int k = 0; k < count / 8; ++k) {
        ptx::copy_16(tile.chunk(query, k, half), from, 16);
        from += 16 * args.bias.query;
      }
      ptx::commit_copies();
      return;
    }
    const MatrixMemory memory(args.bias, args.bias_end);
    const int queries = static_cast<int>(args.query_len) - (tile.pairs.first_query - 2 * (tile.lane & 3) + query);
    BiasPiece pieces[count / 8];
#pragma unroll
    for (int k = 0; k < count / 8; ++k) {
      pieces[k].load(memory, from, 16 * k < queries);
      from += 16 * args.bias.query;
    }
#pragma unroll
    for (int k = 0; k < count / 8; ++k) {
      ptx::store_chunk(tile.chunk(query, k, half), pieces[k].halves());
    }
  }

  __device__ __forceinline__ void prepare(const HopperBackwardArguments&, const BackwardPost& post,
                                          const WarpTile& tile, bool cut, AllowedPairs<count>& allowed) {
    this->begin_allowed(post, tile.pairs, cut, allowed);
    allowed.all = false;  // -inf may be anywhere
    ptx::wait_for_copies<0>();
    __syncwarp();
  }

  __device__ __forceinline__ void weigh(const HopperBackwardArguments& args, const WarpTile& tile, const float4& lse,
                                        int k, float (&scores)[count], std::uint32_t (&)[count / 2],
                                        AllowedPairs<count>& allowed) {
    std::uint32_t words[4];  // of 8 queries each, and of keys 0, 0, 8, 8 on
    ptx::load_matrices_transposed(tile.chunk(tile.lane & 15, k, tile.lane / 16), words);
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      const int e = 8 * k + 2 * x;
      const std::uint32_t both = words[x % 2 * 2 + x / 2];
      allowed.keep_halves(e / 2, ptx::not_equal_halves<Half>(both, minus_infinities));
      const float2 bias = ptx::unpacked_pair<Half>(both);
      scores[e] = weight_of(scores[e] * args.unit + bias.x, of_column(lse, 2 * x));
      scores[e + 1] = weight_of(scores[e + 1] * args.unit + bias.y, of_column(lse, 2 * x + 1));
    }
  }

 private:
  static constexpr std::uint32_t minus_infinities = exponent_bits<Half> | 0x80008000u;
};

}  // namespace headway::cuda
