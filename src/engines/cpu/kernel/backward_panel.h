// Tiles that are recomputed, one at a time: a separately packed panel of keys against a block of queries.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/backward_args.h"
#include "engines/cpu/kernel/backward_tile.h"
#include "engines/cpu/kernel/pack.h"
#include "engines/cpu/kernel/row_blocks.h"
#include "engines/cpu/kernel/scratch.h"

namespace headway::cpu {
namespace {

// The rows' references where there are any, else null.
template <class S>
HEADWAY_INLINE const typename S::Scalar* references_of(const BackwardHead& head, std::int64_t row, int rows) {
  const auto* references = static_cast<const typename S::Scalar*>(head.references) + row;
  bool any = false;
  for (int r = 0; r < rows; ++r) {
    any |= references[r] != 0;
  }
  return any ? references : nullptr;
}

template <class S, class In>
class PanelTiles {
 public:
  using Scalar = typename S::Scalar;
  static constexpr int lanes = S::lanes;
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
    const Scalar packed = TileGradients<S>::factor_of(args.scale, head.modifiers).packed;
    for (std::int64_t key = keys.begin; key < keys.end; key += lanes) {
      const int rows = at_most(keys.end - key, lanes);
      pack_scaled<S, In>(args.key, key, rows, args.head_dim, packed, key_panel + (key - keys.begin), width);
      pack_transposed<S, In>(args.value, key, rows, args.value_dim, 1, value_panel + (key - keys.begin), width);
    }
  }

  // The loaded keys against a block of queries.
  Tile<S> tile(const BackwardArgs& args, const BackwardHead& head, const RowBlock& block, const Range& keys) {
    return {{block.begin, block.count, keys.begin, static_cast<int>(keys.end - keys.begin)},
            Packing<S, In>::keys(head.query, block.begin, block.count, args.head_dim, query_copy),
            Packing<S, In>::keys(head.grad_out, block.begin, block.count, args.value_dim, grad_out_copy),
            references_of<S>(head, block.begin, block.count),
            static_cast<const Scalar*>(head.prepared_lse) + block.begin,
            static_cast<const Scalar*>(head.delta) + block.begin,
            key_panel,
            value_panel,
            weights,
            gradients,
            slopes,
            allowed,
            kept,
            spans};
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
