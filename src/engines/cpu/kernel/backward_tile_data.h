// What a tile of the backward pass reads and fills.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/ahead.h"
#include "engines/cpu/kernel/modifiers.h"
#include "engines/cpu/kernel/operands.h"
#include "engines/cpu/kernel/ranges.h"
#include "engines/cpu/kernel/tile.h"

namespace headway::cpu {
namespace {

constexpr int edge_rows = 16;  // rows that are cut together where ranges end inside a tile

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

template <class S>
struct Tile {
  using Scalar = typename S::Scalar;
  using Operand = typename Operands<S>::Scalar;
  ChunkPlace place;                // the rows and keys
  OperandRows<S> query, grad_out;  // from the tile's first row on
  // A number a row: scores are counted from `references`, which are 0 where it is null, and what is left of lse from
  // there.
  const Scalar *references, *lse, *delta;
  const Operand *key_panel, *value_panel;  // K^T [D][width], V^T [Dv][width]; scalars of K^T have ScoreFactor::packed
  Scalar *weights, *gradients, *slopes;    // [rows][width]: P after dropout (not scaled up), dS, softcap's slopes
  std::uint64_t *allowed, *kept;           // a word a row
  Range* spans;                            // the panel's keys that each group of edge_rows reaches
  const std::uint64_t* wanted = nullptr;   // a word a row: pairs that count as forbidden where it is 0; null: none
  // What the tile fetches on its way.
  const Ahead *query_ahead = &nothing_ahead, *grad_out_ahead = &nothing_ahead;
  const Ahead *mask_ahead = &nothing_ahead, *bias_ahead = &nothing_ahead;
  // Whether a tile of the same rows had exponents out of the short exponential's reach, so that others will; null:
  // none.
  bool* seen_far = nullptr;
  TilePairs<S> pairs = {};

  // Two vectors of a row, with zeros for what is not allowed and for a row that is not there.
  typename Operands<S>::Vector rounded(const Scalar* numbers, int r, int v) const {
    if (r >= place.rows) {
      return Operands<S>::zero();
    }
    constexpr int lanes = S::lanes, width = S::lanes * S::panel_vectors;
    const auto part = [&](int vector) HEADWAY_LAMBDA {
      return S::select(S::mask_from_bits(allowed[r] >> vector * lanes), S::load(numbers + r * width + vector * lanes),
                       S::zero());
    };
    return Operands<S>::rounded(part(v), part(v + 1));
  }
};

}  // namespace
}  // namespace headway::cpu
