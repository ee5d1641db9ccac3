// The modified scores themselves, before the softmax: the forward kernel's scores, written out block by block. Storing
// the matrix bounds it.
#pragma once

#include "engines/cpu/kernel/forward_block.h"
#include "engines/cpu/kernel/forward_finish.h"
#include "engines/cpu/kernel/forward_scores.h"
#include "engines/cpu/kernel/forward_task.h"

namespace headway::cpu {
namespace {

template <class S, class In>
class Scores {
  static constexpr int key_block = ForwardSizes<S>::key_block;

 public:
  Scores(const ForwardArgs& args, void* scratch)
      : args_(args), task_(args, reads_keys_in_place<S, In>(args), scratch) {}

  HEADWAY_NOINLINE void run() {
    for (std::int64_t p = 0; p < task_.panels; ++p) {
      task_.template start_panel<In>(p);
    }
    for (std::int64_t key = 0; key < args_.ranges.keys; key += key_block) {
      block_.enter(key, args_.ranges.keys);
      block_.template load<In>();
      for (std::int64_t p = 0; p < task_.panels; ++p) {
        for (int v = 0; v < task_.panel_vectors(p); ++v) {
          store_block(p, v);
        }
      }
    }
  }

 private:
  // scores(i, j) for the block's keys, in natural units.
  void store_block(std::int64_t p, int v) {
    const Range block{block_.begin, block_.end};
    scores_.template products<1>(p, v, block);
    if (task_.modified) {
      scores_.modify(p, v, 1, block);
    }
    scores_.forbid_outside(p, v, block);
    const auto natural = static_cast<typename S::Scalar>(task_.to_log2 / log2e);
    finish_.store_piece(p, v, block, S::set(natural));
  }

  const ForwardArgs& args_;
  ForwardTask<S> task_;
  ForwardBlock<S> block_{task_};
  ForwardScores<S> scores_{task_, block_};
  ForwardFinish<S, In> finish_{task_, block_};
};

}  // namespace
}  // namespace headway::cpu
