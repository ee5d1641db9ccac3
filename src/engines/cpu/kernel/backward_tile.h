// One tile of the backward pass: a block of queries against a panel of keys, keys in lanes.
//   S = Q K^T, modified      P = 2^(S - lse)      dP = dO V^T      dS = P (dP - delta)
// K^T and V^T are packed panels whose rows are vectors; Q and dO are read in place, one broadcast at a time. P and dS
// leave as [rows][width] in the first- and second-level cache. The FMA units bound it: 2 (D + Dv) operations a pair
// against one exponential. P and dS come straight from the accumulators, which start at 0: subtracting lse and delta in
// the end is faster and more accurate than starting from them. Modifiers and dropout add passes over the tile.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/backward_args.h"
#include "engines/cpu/kernel/exp2.h"
#include "engines/cpu/kernel/key_lanes.h"
#include "engines/cpu/kernel/pack.h"
#include "engines/cpu/kernel/ranges.h"
#include "engines/cpu/kernel/row_blocks.h"
#include "engines/cpu/kernel/strips.h"
#include "engines/cpu/kernel/tile.h"

namespace headway::cpu {
namespace {

constexpr int edge_rows = 16;  // rows that are cut together where ranges end inside a tile

// Rows that a later tile will read, to be fetched while this one computes: far apart, as rows of a matrix of pairs are,
// no hardware sees them coming.
struct Ahead {
  const char* first = nullptr;
  std::int64_t row_bytes = 0;  // from one row to the next
  std::int64_t bytes = 0;      // of a row that will be read
  std::int64_t rows = 0;

  HEADWAY_INLINE void fetch(std::int64_t begin, std::int64_t count) const {
    for (std::int64_t r = begin; r < smaller(begin + count, rows); ++r) {
      for (std::int64_t byte = 0; byte < bytes; byte += 64) {
        __builtin_prefetch(first + r * row_bytes + byte, 0, 3);
      }
    }
  }
};

template <class Scalar>
struct Tile {
  ChunkPlace place;                       // the rows and keys
  Rows<Scalar> query, grad_out;           // from the tile's first row on
  const Scalar *lse, *delta;              // a number a row
  const Scalar *key_panel, *value_panel;  // K^T [D][width] with the scores' factor, V^T [Dv][width]
  Scalar *weights, *gradients, *slopes;   // [rows][width]: P after dropout (not scaled up), dS, softcap's slopes
  std::uint64_t *allowed, *kept;          // a word a row
  Range* spans;                           // the panel's keys that each group of edge_rows reaches
  Ahead query_ahead = {}, grad_out_ahead = {}, mask_ahead = {}, bias_ahead = {};
};

// P and dS of a tile of one head. dS is the gradient of the bias too; softcap's slopes come on top (apply_slopes).
template <class S>
class TileGradients {
 public:
  using Scalar = typename S::Scalar;
  using Vector = typename S::Vector;
  static constexpr int lanes = S::lanes;
  static constexpr int width = S::lanes * S::panel_vectors;
  static_assert(width <= 64 && width % 4 == 0, "a word holds a panel, and a Philox call decides about 4 of its keys");

  // What is packed into K^T: scores arrive in units of log2, or natural or divided by their cap for the modifiers.
  static Scalar score_factor(double scale, const Modifiers& modifiers) {
    const double natural = modifiers.softcap != 0 ? scale / modifiers.softcap : scale;
    return static_cast<Scalar>(change_scores(modifiers) ? natural : natural * log2e);
  }

  TileGradients(const BackwardArgs& args, const BackwardHead& head, const Tile<Scalar>& tile)
      : args_(args), modifiers_(head.modifiers), dropout_(head.dropout), tile_(tile) {}

  // Fills the tile's weights, gradients if `wanted`, allowed and spans. An `edge` has pairs outside the rows' ranges.
  // Returns whether any pair is forbidden.
  HEADWAY_NOINLINE bool run(bool edge, bool wanted) {
    gradients_wanted_ = wanted;
    if (edge) {
      cut_by_ranges();
      return true;
    }
    for (int group = 0; group * edge_rows < tile_.place.rows; ++group) {
      tile_.spans[group] = {0, tile_.place.keys};
    }
    for (int r = 0; r < tile_.place.rows; ++r) {
      tile_.allowed[r] = low_bits(tile_.place.keys);
    }
    const Patch all{0, tile_.place.rows, 0, vectors()};
    forbid_by_mask(all);
    compute(all, modifiers_forbid());
    return any_forbidden(all);
  }

