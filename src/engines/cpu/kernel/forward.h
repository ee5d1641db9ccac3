// Attention forward, queries in lanes.
//
// A panel is a few vectors of queries (64 for float on AVX-512). Q is packed once per panel as Q^T [D][queries] with
// what it takes of the scale; K and V are read in place, one broadcast at a time:
//   S^T [keys][queries] = K Q^T      O^T [Dv][queries] += V^T P^T
// For a block of 256 keys the scores stay in the second-level cache; K and V come from memory once per task of several
// panels; Q and O are touched once. The FMA units bound it: 2 (D + Dv) operations a score against one exponential.
// With bf16 dot products Q and K are pairs along d, P and V pairs along keys, and half as many steps do the same.
//
// Softmax runs against a reference m per row. A row's first keys set it to their maximum; later full blocks keep it, so
// that the exponential follows the scores in registers ("fused"). Only when a row's block sum grows past a limit are
// its scores computed again and its reference raised. Each lane decides for itself, so a row's bits depend on no other
// row. Modified scores wait in the first-level cache: their exponentials run between the products of the next 64 keys,
// so a modifier costs its own bytes and arithmetic and one more pass over scores that are at hand.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "engines/cpu/kernel/forward_block.h"
#include "engines/cpu/kernel/forward_finish.h"
#include "engines/cpu/kernel/forward_fused.h"
#include "engines/cpu/kernel/forward_scores.h"
#include "engines/cpu/kernel/forward_softmax.h"
#include "engines/cpu/kernel/forward_task.h"
#include "engines/cpu/kernel/forward_tiles.h"
#include "engines/cpu/kernel/forward_tiny.h"
#include "engines/cpu/kernel/forward_totals.h"
#include "engines/cpu/kernel/forward_values.h"
#include "engines/cpu/kernel/strips.h"

namespace headway::cpu {
namespace {

constexpr std::int64_t first_keys = 64;     // of a row without a reference
constexpr std::int64_t foreseen_keys = 16;  // near a row's own position

template <class S, class In>
class Forward {
  using Vector = typename S::Vector;
  using Sizes = ForwardSizes<S>;
  static constexpr int lanes = S::lanes, fold = Sizes::fold, width = Sizes::width, key_block = Sizes::key_block;

 public:
  Forward(const ForwardArgs& args, void* scratch)
      : args_(args), task_(args, reads_keys_in_place<S, In>(args), scratch) {}

  // Bytes of scratch for a task of `panels` panels.
  static std::int64_t scratch_bytes(const ForwardArgs& args, std::int64_t panels) {
    return ForwardLayout<S>(args, panels, reads_keys_in_place<S, In>(args), nullptr).bytes;
  }

  HEADWAY_NOINLINE void run() {
    Range all{0, 0};
    if constexpr (HasTiles<S>) {
      tiles_.template look_ahead<In>();
    }
    for (std::int64_t p = 0; p < task_.panels; ++p) {
      task_.template start_panel<In>(p);
      task_.clear_output(p);
      totals_.clear(p);
      all = joined(all, task_.at.panel_ranges[p].hull);
    }
    const std::int64_t end = smaller((all.end + fold - 1) / fold * fold, args_.ranges.keys);
    if (args_.modifiers.has_alibi && fused_.fuses_modified()) {
      for (std::int64_t p = 0; p < task_.panels; ++p) {
        foresee_references(p, end);
      }
    }
    // A panel first visits the keys that only some of its rows may attend to, then those that all of them may.
    for (const bool edges : {true, false}) {
      for (std::int64_t key = all.begin / key_block * key_block; key < all.end; key += key_block) {
        block_.enter(key, end);
        for (std::int64_t p = 0; p < task_.panels; ++p) {
          edges ? edge_block(p) : core_block(p);
        }
        totals_.add_block(key / key_block);
      }
    }
    for (std::int64_t p = 0; p < task_.panels; ++p) {
      totals_.take(p);
      finish_.finish_panel(p);
      tiny_.restore_panel(p);
    }
  }

