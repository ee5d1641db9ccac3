// The tiles of a block of queries and the panels of a group of keys.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/backward_task.h"
#include "engines/cpu/kernel/backward_tile.h"
#include "engines/cpu/kernel/modifiers.h"
#include "engines/cpu/kernel/store_as.h"

namespace headway::cpu {
namespace {

template <class S, int fold = 1>
class BlockTiles {
  using Scalar = typename S::Scalar;
  using Task = BackwardTask<S, fold>;
  static constexpr int width = Task::width;

 public:
  explicit BlockTiles(const Task& task) : task_(task) {}

  TileAhead ahead;  // for the next tile to fetch

  // `wanted`, [panel][query_block]: see Tile.
  void start_block(const std::uint64_t* wanted) {
    wanted_ = wanted;
    seen_far_ = false;
  }

  // The tile of panel p in the operands of vocabulary T, whose `key_panels` and `value_panels` are the group's.
  template <class T>
  Tile<T> tile(int p, const OperandRows<T>& query, const OperandRows<T>& grad_out,
               const typename Operands<T>::Scalar* key_panels, const typename Operands<T>::Scalar* value_panels) {
    return {.place = task_.place_of(p),
            .query = query,
            .grad_out = grad_out,
            .numbers = row_numbers<T>(*task_.head, task_.rows().begin, task_.rows().count),
            .key_panel = key_panels + p * folded<T>(task_.args.head_dim) * width,
            .value_panel = value_panels + p * folded<T>(task_.args.value_dim) * width,
            .weights = task_.weights_of(p),
            .gradients = task_.gradients_of(p),
            .slopes = task_.at.slopes,
            .allowed = task_.allowed_of(p),
            .kept = task_.at.kept,
            .spans = task_.spans_of(p),
            .wanted = wanted_ == nullptr ? nullptr : wanted_ + p * query_block,
            .ahead = &ahead,
            .seen_far = &seen_far_};
  }

  // P and dS of panel p, from the task's own panels, and the bias's gradient. Returns whether any pair is forbidden.
  bool compute(int p, const OperandRows<S>& query, const OperandRows<S>& grad_out) {
    const Tile<S> own = tile<S>(p, query, grad_out, task_.at.key_panels, task_.at.value_panels);
    TileGradients<S> gradients(task_.args, *task_.head, own);
    const bool forbids = gradients.run(task_.has_edge(p), task_.wants_gradients());
    if (task_.head->dbias.data != nullptr) {
      wanted_ == nullptr ? store_bias(own.place, own.gradients) : store_wanted_bias(own);
    }
    if (task_.head->modifiers.softcap != 0) {
      gradients.apply_slopes();
    }
    return forbids;
  }

  void store_bias(const ChunkPlace& place, const Scalar* gradients) const {
    store_as(task_.head->dbias, task_.head->dbias_storage, place.row_begin, place.rows, place.key_begin, place.keys,
             gradients, width);
  }

  // Whether no row of the block sees a key of the panel, as behind the end of a padded sequence.
  bool is_out_of_reach(int p) const {
    return !task_.reaches(task_.keys_of(p)) || forbid_all<S>(task_.head->modifiers, task_.place_of(p));
  }

  // A tile without pairs.
  void skip(int p) const {
    for (int group = 0; group * edge_rows < task_.rows().count; ++group) {
      task_.spans_of(p)[group] = {0, 0};
    }
    for (int r = 0; r < task_.rows().count; ++r) {
      task_.allowed_of(p)[r] = 0;
    }
    clear_bias(task_.keys_of(p));
  }

  // The gradient of a bias at keys that no row of the block sees.
  void clear_bias(const Range& keys) const {
    const Scalar zeros[width] = {};
    for (std::int64_t key = keys.begin; task_.head->dbias.data != nullptr && key < keys.end; key += width) {
      store_as(task_.head->dbias, task_.head->dbias_storage, task_.rows().begin, task_.rows().count, key,
               smaller(keys.end - key, width), zeros, 0);
    }
  }

 private:
  void store_wanted_bias(const Tile<S>& own) const {
    const ChunkPlace& place = own.place;
    for (int n = 0; n < place.rows * width; ++n) {
      const int r = n / width, key = n % width;
      if (key < place.keys && (own.wanted[r] >> key & 1) != 0) {
        store_as(task_.head->dbias, task_.head->dbias_storage, place.row_begin + r, 1, place.key_begin + key, 1,
                 own.gradients + n, 0);
      }
    }
  }

  const Task& task_;
  const std::uint64_t* wanted_ = nullptr;
  bool seen_far_ = false;  // see Tile
};

}  // namespace
}  // namespace headway::cpu
