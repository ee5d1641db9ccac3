// The shared memory of the Hopper forward kernel: a query tile, a ring of key and value blocks, the barriers around
// them, and the work that the scheduler posts for the others.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "engines/cuda/kernels/hopper_arguments.h"
#include "engines/cuda/ptx/mbarrier.cuh"

namespace headway::cuda {

// The key blocks that a tile visits: first <= n < last, from the last to the first. Those outside [full_first,
// full_last) are edges: some row may not see all of their keys.
struct HopperBlocks {
  int first, last, full_first, full_last;

  __device__ __forceinline__ bool is_edge(int block) const { return block < full_first || block >= full_last; }

  // The same for the compiler to see that all lanes of the warp hold them: a product's operands must be uniform.
  __device__ __forceinline__ HopperBlocks uniform() const {
    const auto from_first_lane = [](int value) { return __shfl_sync(~0u, value, 0); };
    return {from_first_lane(first), from_first_lane(last), from_first_lane(full_first), from_first_lane(full_last)};
  }
};

// One tile of query rows of one head.
struct HopperWork {
  int batch, head, row;        // row: the first, counted inside its sequence
  int query_begin, key_begin;  // where the sequence lies on the S axes
  int stored_rows, real_rows;  // rows of the tile that exist, and those that are not padding
  int key_count, offset;
  int split;     // which part of the keys
  bool careful;  // the second time: see hopper_guard.cuh
  HopperBlocks blocks;
};

enum class PostKind : std::uint8_t {
  tile,
  pause,     // nothing; the tile before may have to be done again
  finished,  // there is no more work
};

// Two tiles are known: the current one and the next. To take more ahead would leave others without work at the end.
inline constexpr int post_slots = 2;

// What the scheduler tells the producer and the consumers about a tile.
template <int rows>
struct HopperPost {
  HopperWork work;
  PostKind kind;
  bool again;                  // set by consumers: the tile has to be done again, carefully
  int consumer_last[4];        // for each consumer's 64 rows: from here on they see no key
  int begin[rows], end[rows];  // the keys that each row may see
};

// What the scheduler says besides about a tile whose rows have spans (hopper_spans.cuh); its HopperWork counts steps.
struct SpanWork {
  std::int64_t line;  // of tile bits: those of the tile's rows
  int lines;
  HopperBlocks blocks;  // that the rows' ranges leave, by the numbers of the keys
};
template <int slots>
struct SpanPosts {
  SpanWork works[post_slots];
  int blocks[slots];  // SpanBlock::packed, by slot of the ring
};
struct NoSpans {
  int unused;
};

// Whether a block's values are looked through before they are used: see hopper_guard.cuh.
__device__ __forceinline__ bool is_checked(const HopperArguments& args, bool careful, const HopperBlocks& blocks,
                                           int block) {
  return careful && (args.masks_anywhere() || blocks.is_edge(block));
}

inline constexpr int tile_alignment = 1024;  // for the swizzle

template <int head_dim, HopperVariant variant>
struct alignas(tile_alignment) HopperMemory {
  static constexpr HopperTile tile = hopper_tile(head_dim, variant);
  static constexpr bool masked = is_masked(variant);
  static constexpr bool splits = variant == HopperVariant::split;
  static constexpr bool spanned = variant == HopperVariant::spanned;
  static constexpr int unit_slots = masked ? 4 * tile.consumers : 1;  // of bytes; of wider elements fewer fit
  static constexpr std::uint32_t unit_area = masked ? unit_slots * tile.unit_bytes(1) : 16;

  std::uint8_t query[tile.query_slots][tile.query_bytes()];
  std::uint8_t ring[tile.slots][tile.block_bytes()];
  std::uint8_t units[unit_area];
  std::uint64_t query_full[tile.query_slots], query_empty[tile.query_slots];
  std::uint64_t full[tile.slots], empty[tile.slots], checked[tile.slots];
  std::uint64_t unit_full[unit_slots], unit_ready[unit_slots], unit_empty[unit_slots];
  std::uint64_t post_full[post_slots], post_empty[post_slots];
  std::uint64_t careful_begun;     // by the consumers, at a tile that the guard follows
  int guard_found[tile.slots][2];  // by warp of the guard
  float never_written;
  HopperPost<is_plain(variant) ? 1 : tile.rows()> posts[post_slots];
  std::conditional_t<spanned, SpanPosts<tile.slots>, NoSpans> spans;
};

// A position in the ring: the slot, and the parity of its phase.
template <int slots>
struct RingPosition {
  std::uint32_t slot = 0;
  std::uint32_t parity = 0;

  __device__ __forceinline__ void advance(std::uint32_t steps = 1) {
    slot += steps;
    if (slot >= slots) {
      slot -= slots;
      parity ^= 1;
    }
  }

  // Any number of steps.
  __device__ __forceinline__ void skip(std::uint32_t steps) {
    slot += steps;
    parity ^= slot / slots & 1;
    slot %= slots;
  }
};

using PostPosition = RingPosition<post_slots>;

}  // namespace headway::cuda