 private:
  // ---- Parts of a block ----

  Range inside_block(const Range& range) const {
    return {larger(range.begin, block_.begin), smaller(range.end, block_.end)};
  }

  void core_block(std::int64_t p) {
    if (task_.at.panel_ranges[p].scattered) {
      for_whole_pieces(task_.at.panel_spans[p], {block_.begin, block_.end},
                       [&](const Range& piece) HEADWAY_LAMBDA { core_piece(p, piece); });
    } else {
      core_piece(p, inside_block(task_.at.panel_ranges[p].core));
    }
  }

  void core_piece(std::int64_t p, const Range& core) {
    if (core.begin >= core.end) {
      return;
    }
    block_.template load<In>();
    with_vectors<S::panel_vectors>(task_.panel_vectors(p),
                                   [&](auto strip) HEADWAY_LAMBDA { core_piece_of<strip.size>(p, core); });
  }

  template <int NV>
  void core_piece_of(std::int64_t p, const Range& whole) {
    constexpr bool full = NV == S::panel_vectors;
    const Range core = scores_.template without_forbidden_end<NV>(p, 0, whole);
    if (core.begin == core.end) {
      return;
    }
    if (!S::fused_softmax || (task_.modified && !(full && fused_.fuses_modified()))) {
      softmax_.template two_pass<NV>(p, 0, core, false);
      return;
    }
    std::int64_t begin = core.begin;
    // A row may still lack a reference, behind a mask or NaNs: what one row sees must not change how the others go on.
    if (HasTiles<S> && !task_.at.panel_ranges[p].has_references) {
      task_.at.panel_ranges[p].has_references = true;
      softmax_.template first_references<NV>(p, {core.begin, core.begin + tile_steps});
    }
    if (!task_.at.panel_ranges[p].has_references) {
      task_.at.panel_ranges[p].has_references = true;
      begin = smaller(core.begin + first_keys, core.end);
      softmax_.template two_pass<NV>(p, 0, {core.begin, begin}, false);
    }
    if (begin == core.end) {
      return;
    }
    if constexpr (HasTiles<S>) {
      tiles_.template run<NV>(p, {begin, core.end});
    } else if (!task_.modified) {
      fused_.template fused<NV>(p, {begin, core.end});
    } else if constexpr (full && fold == 1 && LooksUpPowers<S>) {
      if (softmax_.template lacks_reference<NV>(p)) {
        softmax_.template raise_references<NV, SummedExp2<S>>(p, 0, {begin, core.end});
      } else {
        fused_.template fused_behind<NV>(p, {begin, core.end});
      }
    }
  }

  // ALiBi lets scores rise towards a row's own position: references taken far from there would be raised again and
  // again. A few keys near the panel's middle do.
  HEADWAY_NOINLINE void foresee_references(std::int64_t p, std::int64_t end) {
    PanelRanges<S>& ranges = task_.at.panel_ranges[p];
    const Range& core = ranges.core;
    if (core.begin >= core.end || task_.panel_vectors(p) != S::panel_vectors) {
      return;
    }
    const std::int64_t middle = task_.panel_row(p) + width / 2 + args_.ranges.offset;
    const std::int64_t nearest = larger(core.begin, smaller(middle, core.end - 1));
    block_.enter(nearest / key_block * key_block, end);
    block_.template load<In>();
    const std::int64_t begin = nearest / foreseen_keys * foreseen_keys;
    const Range piece{larger(begin, core.begin), smaller(begin + foreseen_keys, core.end)};
    Vector reference[S::panel_vectors];
    scores_.template products<S::panel_vectors>(p, 0, piece);
    scores_.modify(p, 0, S::panel_vectors, piece);
    softmax_.template load_references<S::panel_vectors>(p, 0, reference);
    softmax_.template raise_to_scores<S::panel_vectors>(0, piece, reference);
    for (int n = 0; n < S::panel_vectors; ++n) {
      S::store(task_.at.references + p * width + n * lanes, reference[n]);
    }
    ranges.has_references = true;
  }

