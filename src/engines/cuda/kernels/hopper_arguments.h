// What the Hopper forward kernels take: variants, the shape of their tiles, and a call's arguments.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "core/host_device.h"
#include "engines/cuda/arguments.h"

namespace headway::cuda {

// Which work a kernel is compiled for; each can do what the ones before it can.
enum class HopperVariant : std::uint8_t {
  plain,         // every row sees all keys
  plain_long,    // the same in longer key blocks, for long sequences
  plain_short,   // the same in shorter key blocks and higher tiles, for short sequences
  ranged,        // each row has its range of keys; sinks
  ranged_short,  // the same in the blocks of plain_short
  spanned,       // ranged, and of its range a row sees its spans alone
  split,         // ranged, but a tile has one part of the keys, and what it finds is merged with the others'
  modified,      // and scores change on the way: softcap, ALiBi, a scale that is not positive
  masked,        // and a mask or bias [B,H,Sq,Sk] is read
  dropped,       // and weights are dropped; the mask or bias may be missing
};

HEADWAY_HOST_DEVICE constexpr bool is_plain(HopperVariant variant) {
  return variant == HopperVariant::plain || variant == HopperVariant::plain_long ||
         variant == HopperVariant::plain_short;
}

// Whether it can read a mask or bias.
HEADWAY_HOST_DEVICE constexpr bool is_masked(HopperVariant variant) {
  return variant == HopperVariant::masked || variant == HopperVariant::dropped;
}

// When a warpgroup lets the next one issue its products: right after its own are issued, or when its scores are there.
// Four of them need no order.
enum class HandOver : std::uint8_t { issued, scored, never };

struct HopperTile {
  int head_dim;     // of Q, K and V alike, padded
  int consumers;    // warpgroups of 64 query rows
  int keys;         // of a block
  int slots;        // key and value blocks in shared memory
  int query_slots;  // query tiles in shared memory
  bool query_in_registers;
  bool pinned_maximum;  // the row maxima are taken before waiting for the previous block's output
  HandOver hand_over;
  int producer_registers;
  int consumer_registers;

