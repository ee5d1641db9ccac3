// The sizes of a backward task and its scratch layout.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/backward_args.h"
#include "engines/cpu/kernel/backward_tile_data.h"
#include "engines/cpu/kernel/pack.h"
#include "engines/cpu/kernel/ranges.h"
#include "engines/cpu/kernel/row_blocks.h"
#include "engines/cpu/kernel/scratch.h"

namespace headway::cpu {
namespace {

constexpr int blocks_in_sum = 32;  // query blocks whose parts of dK and dV are added up before they go to the totals

// Which pairs of queries and keys a task has tiles for.
enum class KeptTiles {
  one_block,  // dS of one block of queries and P of one tile: a task that goes by groups of keys
  all,        // dS and P of all queries and keys, as dense as the sequence allows: one group of all keys
};

// fold: how many values the products take at once.
template <class S, int fold>
struct BackwardLayout {
  using Scalar = typename S::Scalar;
  static constexpr int width = S::lanes * S::panel_vectors;  // keys of a panel

  // Of a group of keys; the last one of a chunk may have fewer.
  static std::int64_t group_keys(const BackwardArgs& args) { return cpu::group_keys<S, fold>(args); }

  KeptTiles kept_tiles;
  std::int64_t tile_rows;  // from one tile of pairs to the next
  std::int64_t size;       // in Scalars
  Scalar *key_panels, *value_panels, *dk_panels, *dv_panels, *dk_totals, *dv_totals, *key_rows;
  Scalar *weights, *gradients, *slopes, *query_copy, *grad_out_copy;
  std::uint64_t *allowed, *kept;
  Range* spans;
  RowBlock* blocks;           // of each plane of spans
  std::uint64_t* panel_bits;  // of each block: its BlockPanels; and as much as one for the search

  BackwardLayout(const BackwardArgs& args, KeptTiles tiles_to_keep, Scalar* base) : kept_tiles(tiles_to_keep) {
    const bool all = kept_tiles == KeptTiles::all;
    tile_rows = all ? smaller(args.queries, query_block) : query_block;
    const std::int64_t panels = all ? (args.ranges.keys + width - 1) / width : group_panels<S, fold>(args);
    const std::int64_t keys = panels * width;
    const std::int64_t blocks_kept = all ? block_count(args) : 1;
    const std::int64_t rows = blocks_kept * tile_rows;
    const std::int64_t tiles = blocks_kept * panels;
    const std::int64_t total_keys = block_count(args) * args.head_count > blocks_in_sum ? keys : 0;
    Scratch<Scalar> scratch{base};
    key_panels = scratch.template take<Scalar>(args.head_dim * keys);
    value_panels = scratch.template take<Scalar>(args.value_dim * keys);
    dk_panels = scratch.template take<Scalar>(padded<S>(args.head_dim) * keys);
    dv_panels = scratch.template take<Scalar>(padded<S>(args.value_dim) * keys);
    dk_totals = scratch.template take<Scalar>(args.head_dim * total_keys);
    dv_totals = scratch.template take<Scalar>(args.value_dim * total_keys);
    key_rows = scratch.template take<Scalar>(padded<S>(args.head_dim) * keys);
    weights = scratch.template take<Scalar>((all ? tiles : 1) * tile_rows * width);
    gradients = scratch.template take<Scalar>(tiles * tile_rows * width);
    slopes = scratch.template take<Scalar>(tile_rows * width);
    query_copy = scratch.template take<Scalar>(rows * padded<S>(args.head_dim));
    grad_out_copy = scratch.template take<Scalar>(rows * padded<S>(args.value_dim));
    allowed = scratch.template take<std::uint64_t>(tiles * query_block);
    kept = scratch.template take<std::uint64_t>(query_block);
    spans = scratch.template take<Range>(tiles * (query_block / edge_rows));
    const std::int64_t planes = larger(args.span_planes, 1);
    blocks = scratch.template take<RowBlock>(planes * block_count(args));
    panel_bits = scratch.template take<std::uint64_t>(
        args.span_planes == 0 ? 0 : (2 * planes * block_count(args) + 1) * BlockPanels::words(args.ranges, width));
    size = scratch.used;
  }
};

}  // namespace
}  // namespace headway::cpu