  // What lies in the panel's hull before and after its core.
  void edge_block(std::int64_t p) {
    if (task_.at.panel_ranges[p].scattered) {
      for_partial_pieces(task_.at.panel_spans[p], {block_.begin, block_.end},
                         [&](const Range& piece) HEADWAY_LAMBDA { scattered_piece(p, piece); });
      return;
    }
    const Range& core = task_.at.panel_ranges[p].core;
    const Range hull = inside_block(task_.at.panel_ranges[p].hull);
    edge_piece(p, {hull.begin, smaller(hull.end, core.begin)});
    edge_piece(p, {larger(hull.begin, core.end), hull.end});
  }

  // Vector by vector, each with the keys that its own rows reach.
  void edge_piece(std::int64_t p, const Range& piece) {
    if (piece.begin >= piece.end) {
      return;
    }
    block_.template load<In>();
    block_.watch_values(piece);
    for (int v = 0; v < task_.panel_vectors(p); ++v) {
      const Range& hull = task_.at.panel_ranges[p].vector_hull[v];
      const Range reached = scores_.template without_forbidden_end<1>(
          p, v, {larger(hull.begin, piece.begin), smaller(hull.end, piece.end)});
      if (reached.begin < reached.end) {
        softmax_.template two_pass<1>(p, v, reached, true);
      }
    }
  }

  // Part of a tile: all vectors together where all rows see the same few keys, as the first ones of a sequence; else
  // vector by vector, each from the first to the last key that one of its rows sees.
  void scattered_piece(std::int64_t p, const Range& piece) {
    static_assert(span_tile == chunk_keys);
    const auto& bits = scores_.permission.tile(p, piece.begin);
    const std::uint64_t inside = range_word({piece.begin - bits.key_begin, piece.end - bits.key_begin});
    std::uint64_t reached = 0;
    for (int v = 0; v < task_.panel_vectors(p); ++v) {
      reached |= bits.reach[v] & inside;
    }
    if (reached == 0) {
      return;
    }
    const auto keys_of = [&](std::uint64_t word) HEADWAY_LAMBDA {
      const Range hull = word_hull(word);
      return Range{bits.key_begin + hull.begin, bits.key_begin + hull.end};
    };
    block_.template load<In>();
    block_.watch_values(keys_of(reached));
    if (reached == (bits.common & inside) && range_word(word_hull(reached)) == reached) {
      with_vectors<S::panel_vectors>(task_.panel_vectors(p), [&](auto strip) HEADWAY_LAMBDA {
        softmax_.template two_pass<strip.size>(p, 0, keys_of(reached), false);
      });
      return;
    }
    for (int v = 0; v < task_.panel_vectors(p); ++v) {
      if ((bits.reach[v] & inside) != 0) {
        softmax_.template two_pass<1>(p, v, keys_of(bits.reach[v] & inside), true);
      }
    }
  }

  const ForwardArgs& args_;
  ForwardTask<S> task_;                                         // what is asked for, and the panels of queries
  ForwardBlock<S> block_{task_};                                // the keys and values at hand
  ForwardScores<S> scores_{task_, block_};                      // S^T = K Q^T, modified
  ForwardValues<S> values_{task_, block_};                      // O^T += V^T P^T
  ForwardSoftmax<S> softmax_{task_, block_, scores_, values_};  // P^T, references and sums
  ForwardFused<S> fused_{task_, block_, scores_, values_, softmax_};
  ForwardTiles<S> tiles_{task_, block_, values_, softmax_};
  ForwardTotals<S> totals_{task_};              // sums over many keys
  ForwardFinish<S, In> finish_{task_, block_};  // O / sum, lse, weights
  TinyOutputs<S, In> tiny_{task_, block_, scores_, values_, finish_.last_factors};
};

}  // namespace
}  // namespace headway::cpu
