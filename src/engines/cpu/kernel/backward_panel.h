// A panel of keys as tiles read it, and tiles that are recomputed: one at a time, against a block of queries.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/backward_args.h"
#include "engines/cpu/kernel/backward_tile_data.h"
#include "engines/cpu/kernel/pack.h"
#include "engines/cpu/kernel/row_blocks.h"
#include "engines/cpu/kernel/scratch.h"

namespace headway::cpu {
namespace {

// K^T [D][width] with what it takes in of the scores' factor, and V^T [Dv][width], of up to `width` keys.
template <class S, class In>
void pack_panel(const BackwardArgs& args, const ScoreFactor<typename S::Scalar>& factor, const Range& keys,
                typename S::Scalar* key_panel, typename S::Scalar* value_panel) {
  constexpr int lanes = S::lanes, width = S::lanes * S::panel_vectors;
  for (std::int64_t key = keys.begin; key < keys.end; key += lanes) {
    const int rows = at_most(keys.end - key, lanes);
    const std::int64_t lane = key - keys.begin;
    pack_scaled<S, In>(args.key, key, rows, args.head_dim, factor.packed, key_panel + lane, width);
    pack_transposed<S, In>(args.value, key, rows, args.value_dim, 1, value_panel + lane, width);
  }
}

template <class S, class In>
class PanelTiles {
 public:
  using Scalar = typename S::Scalar;
  static constexpr int width = S::lanes * S::panel_vectors;

  PanelTiles(const BackwardArgs& shape, Scalar* base) : scratch{base} {
    key_panel = scratch.template take<Scalar>(shape.head_dim * width);
    value_panel = scratch.template take<Scalar>(shape.value_dim * width);
    weights = scratch.template take<Scalar>(query_block * width);
    gradients = scratch.template take<Scalar>(query_block * width);
    slopes = scratch.template take<Scalar>(query_block * width);
    query_copy = scratch.template take<Scalar>(query_block * shape.head_dim);
    grad_out_copy = scratch.template take<Scalar>(query_block * shape.value_dim);
    allowed = scratch.template take<std::uint64_t>(query_block);
    kept = scratch.template take<std::uint64_t>(query_block);
    spans = scratch.template take<Range>(query_block / edge_rows);
  }

  void load(const BackwardArgs& args, const BackwardHead& head, const Range& keys) {
    pack_panel<S, In>(args, tile_factor<S>(args.scale, head.modifiers), keys, key_panel, value_panel);
  }

  // The loaded keys against a block of queries.
  Tile<S> tile(const BackwardArgs& args, const BackwardHead& head, const RowBlock& block, const Range& keys) {
    return {.place = {block.begin, block.count, keys.begin, static_cast<int>(keys.end - keys.begin)},
            .query = Packing<S, In>::keys(head.query, block.begin, block.count, args.head_dim, query_copy),
            .grad_out = Packing<S, In>::keys(head.grad_out, block.begin, block.count, args.value_dim, grad_out_copy),
            .numbers = row_numbers<S>(head, block.begin, block.count),
            .key_panel = key_panel,
            .value_panel = value_panel,
            .weights = weights,
            .gradients = gradients,
            .slopes = slopes,
            .allowed = allowed,
            .kept = kept,
            .spans = spans};
  }

  static bool has_edge(const RowBlock& block, const Range& keys) {
    return block.core.begin > keys.begin || block.core.end < keys.end;
  }

  Scratch<Scalar> scratch;
  Scalar *key_panel, *value_panel, *weights, *gradients, *slopes, *query_copy, *grad_out_copy;
  std::uint64_t *allowed, *kept;
  Range* spans;
};

}  // namespace
}  // namespace headway::cpu
