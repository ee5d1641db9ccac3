// One tile of the backward pass: a block of queries against a panel of keys, keys in lanes.
//   S = Q K^T, modified      P = 2^(S - lse)      dP = dO V^T      dS = P (dP - delta)
// K^T and V^T are packed panels whose rows are vectors; Q and dO are read in place, one broadcast at a time. P and dS
// leave as [rows][width] in the first- and second-level cache. The FMA units bound it: 2 (D + Dv) operations a pair
// against one exponential. P and dS come straight from the accumulators, which start at 0: subtracting lse and delta in
// the end is faster and more accurate than starting from them; where the vocabulary can, a strip's exponentials run
// between the next strip's products. Modifiers and dropout add passes over the tile.
// With bf16 dot products Q, K, dO and V are pairs along d, and P and dS leave as pairs too, straight from the registers
// where nothing changes them later.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/backward_args.h"
#include "engines/cpu/kernel/backward_tile_data.h"
#include "engines/cpu/kernel/backward_tile_permission.h"
#include "engines/cpu/kernel/backward_tile_products.h"
#include "engines/cpu/kernel/backward_tile_weights.h"
#include "engines/cpu/kernel/key_lanes.h"
#include "engines/cpu/kernel/operands.h"
#include "engines/cpu/kernel/pack.h"

namespace headway::cpu {
namespace {

// P and dS of a tile of one head. dS is the gradient of the bias too; softcap's slopes come on top (apply_slopes).
template <class S>
class TileGradients {
  using Scalar = typename S::Scalar;
  using Vector = typename S::Vector;
  static constexpr int lanes = S::lanes, width = S::lanes * S::panel_vectors, fold = Operands<S>::fold;
  static_assert(width <= 64 && width % 4 == 0, "a word holds a panel, and a Philox call decides about 4 of its keys");

 public:
  TileGradients(const BackwardArgs& args, const BackwardHead& head, const Tile<S>& tile)
      : args_(args),
        modifiers_(head.modifiers),
        dropout_(head.dropout),
        tile_(tile),
        permission_(head.ranges, head.modifiers, tile),
        weights_(tile, tile_factor<S>(args.scale, head.modifiers)),
        products_(args, head, tile, weights_) {}

  // Fills the tile's weights, gradients if `wanted`, allowed and spans. An `edge` has pairs outside the rows' ranges.
  // Returns whether any pair is forbidden.
  HEADWAY_NOINLINE bool run(bool edge, bool wanted) {
    gradients_wanted_ = wanted;
    products_.keeps_pairs = fold > 1 && !edge && weighs_in_registers() && !change_scores(modifiers_) &&
                            !dropout_.active && tile_.wanted == nullptr && tile_.place.keys == width;
    if (edge) {
      cut_by_ranges();
      return true;
    }
    const Patch all = whole();
    permission_.take_all(all);
    compute(all, permission_.may_forbid());
    return permission_.any_forbidden(all);
  }

  // Fills `weights` with the scores as they are before the exponential, or where nothing modifies them with the
  // products that the factor makes scores of, and `gradients` with dO V^T. Both mean nothing where `allowed` is 0.
  HEADWAY_NOINLINE void run_products(bool edge) {
    only_products_ = true;
    run(edge, true);
  }

  // dS is the gradient of capped scores; the products that follow want that of the scores before.
  HEADWAY_NOINLINE void apply_slopes() const {
    for_vectors<S>(whole(), [&](int r, int at, int shift) HEADWAY_LAMBDA {
      const Vector product = S::load(tile_.gradients + at) * S::load(tile_.slopes + at);
      S::store(tile_.gradients + at, S::select(S::mask_from_bits(tile_.allowed[r] >> shift), product, S::zero()));
    });
  }

  // The pairs, where they did not leave the registers as such.
  HEADWAY_NOINLINE void make_pairs() const {
    if (products_.keeps_pairs) {
      return;
    }
    for (int r = 0; r < tile_.place.rows; r += 2) {
      for (int v = 0; v < S::panel_vectors; v += 2) {
        tile_.pairs.template store<true>(r, v, tile_.rounded(tile_.weights, r, v),
                                         tile_.rounded(tile_.weights, r + 1, v));
        if (gradients_wanted_) {
          tile_.pairs.template store<false>(r, v, tile_.rounded(tile_.gradients, r, v),
                                            tile_.rounded(tile_.gradients, r + 1, v));
        }
      }
    }
  }

 private:
  Patch whole() const { return {0, tile_.place.rows, 0, tile_.vectors()}; }

  // Whether the weights of scores that nothing modifies come straight from their products.
  bool weighs_in_registers() const { return tile_.numbers.references == nullptr && weights_.factor.power == 1; }

  // ---- Which vectors ----

