// What a forward task holds: its panels, the key range of each row, the block of keys and values at hand, and where all
// of it lies in the scratch.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/args.h"
#include "engines/cpu/kernel/modifiers.h"
#include "engines/cpu/kernel/operands.h"
#include "engines/cpu/kernel/pack.h"
#include "engines/cpu/kernel/panel_spans.h"
#include "engines/cpu/kernel/query_factor.h"
#include "engines/cpu/kernel/ranges.h"
#include "engines/cpu/kernel/row_source.h"
#include "engines/cpu/kernel/scratch.h"
#include "engines/cpu/kernel/tile.h"
#include "engines/cpu/kernel/tile_pack.h"

namespace headway::cpu {
namespace {

template <class S, class In>
class ForwardState {
 public:
  using Scalar = typename S::Scalar;
  using Vector = typename S::Vector;
  using Mask = typename S::Mask;
  using Operand = typename Operands<S>::Scalar;
  static constexpr int lanes = S::lanes;
  static constexpr int width = S::lanes * S::panel_vectors;
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

  // Bytes of scratch for a task of `panels` panels. Weights keep a whole panel's scores: they take one panel a task.
  static std::int64_t scratch_bytes(const ForwardArgs& args, std::int64_t panels) {
    return Layout(args, panels, nullptr).bytes;
  }

 protected:
  ForwardState(const ForwardArgs& args, void* scratch)
      : args_(args), panels_((args.row_end - args.row_begin + width - 1) / width), at_(args, panels_, scratch) {
    choose_units();
  }

  // Keys of one panel that were computed together, remembered for the weights.
  struct Piece {
    std::int64_t key_begin, keys;
    int vector, vectors;
  };

  // The keys that some, and that all, rows of a panel may attend to, and those of each of its vectors.
  struct PanelRanges {
    Range hull, core;
    Range vector_hull[S::panel_vectors];
    bool has_references;  // whether every row has visited a key of its range
    bool has_terms;       // whether its sums hold something that the totals lack
    bool scattered;       // whether spans leave holes: then the core is empty, and the panel's PanelSpans says more
  };

  struct Layout {
    std::int64_t bytes;
    Operand *queries, *key_copy, *value_copy, *pairs;
    Scalar *outputs, *references, *sums, *scores, *dropped, *piece_references;
    Scalar *largest_values, *exact_outputs;                                            // for outputs that pairs lose
    Scalar *total_outputs, *lost_outputs, *total_sums, *lost_sums, *total_references;  // where has_totals
    const void** value_rows;  // the addresses of a block's rows, where pairs are made of rows that are not one run
    Range* ranges;
    PanelRanges* panel_ranges;
    PanelSpans* panel_spans;  // where there are spans
    Range* spare_whole;
    Piece* pieces;

