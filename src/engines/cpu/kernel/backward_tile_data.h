// What a tile of the backward pass reads and fills.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/ahead.h"
#include "engines/cpu/kernel/backward_args.h"
#include "engines/cpu/kernel/key_lanes.h"
#include "engines/cpu/kernel/modifiers.h"
#include "engines/cpu/kernel/operands.h"
#include "engines/cpu/kernel/ranges.h"
#include "engines/cpu/kernel/score_factor.h"
#include "engines/cpu/kernel/tile.h"

namespace headway::cpu {
namespace {

constexpr int edge_rows = 16;  // rows that are cut together where ranges end inside a tile

// Dot products flush what is below 2^-126, so P and dS are 2^raised times as large there; `lowering` takes that back.
template <class S>
constexpr int raised = Operands<S>::fold > 1 ? 32 : 0;
template <class S>
constexpr typename S::Scalar lowering = static_cast<typename S::Scalar>(1) /
                                        static_cast<typename S::Scalar>(std::uint64_t{1} << raised<S>);

// What makes scores of a tile's products. Scores are in units of log2, or natural or divided by their cap for the
// modifiers. A cap does not count for what K^T takes in: beside a large one K would lose its bits.
template <class S>
ScoreFactor<typename S::Scalar> tile_factor(double scale, const Modifiers& modifiers) {
  using Scalar = typename S::Scalar;
  ScoreFactor<Scalar> factor =
      score_factor<Scalar>(change_scores(modifiers) ? scale : scale * log2e, Operands<S>::fold == 1);
  if (modifiers.softcap != 0) {
    const double packed = factor.packed == 0 ? 1 : static_cast<double>(factor.packed);
    const auto split = split_factor<Scalar>(scale / modifiers.softcap / packed);
    factor = {factor.packed, split.second, split.first};
  }
  return factor;
}

// A number a row: scores are counted from `references`, which are 0 where it is null, and what is left of lse from
// there.
template <class S>
struct RowNumbers {
  const typename S::Scalar *references, *lse, *delta;
};

// Those of `rows` rows of a head from `row` on. Pairs with a row that has a reference are not computed by dot products.
template <class S>
HEADWAY_INLINE RowNumbers<S> row_numbers(const BackwardHead& head, std::int64_t row, int rows) {
  using Scalar = typename S::Scalar;
  const Scalar* references = static_cast<const Scalar*>(head.references) + row;
  bool any = false;
  for (int r = 0; Operands<S>::fold == 1 && r < rows; ++r) {
    any |= references[r] != 0;
  }
  return {any ? references : nullptr, static_cast<const Scalar*>(head.prepared_lse) + row,
          static_cast<const Scalar*>(head.delta) + row};
}

// The next operands of bf16 dot products: P and dS rounded, in pairs of queries, and dS also in pairs of keys.
template <class S>
struct TilePairs {
  typename Operands<S>::Scalar *weights, *gradients;  // [rows / 2][width]
  typename Operands<S>::Scalar* gradient_rows;        // [rows][width / 2]

  // Two vectors of keys of rows r and r + 1.
  template <bool of_weights>
  HEADWAY_INLINE void store(int r, int v, typename Operands<S>::Vector even, typename Operands<S>::Vector odd) const {
    constexpr int lanes = S::lanes, width = S::lanes * S::panel_vectors;
    Operands<S>::store_interleaved((of_weights ? weights : gradients) + r / 2 * width + v * lanes, 2 * lanes, even,
                                   odd);
    if constexpr (!of_weights) {
      Operands<S>::store(gradient_rows + (r * width + v * lanes) / 2, even);
      Operands<S>::store(gradient_rows + ((r + 1) * width + v * lanes) / 2, odd);
    }
  }
};

// What a tile fetches on its way, each a row a row of its own.
struct TileAhead {
  Ahead query, grad_out, mask, bias;
};
constexpr TileAhead nothing_ahead;

template <class S>
struct Tile {
  using Scalar = typename S::Scalar;
  using Operand = typename Operands<S>::Scalar;
  ChunkPlace place;                // the rows and keys
  OperandRows<S> query, grad_out;  // from the tile's first row on
  RowNumbers<S> numbers;
  const Operand *key_panel, *value_panel;  // K^T [D][width], V^T [Dv][width]; scalars of K^T have ScoreFactor::packed
  Scalar *weights, *gradients, *slopes;    // [rows][width]: P after dropout (not scaled up), dS, softcap's slopes
  std::uint64_t *allowed, *kept;           // a word a row
  Range* spans;                            // the panel's keys that each group of edge_rows reaches
  const std::uint64_t* wanted = nullptr;   // a word a row: pairs that count as forbidden where it is 0; null: none
  const TileAhead* ahead = &nothing_ahead;
  // Whether a tile of the same rows had exponents out of the short exponential's reach, so that others will; null:
  // none.
  bool* seen_far = nullptr;
  TilePairs<S> pairs = {};

  // Vectors that hold keys.
  int vectors() const { return (place.keys + S::lanes - 1) / S::lanes; }

  // Two vectors of a row, with zeros for what is not allowed and for a row that is not there.
  typename Operands<S>::Vector rounded(const Scalar* from, int r, int v) const {
    if (r >= place.rows) {
      return Operands<S>::zero();
    }
    constexpr int lanes = S::lanes, width = S::lanes * S::panel_vectors;
    const auto part = [&](int vector) HEADWAY_LAMBDA {
      return S::select(S::mask_from_bits(allowed[r] >> vector * lanes), S::load(from + r * width + vector * lanes),
                       S::zero());
    };
    return Operands<S>::rounded(part(v), part(v + 1));
  }
};

// body(row, offset of the vector in the tile, shift of its bits in the row's words)
template <class S, class Body>
HEADWAY_INLINE void for_vectors(const Patch& patch, const Body& body) {
  constexpr int lanes = S::lanes, width = S::lanes * S::panel_vectors;
  for (int r = patch.row_begin; r < patch.row_end; ++r) {
    for (int v = patch.vector_begin; v < patch.vector_end; ++v) {
      body(r, r * width + v * lanes, v * lanes);
    }
  }
}

}  // namespace
}  // namespace headway::cpu
