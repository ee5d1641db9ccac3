// Rows with a large lse. lse is one rounded number: at 10^5 a float's next one is 0.8 % away in exp(s - lse), at 10^9
// the error is e^64. So beyond a limit a row's softmax is taken again from the scores that the backward pass itself
// computes: its highest score becomes the row's reference, and the sum of the weights counted from there, their mean of
// dP and the sink's share follow. Scores near the reference are subtracted from it exactly, so the weights add up to 1
// as in any other row.
//
// This depends on a row's own lse and its own allowed pairs only. It repeats two of the five products for blocks of
// queries with such a row, and costs nothing for other blocks.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/backward_args.h"
#include "engines/cpu/kernel/backward_panel.h"
#include "engines/cpu/kernel/backward_tile.h"
#include "engines/cpu/kernel/exp2.h"
#include "engines/cpu/kernel/key_lanes.h"
#include "engines/cpu/kernel/lane_sums.h"

namespace headway::cpu {
namespace {

template <class Scalar>
HEADWAY_INLINE bool is_large(Scalar lse) {
  constexpr double limit = sizeof(Scalar) == 4 ? 0x1p12 : 0x1p41;  // where rounding costs 2^-12 of a weight
  return lse > limit || (lse < -limit && lse != -static_cast<Scalar>(__builtin_inff()));
}

template <class S, class In>
class LargeRows {
 public:
  using Scalar = typename S::Scalar;
  using Vector = typename S::Vector;
  static constexpr int lanes = S::lanes;
  static constexpr int width = S::lanes * S::panel_vectors;

  // In Scalars.
  static std::int64_t scratch_size(const BackwardArgs& args) { return Layout(args, nullptr).tiles.scratch.used; }

  LargeRows(const BackwardArgs& args, const BackwardHead& head, Scalar* scratch)
      : args_(args), head_(head), at_(args, scratch), factor_(tile_factor<S>(args.scale, head.modifiers)) {
    if (change_scores(head.modifiers)) {
      factor_ = {factor_.packed, 1, static_cast<Scalar>(log2e)};
    }
    to_log2_ = static_cast<double>(factor_.power) * static_cast<double>(factor_.rest);
    sign_ = factor_.rest < 0 ? -1 : 1;
  }

  // Gives the block's large rows their references, lse and delta.
  HEADWAY_NOINLINE void run(const RowBlock& block) {
    if (!start_rows(block)) {
      return;
    }
    for (std::int64_t key = block.hull.begin / width * width; key < block.hull.end; key += width) {
      const Range keys{key, smaller(key + width, args_.ranges.keys)};
      if (!block_sees_any(head_.ranges, block, keys)) {
        continue;
      }
      at_.tiles.load(args_, head_, keys);
      const Tile<S> tile = at_.tiles.tile(args_, head_, block, keys);
      TileGradients<S>(args_, head_, tile).run_products(PanelTiles<S, In>::has_edge(block, keys));
      measure_keys(tile.key_panel);
      for (int r = 0; r < block.count; ++r) {
        if (at_.rows[r].large && tile.allowed[r] != 0) {
          add_panel(tile, r);
        }
      }
    }
    for (int r = 0; r < block.count; ++r) {
      if (at_.rows[r].large) {
        finish(block.begin + r, at_.rows[r]);
      }
    }
  }

 private:
  struct Row {
    double sum, dp_sum;  // of the weights counted from `highest`, and of their products with dP
    Scalar highest;      // score, or product times the factor's sign
    Scalar query_size;   // the largest |q|
    Scalar score_size;   // at least the largest sum of |q k| of an allowed pair, in the units of `highest`
    bool large;
  };
  struct Layout {
    PanelTiles<S, In> tiles;
    Row* rows;          // [query_block]
    Scalar* key_sizes;  // [width]: sums of |k| of the panel's keys

    Layout(const BackwardArgs& args, Scalar* base) : tiles(args, base) {
      rows = tiles.scratch.template take<Row>(query_block);
      key_sizes = tiles.scratch.template take<Scalar>(width);
    }
  };

  static constexpr Scalar infinity = __builtin_inff();

  Scalar lse_of(std::int64_t row) const { return static_cast<const Scalar*>(head_.lse)[row * head_.lse_stride]; }

  // Returns whether any row is large.
  bool start_rows(const RowBlock& block) {
    bool any = false;
    for (int r = 0; r < block.count; ++r) {
      at_.rows[r] = {0, 0, -infinity, 0, 0, is_large(lse_of(block.begin + r))};
      any |= at_.rows[r].large;
    }
    for (int r = 0; any && r < block.count; ++r) {
      Row& row = at_.rows[r];
      const In* query = static_cast<const In*>(head_.query.data) + (block.begin + r) * head_.query.row_stride;
      Vector size = S::zero();
      for (std::int64_t d = 0; row.large && d < args_.head_dim; d += lanes) {
        const int count = at_most(args_.head_dim - d, lanes);
        size = S::max(S::abs(load_row<S>(query, head_.query.column_stride, d, count)), size);
      }
      row.query_size = highest_lane<S>(size);
    }
    return any;
  }

  void measure_keys(const Scalar* key_panel) {
    for (int v = 0; v < S::panel_vectors; ++v) {
      Vector sum = S::zero();
      for (std::int64_t d = 0; d < args_.head_dim; ++d) {
        sum = sum + S::abs(S::load(key_panel + d * width + v * lanes));
      }
      S::store(at_.key_sizes + v * lanes, sum);
    }
  }

