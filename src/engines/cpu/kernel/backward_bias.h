// The gradient of a bias that repeats along the batch, heads, queries or keys: dS summed over them, one type wider than
// the scores. A task owns a region of dbias and computes the tiles that fall into it once more, always in the order
// batch, head, panel of keys, block of queries; so no two tasks write to one place and nothing of size Sq x Sk is
// stored. Two of the five products are repeated, which is what this costs; each panel of K and V is packed again per
// head and region.
#pragma once

#include <cstdint>
#include <type_traits>

#include "engines/cpu/kernel/backward_args.h"
#include "engines/cpu/kernel/backward_panel.h"
#include "engines/cpu/kernel/backward_tile.h"
#include "engines/cpu/kernel/store_as.h"

namespace headway::cpu {
namespace {

template <class S, class In>
class BiasBackward {
 public:
  using Scalar = typename S::Scalar;
  using Wider = std::conditional_t<sizeof(Scalar) == 8, long double, double>;
  static constexpr int width = S::lanes * S::panel_vectors;

  // A region's borders are multiples of these where its rows or keys are not summed over, and it holds one such block.
  static constexpr int region_rows = query_block;
  static constexpr int region_keys = width;

  // Scratch of a task, in Scalars.
  static std::int64_t scratch_size(const BiasRegion& region) { return Layout(region, nullptr).tiles.scratch.used; }

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
    PanelTiles<S, In> tiles;
    Wider* sums;  // [region_rows][region_keys]; what is summed over stays in the first row or column

    Layout(const BiasRegion& region, Scalar* base) : tiles(*region.sequences, base) {
      sums = tiles.scratch.template take<Wider>(region_rows * region_keys);
    }
  };

  void add_head() {
    const std::int64_t keys_end = smaller(region_.key_end, args_->ranges.keys);
    const std::int64_t rows_end = smaller(region_.row_end, args_->queries);
    for (std::int64_t key = region_.key_begin; key < keys_end; key += width) {
      const Range keys{key, smaller(key + width, keys_end)};
      bool loaded = false;
      for (std::int64_t row = region_.row_begin; row < rows_end; row += query_block) {
        const RowBlock block = row_block(*args_, head_->ranges, row / query_block);
        if (block_sees_any(head_->ranges, block, keys)) {
          if (!loaded) {
            at_.tiles.load(*args_, *head_, keys);
          }
          loaded = true;
          add_tile(block, keys);
        }
      }
    }
  }

  void add_tile(const RowBlock& block, const Range& keys) {
    const Tile<S> tile = at_.tiles.tile(*args_, *head_, block, keys);
    TileGradients<S>(*args_, *head_, tile).run(PanelTiles<S, In>::has_edge(block, keys), true);
    for (int r = 0; r < block.count; ++r) {
      add_row(tile.gradients + r * width, at_.sums + (region_.sum_rows ? 0 : r) * region_keys, tile.place.keys);
    }
  }

  void add_row(const Scalar* gradients, Wider* sums, int keys) const {
    if (region_.sum_keys) {
      for (int key = 0; key < keys; ++key) {
        sums[0] += static_cast<Wider>(gradients[key]);
      }
      return;
    }
    for (int key = 0; key < keys; ++key) {
      sums[key] += static_cast<Wider>(gradients[key]);
    }
  }

  const BiasRegion& region_;
  Layout at_;
  const BackwardArgs* args_ = nullptr;
  const BackwardHead* head_ = nullptr;
};

}  // namespace
}  // namespace headway::cpu
