// The gradient of a bias that repeats along the batch, heads, queries or keys: dS summed over them, in double. A task
// owns a region of dbias and computes the tiles that fall into it once more, always in the order batch, head, panel of
// keys, block of queries; so no two tasks write to one place and nothing of size Sq x Sk is stored. Two of the five
// products are repeated, which is what this costs; each panel of K and V is packed again per head and region.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/backward_args.h"
#include "engines/cpu/kernel/backward_tile.h"
#include "engines/cpu/kernel/pack.h"
#include "engines/cpu/kernel/row_blocks.h"
#include "engines/cpu/kernel/scratch.h"
#include "engines/cpu/kernel/store_as.h"

namespace headway::cpu {
namespace {

template <class S, class In>
class BiasBackward {
 public:
  using Scalar = typename S::Scalar;
  static constexpr int lanes = S::lanes;
  static constexpr int width = S::lanes * S::panel_vectors;

  // A region's borders are multiples of these where its rows or keys are not summed over, and it holds one such block.
  static constexpr int region_rows = query_block;
  static constexpr int region_keys = width;

  // Scratch of a task, in Scalars.
  static std::int64_t scratch_size(const BiasRegion& region) { return Layout(region, nullptr).scratch.used; }

  BiasBackward(const BiasRegion& region, Scalar* scratch) : region_(region), at_(region, scratch) {}

  HEADWAY_NOINLINE void run() {
    for (int n = 0; n < region_rows * region_keys; ++n) {
      at_.sums[n] = 0;
    }
    for (std::int64_t b = region_.batch_begin; b < region_.batch_end; ++b) {
      for (std::int64_t h = region_.head_begin; h < region_.head_end; ++h) {
        const BackwardArgs* sequences = region_.sequences + b * region_.kv_heads;
        args_ = sequences + h / sequences->head_count;
        head_ = args_->heads + h % sequences->head_count;
        add_head();
      }
    }
    store_as(region_.dbias, region_.dbias_storage, region_.sum_rows ? 0 : region_.row_begin,
             region_.sum_rows ? 1 : region_.row_end - region_.row_begin, region_.sum_keys ? 0 : region_.key_begin,
             region_.sum_keys ? 1 : region_.key_end - region_.key_begin, at_.sums, region_keys);
  }

 private:
  struct Layout {
    Scratch<Scalar> scratch;
    Scalar *key_panel, *value_panel, *weights, *gradients, *slopes, *query_copy, *grad_out_copy;
    std::uint64_t *allowed, *kept;
    Range* spans;
    double* sums;  // [region_rows][region_keys]; what is summed over stays in the first row or column

    Layout(const BiasRegion& region, Scalar* base) : scratch{base} {
      const std::int64_t head_dim = region.sequences->head_dim;
      const std::int64_t value_dim = region.sequences->value_dim;
      key_panel = scratch.template take<Scalar>(head_dim * width);
      value_panel = scratch.template take<Scalar>(value_dim * width);
      weights = scratch.template take<Scalar>(query_block * width);
      gradients = scratch.template take<Scalar>(query_block * width);
      slopes = scratch.template take<Scalar>(query_block * width);
      query_copy = scratch.template take<Scalar>(query_block * head_dim);
      grad_out_copy = scratch.template take<Scalar>(query_block * value_dim);
      allowed = scratch.template take<std::uint64_t>(query_block);
      kept = scratch.template take<std::uint64_t>(query_block);
      spans = scratch.template take<Range>(query_block / edge_rows);
      sums = scratch.template take<double>(region_rows * region_keys);
    }
  };

  void add_head() {
    const std::int64_t keys_end = smaller(region_.key_end, args_->ranges.keys);
    const std::int64_t rows_end = smaller(region_.row_end, args_->queries);
    for (std::int64_t key = region_.key_begin; key < keys_end; key += width) {
      const Range keys{key, smaller(key + width, keys_end)};
      bool loaded = false;
      for (std::int64_t row = region_.row_begin; row < rows_end; row += query_block) {
        const RowBlock block = row_block(*args_, row / query_block);
        if (overlap(block.hull, keys)) {
          load_panel(keys, loaded);
          loaded = true;
          add_tile(block, keys);
        }
      }
    }
  }

  void load_panel(const Range& keys, bool loaded) {
    if (loaded) {
      return;
    }
    const Scalar factor = TileGradients<S>::score_factor(args_->scale, head_->modifiers);
    for (std::int64_t key = keys.begin; key < keys.end; key += lanes) {
      const int rows = at_most(keys.end - key, lanes);
      pack_transposed<S, In>(args_->key, key, rows, args_->head_dim, factor, at_.key_panel + (key - keys.begin), width);
      pack_transposed<S, In>(args_->value, key, rows, args_->value_dim, 1, at_.value_panel + (key - keys.begin), width);
    }
  }

  void add_tile(const RowBlock& block, const Range& keys) {
    const ChunkPlace place{block.begin, block.count, keys.begin, static_cast<int>(keys.end - keys.begin)};
    const Tile<S> tile{
        place,
        Packing<S, In>::keys(head_->query, block.begin, block.count, args_->head_dim, at_.query_copy),
        Packing<S, In>::keys(head_->grad_out, block.begin, block.count, args_->value_dim, at_.grad_out_copy),
        static_cast<const Scalar*>(head_->prepared_lse) + block.begin,
        static_cast<const Scalar*>(head_->delta) + block.begin,
        at_.key_panel,
        at_.value_panel,
        at_.weights,
        at_.gradients,
        at_.slopes,
        at_.allowed,
        at_.kept,
        at_.spans};
    TileGradients<S>(*args_, *head_, tile).run(block.core.begin > keys.begin || block.core.end < keys.end, true);
    for (int r = 0; r < place.rows; ++r) {
      add_row(at_.gradients + r * width, at_.sums + (region_.sum_rows ? 0 : r) * region_keys, place.keys);
    }
  }

  void add_row(const Scalar* gradients, double* sums, int keys) const {
    if (region_.sum_keys) {
      for (int key = 0; key < keys; ++key) {
        sums[0] += static_cast<double>(gradients[key]);
      }
      return;
    }
    for (int key = 0; key < keys; ++key) {
      sums[key] += static_cast<double>(gradients[key]);
    }
  }

  const BiasRegion& region_;
  Layout at_;
  const BackwardArgs* args_ = nullptr;
  const BackwardHead* head_ = nullptr;
};

}  // namespace
}  // namespace headway::cpu
