// The blocks of a backward task in scalars: a group's keys as panels, and what a block of queries adds to all
// gradients.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/backward_ahead.h"
#include "engines/cpu/kernel/backward_block_tiles.h"
#include "engines/cpu/kernel/backward_key_gradients.h"
#include "engines/cpu/kernel/backward_panel.h"
#include "engines/cpu/kernel/backward_query_gradients.h"
#include "engines/cpu/kernel/backward_task.h"
#include "engines/cpu/kernel/operands.h"
#include "engines/cpu/kernel/pack.h"

namespace headway::cpu {
namespace {

// The task's panels of K^T and V^T.
template <class In, class S, int fold>
void pack_panels(const BackwardTask<S, fold>& task) {
  constexpr int width = BackwardTask<S, fold>::width;
  const BackwardArgs& args = task.args;
  const auto factor = tile_factor<S>(args.scale, args.heads[0].modifiers);
  for (int p = 0; p < task.panel_count(); ++p) {
    pack_panel<S, In>(args, factor, task.keys_of(p), task.at.key_panels + p * args.head_dim * width,
                      task.at.value_panels + p * args.value_dim * width);
  }
}

// Rows that lie far apart share few sets of the cache.
inline bool is_compact(const Matrix& matrix, std::int64_t columns) {
  return matrix.row_stride >= 0 && matrix.row_stride <= 2 * columns;
}

// In: the type that rows are stored in. More values than one are packed at once (fold) where this computes the pairs
// that dot products leave out: see backward_pairs.h.
template <class S, class In, int fold = 1>
class FloatBlocks {
 public:
  using Vocabulary = S;
  using Stored = In;
  using Scalar = typename S::Scalar;
  using Task = BackwardTask<S, fold>;
  using Keys = KeyGradients<S, fold>;

  // Beside the task's own scratch, in Scalars.
  static std::int64_t scratch_size(const BackwardArgs&) { return 0; }

  FloatBlocks(const Task& task, Keys& key_gradients, Scalar* /*scratch*/)
      : task_(task), args_(task.args), keys_(key_gradients) {}

  HEADWAY_NOINLINE void load_group() {
    pack_panels<In>(task_);
    const std::int64_t keys = task_.group.end - task_.group.begin;
    const std::int64_t ld = padded<S>(args_.head_dim);
    if (ld != args_.head_dim) {
      clear_numbers<S>(task_.at.key_rows, keys * ld);  // for what lies behind the last column
    }
    copy_rows<S, In>(args_.key, task_.group.begin, keys, args_.head_dim, task_.at.key_rows, ld);
  }

  void add_block() { add_pairs(nullptr, false); }

  // The pairs that are `wanted`, [panel][query_block], or all where it is null; `again`: others of the block and group
  // are done.
  void add_pairs(const std::uint64_t* wanted, bool again) {
    const OperandRows<S> query = block_rows(task_.head->query, args_.head_dim, task_.at.query_copy);
    const OperandRows<S> grad_out = block_rows(task_.head->grad_out, args_.value_dim, task_.at.grad_out_copy);
    bool forbids = false;
    tiles_.start_block(wanted);
    for (int p = 0; p < task_.panel_count(); ++p) {
      tiles_.ahead = find_ahead<In>(task_, p);
      forbids |= add_panel(p, query, grad_out);
    }
    if (!task_.wants_dq()) {
      return;
    }
    forbids ? queries_.add_allowed(again) : queries_.template add<S>(task_.at.gradients, task_.at.key_rows, again);
  }

  // A block that sees no key of the group.
  void skip_block() const { tiles_.clear_bias(task_.group); }

 private:
  // Rows as broadcasts want them.
  OperandRows<S> block_rows(const Matrix& matrix, std::int64_t columns, Scalar* copy) const {
    const RowBlock& rows = task_.rows();
    if (readable_in_place<S, In>(matrix) && is_compact(matrix, columns)) {
      const Rows<Scalar> readable = readable_rows<S, In>(matrix, rows.begin, rows.count, columns, copy);
      return {readable.data, readable.ld};
    }
    return Packing<S, In>::copied_keys(matrix, rows.begin, rows.count, columns, copy);
  }

  // Returns whether the tile has forbidden pairs.
  bool add_panel(int p, const OperandRows<S>& query, const OperandRows<S>& grad_out) {
    if (tiles_.is_out_of_reach(p)) {
      tiles_.skip(p);
      return false;
    }
    const bool forbids = tiles_.compute(p, query, grad_out);
    const KeyTerms<S> to_dv{task_.weights_of(p), grad_out}, to_dk{task_.gradients_of(p), query};
    forbids ? keys_.add_allowed(p, to_dv, to_dk) : keys_.template add<S>(p, to_dv, to_dk);
    return forbids;
  }

  const Task& task_;
  const BackwardArgs& args_;
  BlockTiles<S, fold> tiles_{task_};        // P and dS
  Keys& keys_;                              // dK and dV
  QueryGradients<S, fold> queries_{task_};  // dQ
};

}  // namespace
}  // namespace headway::cpu