  // Groups of rows, each with the vectors that it reaches; neighbours that reach all keys go together.
  void cut_by_ranges() {
    Patch full{0, 0, 0, tile_.vectors()};
    for (int r = 0; r < tile_.place.rows; r += edge_rows) {
      Patch patch{r, at_most(tile_.place.rows, r + edge_rows), 0, 0};
      if (permission_.cut_group(patch)) {
        full.row_begin = full.row_begin == full.row_end ? patch.row_begin : full.row_begin;
        full.row_end = patch.row_end;
        continue;
      }
      compute_full(full);
      compute(patch, true);
      clear_outside(patch);
    }
    compute_full(full);
  }

  void compute_full(Patch& full) {
    if (full.row_begin < full.row_end) {
      compute(full, permission_.may_forbid());
    }
    full.row_begin = full.row_end = 0;
  }

  void clear_outside(const Patch& patch) {
    const Patch sides[] = {{patch.row_begin, patch.row_end, 0, patch.vector_begin},
                           {patch.row_begin, patch.row_end, patch.vector_end, tile_.vectors()}};
    for (const Patch& outside : sides) {
      for_vectors<S>(outside, [&](int, int at, int) HEADWAY_LAMBDA {
        S::store(tile_.weights + at, S::zero());
        S::store(tile_.gradients + at, S::zero());
      });
    }
  }

  // ---- The numbers of a patch ----

  HEADWAY_NOINLINE void compute(const Patch& patch, bool may_forbid) {
    if (only_products_) {
      compute_scores(patch);
      products_.template multiply<Product::raw_gradients>(patch);
      return;
    }
    if (fold == 1 && only_masks_scores()) {
      products_.template multiply<Product::natural_weights>(patch);
    } else if (change_scores(modifiers_)) {
      compute_scores(patch);
      weights_.exponentiate(patch);
    } else if (!weighs_in_registers()) {
      compute_scores(patch);
      weights_.weigh_from_references(patch);
    } else {
      products_.template multiply<Product::weights>(patch);
    }
    const bool forbids = may_forbid && permission_.any_forbidden(patch);
    if (forbids) {
      forbid(patch, tile_.weights);
    }
    if (gradients_wanted_) {
      dropout_.active ? products_.template multiply<Product::raw_gradients>(patch)
                      : products_.template multiply<Product::gradients>(patch);
    }
    if (dropout_.active) {
      drop(patch);
    }
    if (forbids && gradients_wanted_) {
      forbid(patch, tile_.gradients);
    }
  }

  // Modified scores, or products.
  void compute_scores(const Patch& patch) {
    products_.template multiply<Product::scores>(patch);
    if (change_scores(modifiers_)) {
      KeyLaneModifier<S>(modifiers_, args_.ranges)
          .apply(tile_.place, patch, tile_.weights, tile_.slopes, tile_.allowed);
    }
  }

  bool only_masks_scores() const {
    return change_scores(modifiers_) && modifiers_.softcap == 0 && !modifiers_.has_alibi &&
           modifiers_.bias.data == nullptr;
  }

  void forbid(const Patch& patch, Scalar* numbers) {
    for_vectors<S>(patch, [&](int r, int at, int shift) HEADWAY_LAMBDA {
      const auto allowed = S::mask_from_bits(tile_.allowed[r] >> shift);
      S::store(numbers + at, S::select(allowed, S::load(numbers + at), S::zero()));
    });
  }

  // dS = P (keep dP / (1 - p) - delta) and P = keep P. Products, so that what is NaN stays NaN.
  void drop(const Patch& patch) {
    for (int r = patch.row_begin; r < patch.row_end; ++r) {
      tile_.kept[r] = kept_word<S>(dropout_, tile_.place.row_begin + r, tile_.place.key_begin, tile_.place.keys);
    }
    const Vector kept_scale = S::set(static_cast<Scalar>(dropout_.kept_scale));
    for_vectors<S>(patch, [&](int r, int at, int shift) HEADWAY_LAMBDA {
      const auto kept = S::mask_from_bits(tile_.kept[r] >> shift);
      const Vector weight = S::load(tile_.weights + at);
      const Vector product = S::load(tile_.gradients + at) * S::select(kept, kept_scale, S::zero());
      S::store(tile_.gradients + at, weight * (product - S::set(tile_.numbers.delta[r])));
      S::store(tile_.weights + at, weight * S::select(kept, S::set(1), S::zero()));
    });
  }

  const BackwardArgs& args_;
  const Modifiers& modifiers_;
  const DropoutRule& dropout_;
  const Tile<S>& tile_;
  const TilePermission<S> permission_;  // which pairs are allowed
  const TileWeights<S> weights_;        // from products to P
  TileProducts<S> products_;            // Q K^T and dO V^T
  bool only_products_ = false;
  bool gradients_wanted_ = true;
};

}  // namespace
}  // namespace headway::cpu