  HEADWAY_HOST_DEVICE constexpr int rows() const { return 64 * consumers; }
  HEADWAY_HOST_DEVICE constexpr int threads() const { return 128 * (consumers + 1); }
  HEADWAY_HOST_DEVICE constexpr int panels() const { return head_dim / 64; }
  HEADWAY_HOST_DEVICE constexpr std::uint32_t query_bytes() const { return rows() * head_dim * 2; }
  HEADWAY_HOST_DEVICE constexpr std::uint32_t block_bytes() const { return keys * head_dim * 2; }
  // A consumer's 64 rows of a mask or bias at one block of keys (hopper_units.cuh), for elements of this size.
  HEADWAY_HOST_DEVICE constexpr std::uint32_t unit_bytes(int element_bytes) const { return 64 * keys * element_bytes; }
};

HEADWAY_HOST_DEVICE constexpr HopperTile hopper_tile(int head_dim, HopperVariant variant) {
  using enum HopperVariant;
  if (head_dim == 64) {
    if (variant == plain_short || variant == ranged_short) {
      return {64, 4, 64, 10, 2, false, true, HandOver::never, 32, 112};
    }
    if (variant == split) {  // few rows: lower tiles are fuller
      return {64, 2, 128, 6, 2, false, true, HandOver::scored, 40, 232};
    }
    return {64, 3, 128, 6, is_masked(variant) ? 1 : 2, false, true, HandOver::scored, 32, 160};
  }
  const int producer = is_plain(variant) ? 24 : 40;
  const int consumer = is_plain(variant) ? 240 : 232;
  if (head_dim == 128) {
    return variant == plain_long
               ? HopperTile{128, 2, 176, 4, 1, false, true, HandOver::scored, producer, consumer}
               : HopperTile{128,      2,       128, is_masked(variant) ? 4 : 6, 1, true, true, HandOver::issued,
                            producer, consumer};
  }
  // Spans know tiles of 64 keys.
  const bool in_tiles = is_masked(variant) || variant == spanned;
  if (head_dim == 192) {
    return {192, 2, in_tiles ? 64 : 96, 4, 1, false, true, HandOver::scored, producer, consumer};
  }
  return in_tiles ? HopperTile{256, 2, 64, 4, 1, false, true, HandOver::scored, producer, consumer}
                  : HopperTile{256, 2, 80, 4, 1, false, false, HandOver::scored, producer, consumer};
}

// Where a tensor map has one head or batch item for all of them it is not stepped over: 0, else 1.
struct MapSteps {
  int head = 1, batch = 1;
};

// Who reads blocks of a bias, or else of a mask: see kernels/hopper_units.cuh.
enum class UnitSource : std::uint8_t {
  boxes,     // the copy engine, asked by the producer
  rows,      // the guard, by copies of words: rows that do not suit the copy engine
  elements,  // the guard, element by element: neighbouring keys are no neighbours in memory
};

// How they come into shared memory.
struct UnitArguments {
  CUtensorMap map;  // boxes of 64 rows, or of 1, and at most 128 bytes
  MapSteps steps;
  UnitSource source;
  bool prepared;            // the guard has something to do before they are used
  bool one_row;             // every query row has the same one (not of elements)
  int each;                 // units that a consumer has room for: 4, 2 or 1
  std::uint32_t bytes;      // of a unit's place
  std::uint32_t box_bytes;  // that a box fills
  int boxes;                // of a unit
  int box_columns;
  const void* end;  // of rows: where the matrix ends in memory
};

// Keys that are split over blocks, and where those leave what they find of a row; merge_splits.cuh joins it.
struct SplitArguments {
  std::int64_t splits;
  std::int64_t rows;  // of a kv head: all queries of its group of heads, in whole tiles
  float* sums;        // [B, Hkv, splits, rows, sum_width(Dv)], relative to the highest score of the split
  float* statistics;  // [B, Hkv, splits, rows, 2]: highest score, sum of weights
  float unit;         // what makes such a score natural
};

// The floats of a row of sums: whole chunks of 16 bytes.
HEADWAY_HOST_DEVICE constexpr std::int64_t sum_width(std::int64_t value_dim) { return (value_dim + 3) / 4 * 4; }

struct HopperArguments : ForwardArguments {
  CUtensorMap query_map, key_map, value_map;  // boxes of 64 columns: a query tile's or a key block's rows
  MapSteps query_steps, key_steps, value_steps;
  int box_rows;  // of pages: rows of a box of keys or values, all in one page
  UnitArguments units;
  SplitArguments split;
  float unit;           // scale, or scale / softcap
  bool multiply;        // products become scores by unit; else softmax_unit holds it
  float softmax_unit;   // log2(e), times scale unless it has been applied; 1 for scores in units of log2
  float coarse_score;   // 2^24 / softmax_unit: see TileSoftmax
  float coarse_slope;   // from here on a slope's terms may pass that
  float slope_factor;   // what makes a natural number a score: 1, 1 / scale where scores are still products, or log2(e)
  float natural_scale;  // what makes a score natural
  float cap;            // softcap, 0: none; in the scores' units
  bool folds_cap;       // the softmax's exponents can apply the cap
  float lowest_reference;  // from which on a row's reference may stay while products are at most small_product
  // cap * tanh(unit * product) is product * (a polynomial in product^2): a short one up to small_product, a
  // longer one up to medium_product.
  float small_product, medium_product;
  float small_factors[3], medium_factors[6];
  float kept;       // 1 / (1 - p) of dropout
  bool never;       // false, which the compiler does not know: a branch on it keeps instructions behind it
  int query_tiles;  // of a head, and of each split
  int head_group;   // heads (of all batch items) whose tiles run together
  int tiles;
  int* next_tile;  // counts from 0; null: each block takes every so many

  // Keys that a mask or bias forbids may be anywhere.
  HEADWAY_HOST_DEVICE bool masks_anywhere() const { return mask.data != nullptr || bias.data != nullptr; }
};

}  // namespace headway::cuda