    Layout(const ForwardArgs& args, std::int64_t panels, void* memory) {
      const bool weights = args.weights.data != nullptr;
      const std::int64_t blocks = args.ranges.keys / key_block + 2;
      const bool spans = args.ranges.spans.data != nullptr;
      const std::int64_t block_pieces = spans ? most_scattered_pieces : 2 * S::panel_vectors + 2;
      const std::int64_t most_pieces = weights ? blocks * block_pieces : 0;
      Scratch<char> scratch{static_cast<char*>(memory)};
      queries = scratch.take<Operand>(panels * folded<S>(args.head_dim) * width);
      outputs = scratch.take<Scalar>(panels * output_rows(args) * width);
      references = scratch.take<Scalar>(panels * width);
      sums = scratch.take<Scalar>(panels * width);
      const std::int64_t totals = has_totals(args) ? panels * width : 0;
      total_outputs = scratch.take<Scalar>(totals * output_rows(args));
      lost_outputs = scratch.take<Scalar>(totals * output_rows(args));
      total_sums = scratch.take<Scalar>(totals);
      lost_sums = scratch.take<Scalar>(totals);
      total_references = scratch.take<Scalar>(totals);
      largest_values = scratch.take<Scalar>(fold > 1 ? args.value_dim : 0);
      exact_outputs = scratch.take<Scalar>(fold > 1 ? 2 * args.value_dim * lanes : 0);
      scores = scratch.take<Scalar>((weights ? args.ranges.keys : key_block) * width);
      pairs = scratch.take<Operand>(fold > 1 ? pairs_of_vector * S::panel_vectors : 0);
      dropped = scratch.take<Scalar>(weights && args.dropout.active ? key_block * width : 0);
      const bool in_place = Packing<S, In>::keys_in_place(args.key, args.head_dim);
      key_copy = scratch.take<Operand>(in_place ? 0 : (key_block + key_step / 2) * folded<S>(args.head_dim));
      value_copy = scratch.take<Operand>(HasTiles<S> ? transposed_ld(key_block) * output_rows(args)
                                                     : folded<S>(key_block) * args.value_dim + lanes);
      value_rows = scratch.take<const void*>(fold > 1 && !is_one_run(args.value) ? key_block : 0);
      ranges = scratch.take<Range>(panels * width);
      panel_ranges = scratch.take<PanelRanges>(panels);
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

  // Pieces of a block of keys that a panel with holes computes: parts of tiles, vector by vector, and what all rows
  // see.
  static constexpr std::int64_t most_scattered_pieces =
      (key_block / span_tile + 2 * (key_block / least_whole + 1)) * S::panel_vectors;

  static constexpr Scalar infinity = __builtin_inff();

  // ---- Units ----

  // A plain score is the product with a query that has taken in a power of two. What is missing to units of log2 comes
  // after the reference is subtracted: a rounded score times a factor could be far from its rounded reference. Scores
  // that are modified, and those with a scale beyond the type's range, become natural before.
  void choose_units() {
    const double sign = args_.scale < 0 ? -1 : 1;
    const double size = sign * args_.scale;
    double factor = size * log2e;
    double taken = query_power<Scalar>(factor);
    SplitFactor<Scalar> rest = left_after(factor, taken);
    modified_ = args_.modifiers.any || rest.second != 1 || size > 0x1p1000;
    to_log2_ = rest.first;
    if (modified_) {
      taken = natural_part(size);
      score_unit_ = left_after(size, taken);
      to_log2_ = log2e;
    }
    query_factor_ = sign * taken;
  }

  static SplitFactor<Scalar> left_after(double factor, double taken) {
    return split_factor<Scalar>(taken == 0 ? 1 : factor / taken);
  }

  // Scalars take a whole factor of up to 1 in, which saves a product a score.
  static double natural_part(double scale) {
    constexpr double least = sizeof(Scalar) == 4 ? 0x1p-126 : 0x1p-1022;
    return fold == 1 && scale <= 1 && scale >= least ? scale : query_power<Scalar>(scale);
  }
  bool rescales() const { return score_unit_.first != 1 || score_unit_.second != 1; }

  // ---- Panels ----

  std::int64_t panel_row(std::int64_t p) const { return args_.row_begin + p * width; }
  int panel_rows(std::int64_t p) const { return at_most(args_.row_end - panel_row(p), width); }
  int panel_vectors(std::int64_t p) const { return (panel_rows(p) + lanes - 1) / lanes; }
  // The lanes of a vector of rows whose results are stored.
  std::uint64_t stored_lanes(std::int64_t p, int v) const {
    const std::int64_t first = p * width + v * lanes;
    return first == 0 || first >= 64 ? args_.stored_rows : args_.stored_rows >> first;
  }
  Operand* query_panel(std::int64_t p) const { return at_.queries + p * folded<S>(args_.head_dim) * width; }
  Scalar* output_panel(std::int64_t p) const { return at_.outputs + p * output_rows(args_) * width; }

  void start_panel(std::int64_t p) {
    for (int v = 0; v < panel_vectors(p); ++v) {
      const std::int64_t at = p * width + v * lanes;
      Packing<S, In>::queries(args_.query, panel_row(p) + v * lanes, at_most(panel_rows(p) - v * lanes, lanes),
                              args_.head_dim, query_factor_, query_panel(p) + v * lanes, width);
      S::store(at_.references + at, S::set(-infinity));
      S::store(at_.sums + at, S::zero());
    }
    find_panel_ranges(p);
  }

  void clear_output(std::int64_t p) {
    Scalar* output = output_panel(p);
    for (std::int64_t at = 0; at < output_rows(args_) * width; at += lanes) {
      S::store(output + at, S::zero());
    }
  }

  void find_panel_ranges(std::int64_t p) {
    PanelRanges& found = at_.panel_ranges[p];
    Range* ranges = at_.ranges + p * width;
    const int rows = panel_rows(p);
    const bool spanned = args_.ranges.spans.data != nullptr;
    PanelSearch search;
    if (spanned) {
      search =
          find_panel_spans(args_.ranges, panel_row(p), rows, key_step, at_.panel_spans[p], ranges, at_.spare_whole);
    }
    found.has_terms = false;
    found.scattered = search.holes;
    if (!spanned && rows_share_range(args_.ranges, panel_row(p), panel_row(p) + rows)) {
      found.hull = found.core = range_of_row(args_.ranges, panel_row(p));
      for (int v = 0; v < panel_vectors(p); ++v) {
        found.vector_hull[v] = found.hull;
      }
      for (int r = 0; r < panel_vectors(p) * lanes; ++r) {
        ranges[r] = r < rows ? found.hull : Range{0, 0};
      }
    } else {
      found.hull = {0, 0};
      found.core = {0, args_.ranges.keys};
      for (int v = 0; v < panel_vectors(p); ++v) {
        Range& hull = found.vector_hull[v];
        hull = {0, 0};
        for (int r = v * lanes; r < (v + 1) * lanes; ++r) {
          if (r >= rows) {
            ranges[r] = {0, 0};
            continue;
          }
          if (!spanned) {
            ranges[r] = range_of_row(args_.ranges, panel_row(p) + r);
          }
          found.scattered |= spanned && are_apart(hull, ranges[r]);
          hull = joined(hull, ranges[r]);
          found.core = {larger(found.core.begin, ranges[r].begin), smaller(found.core.end, ranges[r].end)};
        }
        found.hull = joined(found.hull, hull);
      }
    }
    if (found.scattered) {
      found.core = {found.hull.end, found.hull.end};
      found.has_references = search.outside;
      return;
    }
    // Keys of one product stay together: a core starts and ends between products.
    found.core = {(found.core.begin + key_step - 1) / key_step * key_step, found.core.end / key_step * key_step};
    if (found.core.begin >= found.core.end) {
      found.core = {found.hull.end, found.hull.end};
    }
    // Keys outside the core come first. Ranges decide whether each row has one there, not what its keys hold.
    found.has_references = true;
    for (int r = 0; r < rows; ++r) {
      found.has_references &= ranges[r].begin < found.core.begin || ranges[r].end > found.core.end;
    }
  }

  // Whether two ranges have keys between them.
  static bool are_apart(const Range& a, const Range& b) {
    return a.begin < a.end && b.begin < b.end && (b.begin > a.end || b.end < a.begin);
  }

  // ---- The block of keys at hand ----

  // `end` is a multiple of `fold` or the last key's end.
  void enter_block(std::int64_t key, std::int64_t end) {
    if (key == block_begin_ && block_loaded_) {
      return;
    }
    block_begin_ = key;
    block_end_ = smaller(key + key_block, end);
    block_loaded_ = false;
    careful_ = false;
  }

  // Makes the block's keys and values readable, once for all panels that visit it.
  void load_block() {
    if (block_loaded_) {
      return;
    }
    const std::int64_t count = block_end_ - block_begin_;
    keys_ = Packing<S, In>::keys(args_.key, block_begin_, count, args_.head_dim, at_.key_copy);
    seen_ = {};
    if constexpr (HasTiles<S>) {
      values_ = {at_.value_copy, transposed_ld(key_block)};
      transpose_values<S, In>(args_.value, block_begin_, count, args_.value_dim, at_.value_copy, values_.ld, seen_,
                              at_.value_rows);
    } else {
      values_ = Packing<S, In>::values(args_.value, block_begin_, count, args_.value_dim, at_.value_copy,
                                       args_.value_dim, seen_, at_.value_rows);
    }
    block_loaded_ = true;
    const bool forbids = args_.modifiers.mask.data != nullptr || args_.modifiers.bias.data != nullptr;
    if (forbids || any_tiny()) {
      watch_values({block_begin_, block_end_});
    }
  }

  // Before keys that some rows may not attend to: where a value is NaN or infinite, multiplying it by their weight of 0
  // would show it. Such values are then hidden: the block's values become a copy with 0 in their place, and `careful_`
  // says that add_hidden_values must give them to the rows that may attend.
  HEADWAY_NOINLINE void watch_values(const Range& keys) {
    const Range whole{keys.begin / fold * fold, smaller(keys.end + key_step - 1, block_end_)};
    if (careful_ || (values_are_finite(whole) && !any_tiny())) {
      return;
    }
    careful_ = true;
    copy_values();
    for (std::int64_t key = block_begin_; key < block_end_; ++key) {
      for (std::int64_t d = 0; d < args_.value_dim; ++d) {
        if (is_hidden(value_at(key, d))) {
          const std::int64_t j = key - block_begin_;
          Operand* at = at_.value_copy + (HasTiles<S> ? d * values_.ld + j / fold : j / fold * args_.value_dim + d);
          Operands<S>::clear_part(at, static_cast<int>(j % fold));
        }
      }
    }
  }

  // Leaves the block's values in scratch, where they may be changed, and read past their end by less than a vector.
  void copy_values() {
    Operand* copy = at_.value_copy;
    if (values_.data == copy) {
      return;
    }
    for (std::int64_t j = 0; j < folded<S>(block_end_ - block_begin_); ++j) {
      for (std::int64_t d = 0; d < args_.value_dim; ++d) {
        copy[j * args_.value_dim + d] = values_.data[j * values_.ld + d];
      }
    }
    values_ = {copy, args_.value_dim};
  }

  // Of the block at hand, before any is hidden.
  bool values_are_finite(const Range& keys) const {
    if constexpr (fold == 1) {
      return rows_are_finite<S>({values_.data, values_.ld}, keys.begin - block_begin_, keys.end - block_begin_,
                                args_.value_dim);
    } else {
      if (!seen_.any_from(infinity_bits)) {
        return true;
      }
      Vector zeros = S::zero();  // NaN after 0 * inf or 0 * NaN
      for (std::int64_t key = keys.begin; key < keys.end; ++key) {
        const SourceRow<S, In> row(args_.value, key);
        for (std::int64_t d = 0; d < args_.value_dim; d += lanes) {
          zeros = S::fma(row.part(d, at_most(args_.value_dim - d, lanes)), S::zero(), zeros);
        }
      }
      return !S::any(S::not_less_equal(zeros, S::zero()));
    }
  }

  // Dot products flush denormals, so values near them are hidden too.
  static constexpr double tiny_value = 0x1p-90;
  static constexpr std::uint16_t tiny_bits = (127 - 90) << 7;  // as bf16
  static constexpr std::uint16_t infinity_bits = 255 << 7;

  bool any_tiny() const {
    if constexpr (fold > 1) {
      return seen_.any_below(tiny_bits);
    }
    return false;
  }

  static bool is_hidden(Scalar x) {
    const bool tiny = fold > 1 && x != 0 && x < tiny_value && x > -tiny_value;
    return x - x != 0 || tiny;
  }
  Scalar value_at(std::int64_t key, std::int64_t d) const {
    alignas(64) Scalar loaded[lanes];
    S::store(loaded, SourceRow<S, In>(args_.value, key).part(d, 1));
    return loaded[0];
  }

  // The scores, then weights, of the keys from `key` on, for the vectors from v on.
  Scalar* scores_at(std::int64_t key, int v) const {
    return at_.scores + (args_.weights.data != nullptr ? key : key - block_begin_) * width + v * lanes;
  }
  const Operand* key_operands(std::int64_t key) const { return keys_.data + (key - block_begin_) * keys_.ld; }
  const Operand* value_operands(std::int64_t key) const {
    return values_.data + (key - block_begin_) / fold * (HasTiles<S> ? 1 : values_.ld);
  }

  const ForwardArgs& args_;
  bool modified_ = false;                 // whether scores are natural
  double to_log2_ = 1;                    // from the units of the scores to those of the exponential
  double query_factor_ = 1;               // what queries are multiplied by
  SplitFactor<Scalar> score_unit_{1, 1};  // what products are multiplied by to be scores
  std::int64_t panels_;
  Layout at_;
  std::int64_t pieces_ = 0;
  std::int64_t block_begin_ = 0, block_end_ = 0;
  bool block_loaded_ = false;
  bool careful_ = false;
  OperandRows<S> keys_{}, values_{};
  typename Operands<S>::Magnitudes seen_;  // of the block's values
};

}  // namespace
}  // namespace headway::cpu
