// The shared memory of the Hopper backward: a tile of keys and values, two stages of queries and output gradients, the
// score gradients and query gradients of two steps, and what the producer tells the others.
#pragma once

#include "engines/cuda/kernels/hopper_backward_arguments.h"
#include "engines/cuda/kernels/hopper_shared.cuh"
#include "engines/cuda/ptx/warp.cuh"

namespace headway::cuda {

// One key tile, and the walk that its gradients take.
struct BackwardPost {
  BackwardSequence sequence;
  BackwardChunk chunk;
  bool finished;  // there is no more work
  int key_tile;
  int steps;  // 0: nobody sees the keys, whose gradients are 0
  int batch, kv_head;
  std::uint32_t keys_parity;  // of the barrier of its keys
  int key_begin;              // where the sequence lies on the S axis
  int key_count;
  int first_tile;  // of the sequence's query tiles
};

struct alignas(16) BackwardStep {
  int head;   // query head
  int row;    // first query, counted inside its sequence
  int flags;  // of the kinds below
  int tile;   // where the arrays of query tiles have it

  static constexpr int edge = 1;             // some pair is forbidden
  static constexpr int first = 2, last = 4;  // of its key tile
  static constexpr int stop = 8;             // no step: there are no more
  static constexpr int cut = 16;             // the range rule forbids some pair
};

// More than the steps between the newest that is loaded and the oldest that is not yet added: three.
inline constexpr int backward_turns = 4;

// Where and when a step's query gradients are added: the query tile's number, and its rank among the contributions.
struct BackwardTurn {
  int tile, rank;
};

template <int columns, HopperBackwardVariant variant>
struct alignas(tile_alignment) HopperBackwardMemory {
  static constexpr HopperBackwardTile tile = hopper_backward_tile(columns, variant);
  static constexpr int stages = HopperBackwardTile::stages;
  static constexpr bool edges_everywhere = has_matrix(variant);
  static constexpr bool sums_over_keys = true;  // dQ
  // Where there is no room for a bias, it waits in the place of the score gradients.
  static constexpr bool has_bias = variant == HopperBackwardVariant::biased && columns == 64;

  std::uint8_t keys[tile.key_bytes()];
  std::uint8_t values[tile.key_bytes()];
  std::uint8_t queries[stages][tile.query_bytes()];
  std::uint8_t grad_outs[stages][tile.query_bytes()];
  std::uint8_t score_gradients[stages][tile.score_bytes()];
  float query_gradients[stages][tile.gradient_numbers()];
  float lse[stages][tile.queries];
  float delta[stages][tile.queries];
  alignas(16) std::uint8_t bias[stages][has_bias ? tile.score_bytes() : 16];
  std::uint64_t keys_full, keys_empty;
  std::uint64_t queries_full[stages], queries_empty[stages];
  std::uint64_t grad_outs_full[stages], grad_outs_empty[stages];
  std::uint64_t grad_outs_checked[stages], queries_checked[stages];  // at edges; keys with the queries
  std::uint64_t gradients_full[stages], gradients_empty[stages];
  std::uint64_t turns_full[backward_turns];
  std::uint64_t post_full[2], post_empty[2];
  BackwardStep steps[stages];
  BackwardTurn turns[backward_turns];
  int starts[largest_chunk];  // of the walks that the producer's meets
  BackwardPost posts[2];
};

// The address of a field in shared memory, or of one in an array of barriers or tiles; from a base that is kept, since
// to find it takes a slow instruction.
struct BackwardAddresses {
  std::uint32_t base;

  template <class Memory>
  __device__ __forceinline__ explicit BackwardAddresses(const Memory& memory)
      : base(ptx::kept(ptx::shared_address(&memory))) {}

  __device__ __forceinline__ std::uint32_t of(std::size_t offset, std::uint32_t index = 0,
                                              std::uint32_t bytes = sizeof(std::uint64_t)) const {
    return base + static_cast<std::uint32_t>(offset) + index * bytes;
  }
};

// Where a tile of score gradients [keys][queries] has a key's eight queries: half of block k of 16.
__device__ __forceinline__ std::uint32_t score_chunk(std::uint32_t tile, int key, int k, int half) {
  return tile + key * 128 + k / 4 * (backward_keys * 128) + (((2 * (k % 4) + half) ^ (key & 7)) << 4);
}

using StagePosition = RingPosition<HopperBackwardTile::stages>;
using TurnPosition = RingPosition<backward_turns>;

}  // namespace headway::cuda