  // dS is the gradient of capped scores; the products that follow want that of the scores before.
  HEADWAY_NOINLINE void apply_slopes() {
    each_vector({0, tile_.place.rows, 0, vectors()}, [&](int r, int at, int shift) HEADWAY_LAMBDA {
      const Vector product = S::load(tile_.gradients + at) * S::load(tile_.slopes + at);
      S::store(tile_.gradients + at, S::select(S::mask_from_bits(tile_.allowed[r] >> shift), product, S::zero()));
    });
  }

 private:
  enum class Product { scores, weights, raw_gradients, gradients };

  bool modifiers_forbid() const { return modifiers_.mask.data != nullptr || modifiers_.bias.data != nullptr; }
  int vectors() const { return (tile_.place.keys + lanes - 1) / lanes; }

  // body(row, offset of the vector in the tile, shift of its bits in the row's words)
  template <class Body>
  HEADWAY_INLINE static void each_vector(const Patch& patch, const Body& body) {
    for (int r = patch.row_begin; r < patch.row_end; ++r) {
      for (int v = patch.vector_begin; v < patch.vector_end; ++v) {
        body(r, r * width + v * lanes, v * lanes);
      }
    }
  }

  // ---- Which pairs ----

  void forbid_by_mask(const Patch& patch) {
    const Matrix& mask = modifiers_.mask;
    if (mask.data == nullptr) {
      return;
    }
    const auto* first = static_cast<const std::uint8_t*>(mask.data) + tile_.place.row_begin * mask.row_stride +
                        tile_.place.key_begin * mask.column_stride;
    for (int r = patch.row_begin; r < patch.row_end; ++r) {
      tile_.allowed[r] &= mask_word<S>(first + r * mask.row_stride, mask.column_stride, tile_.place.keys);
    }
  }

  bool any_forbidden(const Patch& patch) const {
    std::uint64_t common = ~std::uint64_t{0};
    for (int r = patch.row_begin; r < patch.row_end; ++r) {
      common &= tile_.allowed[r];
    }
    return common != low_bits(tile_.place.keys);
  }