  static double sum_of_lanes(Vector x) {
    alignas(64) Scalar elements[lanes];
    S::store(elements, x);
    double sum = 0;
    for (int l = 0; l < lanes; ++l) {
      sum += static_cast<double>(elements[l]);
    }
    return sum;
  }

  // body(vector, mask of its allowed pairs)
  template <class Body>
  static void each_vector(const Tile<S>& tile, int r, const Body& body) {
    for (int v = 0; v * lanes < tile.place.keys; ++v) {
      if ((tile.allowed[r] >> v * lanes & low_bits(lanes)) != 0) {
        body(v, S::mask_from_bits(tile.allowed[r] >> v * lanes));
      }
    }
  }

  Vector score(const Tile<S>& tile, int r, int v) const {
    return S::load(tile.weights + r * width + v * lanes) * S::set(sign_);
  }

  void add_panel(const Tile<S>& tile, int r) {
    Row& row = at_.rows[r];
    Vector highest = S::set(-infinity), size = S::zero();
    each_vector(tile, r, [&](int v, auto allowed) {
      highest = S::max(S::select(allowed, score(tile, r, v), highest), highest);  // a NaN shows in the sum
      size = S::max(S::select(allowed, S::load(at_.key_sizes + v * lanes), size), size);
    });
    const Scalar key_size = highest_lane<S>(size) * row.query_size;
    row.score_size = key_size > row.score_size ? key_size : row.score_size;
    raise(row, highest_lane<S>(highest));
    const std::uint64_t kept = head_.dropout.active ? kept_word<S>(head_.dropout, tile.place.row_begin + r,
                                                                   tile.place.key_begin, tile.place.keys)
                                                    : ~std::uint64_t{0};
    const Vector scaled_up = S::set(static_cast<Scalar>(head_.dropout.kept_scale));
    const Vector from = S::set(row.highest == -infinity ? Scalar{0} : row.highest);
    const Vector power = S::set(factor_.power), rest = S::set(factor_.rest * sign_);
    Vector sum = S::zero(), dp_sum = S::zero();
    each_vector(tile, r, [&](int v, auto allowed) {
      const Vector x = (score(tile, r, v) - from) * power * rest;
      const Vector weight = S::select(allowed, exp2<S>(x), S::zero());
      const Vector factor = S::select(S::mask_from_bits(kept >> v * lanes), scaled_up, S::zero());
      const Vector dp = S::load(tile.gradients + r * width + v * lanes) * factor;
      sum = sum + weight;
      dp_sum = S::fma(weight, S::select(allowed, dp, S::zero()), dp_sum);
    });
    row.sum += sum_of_lanes(sum);
    row.dp_sum += sum_of_lanes(dp_sum);
  }

  void raise(Row& row, Scalar highest) const {
    if (!(highest > row.highest)) {
      return;
    }
    const double by = (static_cast<double>(highest) - static_cast<double>(row.highest)) * to_log2_ * sign_;
    const double decay = row.highest == -infinity ? 1 : __builtin_exp2(-by);
    row.sum *= decay;
    row.dp_sum *= decay;
    row.highest = highest;
  }

  // What the row's lse is by its own scores, counted from its highest one, in units of log2.
  double own_lse(const Row& row, double highest) const {
    if (!head_.has_sink) {
      return __builtin_log2(row.sum);
    }
    const double sink = head_.sink * log2e - highest;
    return sink > 0 ? sink + __builtin_log2(1 + row.sum * __builtin_exp2(-sink))
                    : __builtin_log2(row.sum + __builtin_exp2(sink));
  }

  // The lse of a row with more keys, of which this call has a part, stays, and so does the delta of such a row's out. A
  // caller that does not say so is recognised where that lse is higher than the row's scores explain.
  void finish(std::int64_t row, const Row& sums) {
    if (sums.highest == -infinity) {
      return;
    }
    const double highest = static_cast<double>(sums.highest) * sign_ * to_log2_;
    const double given = static_cast<double>(lse_of(row)) * log2e - highest;
    const double own = own_lse(sums, highest);
    const double size = static_cast<double>(sums.score_size) * (to_log2_ < 0 ? -to_log2_ : to_log2_) +
                        (highest < 0 ? -highest : highest);
    constexpr double tolerance = sizeof(Scalar) == 4 ? 0x1p-17 : 0x1p-46;  // of the scores' and lse's roundings
    const bool has_more_keys = args_.of_longer_rows || given > own + tolerance * size + 0x1p-6;
    const double lse = has_more_keys ? given : own;
    static_cast<Scalar*>(head_.references)[row] = sums.highest * sign_;
    static_cast<Scalar*>(head_.prepared_lse)[row] =
        static_cast<Scalar>(change_scores(head_.modifiers) ? lse / log2e : lse);
    if (!has_more_keys) {
      static_cast<Scalar*>(head_.delta)[row] = static_cast<Scalar>(sums.dp_sum * __builtin_exp2(-own));
    }
  }

  const BackwardArgs& args_;
  const BackwardHead& head_;
  Layout at_;
  ScoreFactor<Scalar> factor_;  // of what `highest` is to log2
  double to_log2_;
  Scalar sign_;
};

}  // namespace
}  // namespace headway::cpu
