// The state of a forward task: its arguments, the units of its scores, and its panels: their queries, the key range of
// each row, and the softmax so far, which is a reference, a sum and an output for each row.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/forward_layout.h"
#include "engines/cpu/kernel/modifiers.h"
#include "engines/cpu/kernel/panel_spans.h"
#include "engines/cpu/kernel/query_factor.h"
#include "engines/cpu/kernel/ranges.h"

namespace headway::cpu {
namespace {

template <class S>
struct ForwardTask {
  using Scalar = typename S::Scalar;
  using Operand = typename Operands<S>::Scalar;
  using Sizes = ForwardSizes<S>;
  static constexpr int lanes = S::lanes, width = Sizes::width, fold = Sizes::fold;

  ForwardTask(const ForwardArgs& arguments, bool keys_in_place, void* scratch)
      : args(arguments),
        panels((args.row_end - args.row_begin + width - 1) / width),
        at(args, panels, keys_in_place, scratch) {
    choose_units();
  }

  const ForwardArgs& args;
  bool modified = false;                 // whether scores are natural
  double to_log2 = 1;                    // from the units of the scores to those of the exponential
  double query_factor = 1;               // what queries are multiplied by
  SplitFactor<Scalar> score_unit{1, 1};  // what products are multiplied by to be scores
  std::int64_t panels;
  ForwardLayout<S> at;
  std::int64_t pieces = 0;  // that are remembered

  // Whether products have to be multiplied to be scores.
  bool rescales() const { return score_unit.first != 1 || score_unit.second != 1; }

  // ---- Panels ----

  std::int64_t panel_row(std::int64_t p) const { return args.row_begin + p * width; }
  int panel_rows(std::int64_t p) const { return at_most(args.row_end - panel_row(p), width); }
  int panel_vectors(std::int64_t p) const { return (panel_rows(p) + lanes - 1) / lanes; }
  // The lanes of a vector of rows whose results are stored.
  std::uint64_t stored_lanes(std::int64_t p, int v) const {
    const std::int64_t first = p * width + v * lanes;
    return first == 0 || first >= 64 ? args.stored_rows : args.stored_rows >> first;
  }
  Operand* query_panel(std::int64_t p) const { return at.queries + p * folded<S>(args.head_dim) * width; }
  Scalar* output_panel(std::int64_t p) const { return at.outputs + p * Sizes::output_rows(args) * width; }

  // In: the type that queries are stored in.
  template <class In>
  void start_panel(std::int64_t p) {
    for (int v = 0; v < panel_vectors(p); ++v) {
      const std::int64_t row = p * width + v * lanes;
      Packing<S, In>::queries(args.query, panel_row(p) + v * lanes, at_most(panel_rows(p) - v * lanes, lanes),
                              args.head_dim, query_factor, query_panel(p) + v * lanes, width);
      S::store(at.references + row, S::set(-infinity<S>));
      S::store(at.sums + row, S::zero());
    }
    find_panel_ranges(p);
  }

  void clear_output(std::int64_t p) {
    Scalar* output = output_panel(p);
    for (std::int64_t n = 0; n < Sizes::output_rows(args) * width; n += lanes) {
      S::store(output + n, S::zero());
    }
  }

  // Remembers the references behind a piece's weights until all keys are done.
  void remember(std::int64_t p, int v, int vectors, const Range& piece) {
    if (args.weights.data == nullptr) {
      return;
    }
    at.pieces[pieces] = {piece.begin, piece.end - piece.begin, v, vectors};
    for (int r = 0; r < width; ++r) {
      at.piece_references[pieces * width + r] = at.references[p * width + r];
    }
    ++pieces;
  }

 private:
  // A plain score is the product with a query that has taken in a power of two. What is missing to units of log2 comes
  // after the reference is subtracted: a rounded score times a factor could be far from its rounded reference. Scores
  // that are modified, and those with a scale beyond the type's range, become natural before.
  void choose_units() {
    const double sign = args.scale < 0 ? -1 : 1;
    const double size = sign * args.scale;
    double factor = size * log2e;
    double taken = query_power<Scalar>(factor);
    SplitFactor<Scalar> rest = left_after(factor, taken);
    modified = args.modifiers.any || rest.second != 1 || size > 0x1p1000;
    to_log2 = rest.first;
    if (modified) {
      taken = natural_part(size);
      score_unit = left_after(size, taken);
      to_log2 = log2e;
    }
    query_factor = sign * taken;
  }

  static SplitFactor<Scalar> left_after(double factor, double taken) {
    return split_factor<Scalar>(taken == 0 ? 1 : factor / taken);
  }

  // Scalars take a whole factor of up to 1 in, which saves a product a score.
  static double natural_part(double scale) {
    constexpr double least = sizeof(Scalar) == 4 ? 0x1p-126 : 0x1p-1022;
    return fold == 1 && scale <= 1 && scale >= least ? scale : query_power<Scalar>(scale);
  }

  void find_panel_ranges(std::int64_t p) {
    PanelRanges<S>& found = at.panel_ranges[p];
    Range* ranges = at.ranges + p * width;
    const int rows = panel_rows(p);
    const bool spanned = args.ranges.spans.data != nullptr;
    PanelSearch search;
    if (spanned) {
      search =
          find_panel_spans(args.ranges, panel_row(p), rows, Sizes::key_step, at.panel_spans[p], ranges, at.spare_whole);
    }
    found.has_terms = false;
    found.scattered = search.holes;
    if (!spanned && rows_share_range(args.ranges, panel_row(p), panel_row(p) + rows)) {
      found.hull = found.core = range_of_row(args.ranges, panel_row(p));
      for (int v = 0; v < panel_vectors(p); ++v) {
        found.vector_hull[v] = found.hull;
      }
      for (int r = 0; r < panel_vectors(p) * lanes; ++r) {
        ranges[r] = r < rows ? found.hull : Range{0, 0};
      }
    } else {
      found.hull = {0, 0};
      found.core = {0, args.ranges.keys};
      for (int v = 0; v < panel_vectors(p); ++v) {
        Range& hull = found.vector_hull[v];
        hull = {0, 0};
        for (int r = v * lanes; r < (v + 1) * lanes; ++r) {
          if (r >= rows) {
            ranges[r] = {0, 0};
            continue;
          }
          if (!spanned) {
            ranges[r] = range_of_row(args.ranges, panel_row(p) + r);
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
    found.core = {(found.core.begin + Sizes::key_step - 1) / Sizes::key_step * Sizes::key_step,
                  found.core.end / Sizes::key_step * Sizes::key_step};
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
};

}  // namespace
}  // namespace headway::cpu
