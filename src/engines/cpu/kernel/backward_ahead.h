// What the tiles of a backward task fetch for the tiles after them.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/ahead.h"
#include "engines/cpu/kernel/backward_task.h"
#include "engines/cpu/kernel/backward_tile_data.h"
#include "engines/cpu/kernel/store_as.h"

namespace headway::cpu {
namespace {

// Rows [row, row + up to query_block) of a head's Q or dO, stored as In from `first` on like `like`.
template <class In>
HEADWAY_INLINE Ahead block_ahead(const void* first, const Matrix& like, std::int64_t row, std::int64_t queries,
                                 std::int64_t columns) {
  const std::int64_t bytes = row * like.row_stride * static_cast<std::int64_t>(sizeof(In));
  return ahead_of<In>(row < queries && first != nullptr ? static_cast<const char*>(first) + bytes : nullptr, like,
                      smaller(query_block, queries - row), columns);
}

// The rows of a mask or bias that the tile after the block's panel p wants: the next panel's, or the first panel's of
// the next block.
template <class S, int fold>
Ahead pairs_ahead(const BackwardTask<S, fold>& task, const Matrix& matrix, std::int64_t size, int p) {
  constexpr int width = BackwardTask<S, fold>::width;
  const bool same_rows = p + 1 < task.panel_count();
  const std::int64_t row = task.rows().begin + (same_rows ? 0 : query_block);
  const std::int64_t key = task.group.begin + (same_rows ? (p + 1) * width : 0);
  if (matrix.data == nullptr || matrix.column_stride != 1 || row >= task.args.queries) {
    return {};
  }
  return {static_cast<const char*>(matrix.data) + (row * matrix.row_stride + key) * size, matrix.row_stride * size,
          smaller(width, task.group.end - key) * size, smaller(query_block, task.args.queries - row)};
}

template <class S, int fold>
HEADWAY_INLINE void find_pairs_ahead(const BackwardTask<S, fold>& task, int p, TileAhead& ahead) {
  const Modifiers& modifiers = task.head->modifiers;
  if (modifiers.any) {
    ahead.mask = pairs_ahead(task, modifiers.mask, 1, p);
    ahead.bias = pairs_ahead(task, modifiers.bias, storage_size(modifiers.bias_storage), p);
  }
}

// For the tile of panel p; the next block's rows are fetched during the last panel.
template <class In, class S, int fold>
TileAhead find_ahead(const BackwardTask<S, fold>& task, int p) {
  TileAhead ahead;
  find_pairs_ahead(task, p, ahead);
  if (p + 1 == task.panel_count()) {
    const std::int64_t row = task.rows().begin + query_block;
    const BackwardHead& head = *task.head;
    ahead.query = block_ahead<In>(head.query.data, head.query, row, task.args.queries, task.args.head_dim);
    ahead.grad_out = block_ahead<In>(head.grad_out.data, head.grad_out, row, task.args.queries, task.args.value_dim);
  }
  return ahead;
}

}  // namespace
}  // namespace headway::cpu