  // Groups of rows, each with the vectors that it reaches; neighbours that reach all keys go together.
  void cut_by_ranges() {
    Patch full{0, 0, 0, vectors()};
    for (int r = 0; r < tile_.place.rows; r += edge_rows) {
      Patch patch{r, at_most(tile_.place.rows, r + edge_rows), 0, 0};
      if (cut_group(patch)) {
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
      compute(full, modifiers_forbid());
    }
    full.row_begin = full.row_end = 0;
  }

  // The words, the span and the vectors of a group. Returns whether every row's range holds the whole panel.
  bool cut_group(Patch& patch) {
    const ChunkPlace& place = tile_.place;
    Range span{place.keys, 0};
    bool full = true;
    for (int r = patch.row_begin; r < patch.row_end; ++r) {
      const Range inside = inside_panel(range_of_row(args_.ranges, place.row_begin + r), place.key_begin, place.keys);
      tile_.allowed[r] = range_word(inside);
      full &= inside.begin == 0 && inside.end == place.keys;
      if (inside.begin < inside.end) {
        span = {smaller(span.begin, inside.begin), larger(span.end, inside.end)};
      }
    }
    forbid_by_mask(patch);
    span = span.begin < span.end ? span : Range{0, 0};
    tile_.spans[patch.row_begin / edge_rows] = span;
    patch.vector_begin = static_cast<int>(span.begin) / lanes;
    patch.vector_end = static_cast<int>(span.end + lanes - 1) / lanes;
    return full;
  }

  void clear_outside(const Patch& patch) {
    const Patch sides[] = {{patch.row_begin, patch.row_end, 0, patch.vector_begin},
                           {patch.row_begin, patch.row_end, patch.vector_end, vectors()}};
    for (const Patch& outside : sides) {
      each_vector(outside, [&](int, int at, int) HEADWAY_LAMBDA {
        S::store(tile_.weights + at, S::zero());
        S::store(tile_.gradients + at, S::zero());
      });
    }
  }

  // ---- The numbers of a patch ----

  HEADWAY_NOINLINE void compute(const Patch& patch, bool may_forbid) {
    if (change_scores(modifiers_)) {
      multiply<Product::scores>(patch);
      KeyLaneModifier<S>(modifiers_, args_.ranges)
          .apply(tile_.place, patch, tile_.weights, tile_.slopes, tile_.allowed);
      exponentiate(patch);
    } else {
      multiply<Product::weights>(patch);
    }
    const bool forbids = may_forbid && any_forbidden(patch);
    if (forbids) {
      forbid(patch, tile_.weights);
    }
    if (gradients_wanted_) {
      dropout_.active ? multiply<Product::raw_gradients>(patch) : multiply<Product::gradients>(patch);
    }
    if (dropout_.active) {
      drop(patch);
    }
    if (forbids && gradients_wanted_) {
      forbid(patch, tile_.gradients);
    }
  }

  void exponentiate(const Patch& patch) {
    const Vector to_log2 = S::set(static_cast<Scalar>(log2e));
    each_vector(patch, [&](int r, int at, int) HEADWAY_LAMBDA {
      S::store(tile_.weights + at, exp2<S>((S::load(tile_.weights + at) - S::set(tile_.lse[r])) * to_log2));
    });
  }

  void forbid(const Patch& patch, Scalar* numbers) {
    each_vector(patch, [&](int r, int at, int shift) HEADWAY_LAMBDA {
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
    each_vector(patch, [&](int r, int at, int shift) HEADWAY_LAMBDA {
      const auto kept = S::mask_from_bits(tile_.kept[r] >> shift);
      const Vector weight = S::load(tile_.weights + at);
      const Vector product = S::load(tile_.gradients + at) * S::select(kept, kept_scale, S::zero());
      S::store(tile_.gradients + at, weight * (product - S::set(tile_.delta[r])));
      S::store(tile_.weights + at, weight * S::select(kept, S::set(1), S::zero()));
    });
  }

  // ---- Products ----

  template <Product product>
  void multiply(const Patch& patch) {
    switch (patch.vector_end - patch.vector_begin) {
      case 0: break;
      case 1: multiply_vectors<1, product>(patch); break;
      case 2: multiply_vectors<2, product>(patch); break;
      case 3: multiply_vectors<3, product>(patch); break;
      default: multiply_vectors<S::panel_vectors, product>(patch); break;
    }
  }

  template <int NV, Product product>
  HEADWAY_NOINLINE void multiply_vectors(const Patch& patch) {
    in_strips<broadcasts<S, NV>()>(patch.row_end - patch.row_begin, [&](auto strip, std::int64_t r) HEADWAY_LAMBDA {
      multiply_strip<NV, strip.size, product>(patch.row_begin + r, patch.vector_begin * lanes);
    });
  }

  // NB rows from row r on against NV vectors of keys from key l on.
  template <int NV, int NB, Product product>
  HEADWAY_INLINE void multiply_strip(std::int64_t r, std::int64_t l) {
    constexpr bool of_scores = product == Product::scores || product == Product::weights;
    const Rows<Scalar>& rows = of_scores ? tile_.query : tile_.grad_out;
    (of_scores ? tile_.query_ahead : tile_.grad_out_ahead).fetch(r, NB);
    (of_scores ? tile_.mask_ahead : tile_.bias_ahead).fetch(r, NB);
    Accumulators<S, NV, NB> acc;
    clear<S, NV, NB>(acc);
    accumulate<S, NV, NB, Scalars::across>(acc, (of_scores ? tile_.key_panel : tile_.value_panel) + l, width,
                                           rows.data + r * rows.ld, rows.ld,
                                           of_scores ? args_.head_dim : args_.value_dim);
    HEADWAY_UNROLL
    for (int c = 0; c < NB; ++c) {
      HEADWAY_UNROLL
      for (int v = 0; v < NV; ++v) {
        const std::int64_t at = (r + c) * width + l + v * lanes;
        if constexpr (product == Product::scores) {
          S::store(tile_.weights + at, acc[c][v]);
        } else if constexpr (product == Product::weights) {
          S::store(tile_.weights + at, exp2<S>(acc[c][v] - S::set(tile_.lse[r + c])));
        } else if constexpr (product == Product::raw_gradients) {
          S::store(tile_.gradients + at, acc[c][v]);
        } else {
          S::store(tile_.gradients + at, S::load(tile_.weights + at) * (acc[c][v] - S::set(tile_.delta[r + c])));
        }
      }
    }
  }

  const BackwardArgs& args_;
  const Modifiers& modifiers_;
  const DropoutRule& dropout_;
  const Tile<Scalar>& tile_;
  bool gradients_wanted_ = true;
};

}  // namespace
}  // namespace headway::cpu
