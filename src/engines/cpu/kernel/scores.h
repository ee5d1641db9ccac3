// The modified scores themselves, before the softmax: the forward kernel's scores, written out block by block. Storing
// the matrix bounds it.
#pragma once

#include "engines/cpu/kernel/forward.h"

namespace headway::cpu {
namespace {

template <class S, class In>
class Scores : Forward<S, In> {
  using Base = Forward<S, In>;
  using Base::args_;
  using Base::key_block;

 public:
  using Base::Base;

  HEADWAY_NOINLINE void run() {
    for (std::int64_t p = 0; p < this->panels_; ++p) {
      this->start_panel(p);
    }
    for (std::int64_t key = 0; key < args_.ranges.keys; key += key_block) {
      this->enter_block(key, args_.ranges.keys);
      this->load_block();
      for (std::int64_t p = 0; p < this->panels_; ++p) {
        for (int v = 0; v < this->panel_vectors(p); ++v) {
          store_block(p, v);
        }
      }
    }
  }

 private:
  // scores(i, j) for the block's keys, in natural units.
  void store_block(std::int64_t p, int v) {
    const Range block{this->block_begin_, this->block_end_};
    this->template raw_scores<1>(p, v, block);
    if (this->modified_) {
      this->modify(p, v, 1, block);
    }
    this->forbid_outside(p, v, block);
    const auto natural = static_cast<typename S::Scalar>(this->to_log2_ / log2e);
    this->store_piece(p, v, block, S::set(natural));
  }
};

}  // namespace
}  // namespace headway::cpu
