// What the Hopper backward takes: its variants, the shape of their tiles, and a call's arguments.
#pragma once

#include "engines/cuda/kernels/hopper_arguments.h"
#include "engines/cuda/kernels/hopper_backward_order.h"

namespace headway::cuda {

// Which work a kernel is compiled for. All do the range rule; up to head dim 128 a modifier that comes by itself has a
// kernel of its own.
enum class HopperBackwardVariant : std::uint8_t {
  ranged,      // each row has its range of keys
  capped,      // and scores a softcap
  sloped,      // or ALiBi
  dropped,     // or dropout takes weights
  spanned,     // or rows see their spans alone: a walk skips tiles of which those leave nothing
  modified,    // or any of softcap, ALiBi and dropout together
  bit_masked,  // a mask [B,H,Sq,Sk] whose neighbouring keys are neighbours in memory
  biased,      // a bias [B,H,Sq,Sk] of the inputs' type, the same
  masked,      // any mask or bias, an end of its own for each row, and all of the above
};

// Any pair may be forbidden.
HEADWAY_HOST_DEVICE constexpr bool has_matrix(HopperBackwardVariant variant) {
  using enum HopperBackwardVariant;
  return variant == bit_masked || variant == biased || variant == masked;
}

struct HopperBackwardTile {
  int head_dim;                        // of Q, K and V alike, in whole panels of 64
  int queries;                         // of a query tile
  bool keeps_score_gradients = false;  // dK takes dS from the registers that made it: where there is room
  // dQ of a step goes out at its end; else with the next step's fence, which saves one.
  bool hands_over_at_once = false;
  int keys = backward_keys;  // of a key tile

  static constexpr int consumers = 2;  // warpgroups of 64 keys
  static constexpr int threads = 128 * (consumers + 1);
  static constexpr int producer_registers = 40, consumer_registers = 232;
  static constexpr int stages = 2;

  HEADWAY_HOST_DEVICE constexpr std::uint8_t row_bits() const { return queries == 64 ? 6 : 7; }
  HEADWAY_HOST_DEVICE constexpr std::uint8_t key_bits() const { return keys == 64 ? 6 : 7; }
  HEADWAY_HOST_DEVICE constexpr int panels() const { return head_dim / 64; }
  HEADWAY_HOST_DEVICE constexpr std::uint32_t key_bytes() const { return keys * head_dim * 2; }
  HEADWAY_HOST_DEVICE constexpr std::uint32_t query_bytes() const { return queries * head_dim * 2; }
  HEADWAY_HOST_DEVICE constexpr std::uint32_t score_bytes() const { return keys * queries * 2; }
  HEADWAY_HOST_DEVICE constexpr int gradient_numbers() const { return queries * head_dim; }
  // dQ of a tile is split between the consumers: by columns where there are but 64 queries, else by queries.
  HEADWAY_HOST_DEVICE constexpr bool split_by_columns() const { return queries == 64; }
  HEADWAY_HOST_DEVICE constexpr int split_columns() const { return split_by_columns() ? head_dim / 2 : head_dim; }
};

// Of products over so many columns: 64, 96, 128 or 256.
HEADWAY_HOST_DEVICE constexpr HopperBackwardTile hopper_backward_tile(int columns, HopperBackwardVariant variant) {
  const int head_dim = columns == 96 ? 128 : columns;
  if (head_dim == 256) {
    return {.head_dim = 256, .queries = 64, .keys = 64};
  }
  // All that read a matrix have the same tiles: a pair that a mask or a bias forbids leaves the same bits.
  // Spans know tiles of 64 rows.
  const int queries = head_dim == 64 && !has_matrix(variant) && variant != HopperBackwardVariant::spanned ? 128 : 64;
  const bool general = variant == HopperBackwardVariant::modified || variant == HopperBackwardVariant::masked;
  const bool room = head_dim == 64 ? queries == 64 : !general;
  return {head_dim, queries, room, head_dim == 128};
}

// Where a row's lse and delta lie in their tile: the four rows of 16 that a thread has as columns are neighbours.
HEADWAY_HOST_DEVICE constexpr int place_of_row(int row) {
  return (row & ~15) + (row & 7) / 2 * 4 + (row & 15) / 8 * 2 + (row & 1);
}

struct HopperBackwardArguments : HopperArguments {
  CUtensorMap grad_out_map;  // boxes of a query tile's rows, as the query's
  MapSteps grad_out_steps;
  Rows grad_out;
  Rows query_gradient, key_gradient, value_gradient;  // without data: not asked for

  // Where there are few kv heads, the query heads of each are shared out to several teams, and the query tiles of those
  // to `query_parts` teams each. What a team finds of dK and dV is one part, and parts are added up in their order
  // (hopper_backward_parts.cu). For the kernel a team is a kv head.
  int parts = 1, query_parts = 1;
  float *key_parts = nullptr, *value_parts = nullptr;  // [B, Hkv * parts, Sk, D]

  TeamShape shape;
  int left, right;    // of the range rule, cut to 2^29
  int members;        // of the largest team; head dims above 128: key tiles of a head
  int chunk;          // members that run at once
  bool spread;        // the first chunks of all teams come first, then the second ones, ...
  int items;          // members of all teams, or all key tiles
  float weight_unit;  // weights are 2^(weight_unit * product - lse): scale * log2(e)
  float lse_unit;     // what lse is kept times: log2(e); 1 where scores are natural
  float inverse_cap;  // 0: no softcap
  bool own_ends;      // valid_lens [B,Sq]
  // Neighbouring keys are neighbours there, and pieces of 16 bytes of a mask or of a bias, or two elements of 16 bits
  // of a bias, can be read at once.
  bool mask_in_pieces, bias_in_chunks, bias_in_pairs;
  // Where a matrix ends whose neighbouring keys are neighbours (hopper_backward_pieces.cuh); null: they are not.
  const void *mask_end, *bias_end;

  std::int64_t tiles_a_head;  // query tiles of a head; packed: of all its sequences
  // For each query tile of each head, in the order of query_tile_index.
  float *tile_lse, *tile_delta;  // of its rows; lse +inf where a row has no key
  float* tile_sums;              // dQ: f32, as the threads that made it hold it; null where it is not kept
  int* tile_turns;               // contributions so far
  int* tile_poisoned;            // grad_out holds something that is not finite
  int* next_item;
  // All keys are in one tile that every query tile sees, so dQ of a step is whole and leaves as rows: boxes of a query
  // tile's rows.
  bool whole_query_gradients;
  CUtensorMap query_gradient_map;
  MapSteps query_gradient_steps;
  CoarseRows coarse;  // a tile of rows is a query tile

  // Where the arrays above have tile 0 of a sequence. Packed sequences begin anywhere, so each may need one tile more
  // than its rows fill.
  HEADWAY_HOST_DEVICE std::int64_t first_tile(std::int64_t b, std::int64_t query_begin, int tile_rows) const {
    return cu_seqlens_q.data != nullptr ? query_begin / tile_rows + b : b * heads * tiles_a_head;
  }
};

}  // namespace headway::cuda
