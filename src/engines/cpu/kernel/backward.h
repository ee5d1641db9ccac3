// Attention backward, keys in lanes: one task is a chunk of keys of one kv head against all queries of the heads that
// share it.
//
// Keys go in groups of 256 (512 in pairs), packed once: K^T and V^T as panels for S and dP, K as rows for dQ. All query
// blocks that reach the group pass by; each gives P and dS (backward_tile.h), then
//   dV^T [Dv][keys] += dO^T P      dK^T [D][keys] += Q^T dS      dQ [queries][D] += dS K
// with the same outer-product tile (backward_key_gradients.h, backward_query_gradients.h). dK^T and dV^T stay in the
// second-level cache until the group is done; per group, Q and dO are read once and the dQ partial is read and written
// once: 4 (3 D + Dv) bytes for 512 (3 D + 2 Dv) operations a query, so the FMA units bound it.
//
// A key's bits depend on its own sequence alone: blocks, groups and heads come in one order, and skipped ones add
// nothing.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/backward_args.h"
#include "engines/cpu/kernel/backward_floats.h"
#include "engines/cpu/kernel/backward_key_gradients.h"
#include "engines/cpu/kernel/backward_task.h"
#include "engines/cpu/kernel/row_blocks.h"

namespace headway::cpu {
namespace {

// Blocks: FloatBlocks, or PairBlocks of backward_pairs.h.
template <class Blocks>
class Backward {
  using S = typename Blocks::Vocabulary;
  using Task = typename Blocks::Task;
  using Scalar = typename S::Scalar;

 public:
  // Scratch of a task, in Scalars.
  static std::int64_t scratch_size(const BackwardArgs& args) { return own_scratch(args) + Blocks::scratch_size(args); }

  Backward(const BackwardArgs& args, int chunk, Scalar* scratch)
      : args_(args),
        task_(args, chunk, KeptTiles::one_block, scratch),
        blocks_(task_, keys_, scratch + own_scratch(args)) {}

  HEADWAY_NOINLINE void run() {
    const std::int64_t end = args_.chunks.begin[task_.chunk + 1];
    const std::int64_t step = Task::Layout::group_keys(args_);
    for (std::int64_t key = args_.chunks.begin[task_.chunk]; key < end; key += step) {
      task_.group = {key, smaller(key + step, end)};
      keys_.start_group();
      blocks_.load_group();
      for (std::int64_t h = 0; h < args_.head_count; ++h) {
        task_.enter_head(h);
        for (task_.block = 0; task_.block < block_count(args_); ++task_.block) {
          visit_block();
        }
      }
      args_.stores_part ? keys_.template store<Scalar>() : keys_.template store<typename Blocks::Stored>();
    }
  }

 private:
  static std::int64_t own_scratch(const BackwardArgs& args) {
    return typename Task::Layout(args, KeptTiles::one_block, nullptr).size;
  }

  void visit_block() {
    if (task_.reaches(task_.group)) {
      keys_.start_block();
      blocks_.add_block();
    } else {
      blocks_.skip_block();
    }
  }

  const BackwardArgs& args_;
  Task task_;                          // what is asked for; the keys and queries at hand
  typename Blocks::Keys keys_{task_};  // dK and dV of the group
  Blocks blocks_;                      // P, dS and dQ of a block of queries
};

}  // namespace
}  // namespace headway::cpu
