// The sizes of a forward task, the data of its panels of queries, and its scratch layout.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/args.h"
#include "engines/cpu/kernel/operands.h"
#include "engines/cpu/kernel/pack.h"
#include "engines/cpu/kernel/panel_spans.h"
#include "engines/cpu/kernel/ranges.h"
#include "engines/cpu/kernel/row_source.h"
#include "engines/cpu/kernel/scratch.h"
#include "engines/cpu/kernel/tile_pack.h"

namespace headway::cpu {
namespace {

template <class S>
struct ForwardSizes {
  static constexpr int lanes = S::lanes;
  static constexpr int width = S::lanes * S::panel_vectors;  // queries of a panel
  static constexpr int fold = Operands<S>::fold;
  static constexpr int key_step = HasTiles<S> ? tile_steps : fold;  // keys that one product adds up

  // Keys of a block, and panels that visit it one after the other: pairs take half the room and half the time.
  static constexpr int key_block = 256 * fold;
  static constexpr int most_panels = 4 * fold;

  // Where a sequence has more keys than a few blocks, what those left is added to compensated totals.
  static constexpr std::int64_t total_blocks = 16;
  static bool has_totals(const ForwardArgs& args) { return args.ranges.keys > total_blocks * key_block; }

  // Rows of an output panel.
  static std::int64_t output_rows(const ForwardArgs& args) {
    return HasTiles<S> ? in_whole_tiles(args.value_dim) : args.value_dim;
  }

  // Pairs of weights of a block that a vector of queries has, and for tiles the zeros behind them.
  static constexpr std::int64_t pairs_of_vector = (key_block + (HasTiles<S> ? tile_steps : 0)) / 2 * lanes;

  // Pieces of a block of keys that a panel with holes computes: parts of tiles, vector by vector, and what all rows
  // see.
  static constexpr std::int64_t most_scattered_pieces =
      (key_block / span_tile + 2 * (key_block / least_whole + 1)) * S::panel_vectors;
};

// Keys of one panel that were computed together, remembered for the weights.
struct Piece {
  std::int64_t key_begin, keys;
  int vector, vectors;
};

// The keys that some, and that all, rows of a panel may attend to, and those of each of its vectors.
template <class S>
struct PanelRanges {
  Range hull, core;
  Range vector_hull[S::panel_vectors];
  bool has_references;  // whether every row has visited a key of its range
  bool has_terms;       // whether its sums hold something that the totals lack
  bool scattered;       // whether spans leave holes: then the core is empty, and the panel's PanelSpans says more
};

template <class S>
struct ForwardLayout {
  using Scalar = typename S::Scalar;
  using Operand = typename Operands<S>::Scalar;
  using Sizes = ForwardSizes<S>;

  std::int64_t bytes;
  Operand *queries, *key_copy, *value_copy, *pairs;
  Scalar *outputs, *references, *sums, *scores, *dropped, *piece_references;
  Scalar *largest_values, *exact_outputs;                                            // for outputs that pairs lose
  Scalar *total_outputs, *lost_outputs, *total_sums, *lost_sums, *total_references;  // where has_totals()
  const void** value_rows;  // the addresses of a block's rows, where pairs are made of rows that are not one run
  Range* ranges;
  PanelRanges<S>* panel_ranges;
  PanelSpans* panel_spans;  // where there are spans
  Range* spare_whole;
  Piece* pieces;

  // Of a task of `panels` panels; keys_in_place: whether keys never need a copy. Weights keep a whole panel's scores:
  // they take one panel a task.
  ForwardLayout(const ForwardArgs& args, std::int64_t panels, bool keys_in_place, void* memory) {
    constexpr int lanes = S::lanes, width = Sizes::width, fold = Sizes::fold, key_block = Sizes::key_block;
    const std::int64_t output_rows = Sizes::output_rows(args);
    const bool weights = args.weights.data != nullptr;
    const std::int64_t blocks = args.ranges.keys / key_block + 2;
    const bool spans = args.ranges.spans.data != nullptr;
    const std::int64_t block_pieces = spans ? Sizes::most_scattered_pieces : 2 * S::panel_vectors + 2;
    const std::int64_t most_pieces = weights ? blocks * block_pieces : 0;
    Scratch<char> scratch{static_cast<char*>(memory)};
    queries = scratch.take<Operand>(panels * folded<S>(args.head_dim) * width);
    outputs = scratch.take<Scalar>(panels * output_rows * width);
    references = scratch.take<Scalar>(panels * width);
    sums = scratch.take<Scalar>(panels * width);
    const std::int64_t totals = Sizes::has_totals(args) ? panels * width : 0;
    total_outputs = scratch.take<Scalar>(totals * output_rows);
    lost_outputs = scratch.take<Scalar>(totals * output_rows);
    total_sums = scratch.take<Scalar>(totals);
    lost_sums = scratch.take<Scalar>(totals);
    total_references = scratch.take<Scalar>(totals);
    largest_values = scratch.take<Scalar>(fold > 1 ? args.value_dim : 0);
    exact_outputs = scratch.take<Scalar>(fold > 1 ? 2 * args.value_dim * lanes : 0);
    scores = scratch.take<Scalar>((weights ? args.ranges.keys : key_block) * width);
    pairs = scratch.take<Operand>(fold > 1 ? Sizes::pairs_of_vector * S::panel_vectors : 0);
    dropped = scratch.take<Scalar>(weights && args.dropout.active ? key_block * width : 0);
    key_copy = scratch.take<Operand>(keys_in_place ? 0 : (key_block + Sizes::key_step / 2) * folded<S>(args.head_dim));
    value_copy = scratch.take<Operand>(HasTiles<S> ? transposed_ld(key_block) * output_rows
                                                   : folded<S>(key_block) * args.value_dim + lanes);
    value_rows = scratch.take<const void*>(fold > 1 && !is_one_run(args.value) ? key_block : 0);
    ranges = scratch.take<Range>(panels * width);
    panel_ranges = scratch.take<PanelRanges<S>>(panels);
    pieces = scratch.take<Piece>(most_pieces);
    piece_references = scratch.take<Scalar>(most_pieces * width);
    const std::int64_t whole = spans ? PanelSpans::most_whole(args.ranges, width) : 0;
    panel_spans = scratch.take<PanelSpans>(spans ? panels : 0);
    spare_whole = scratch.take<Range>(whole);
    for (std::int64_t p = 0; spans && p < panels; ++p) {
      std::uint64_t* reached = scratch.take<std::uint64_t>(PanelSpans::words(args.ranges));
      Range* ranges_of_panel = scratch.take<Range>(whole);
      if (memory != nullptr) {
        panel_spans[p] = {reached, ranges_of_panel, 0};
      }
    }
    bytes = scratch.used;
  }
};

}  // namespace
}  // namespace headway::cpu
