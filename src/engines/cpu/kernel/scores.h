// The modified scores themselves, before the softmax: the forward kernel's scores, written out block by block. Storing
// the matrix bounds it.
#pragma once

#include "engines/cpu/kernel/forward.h"

namespace headway::cpu {
namespace {

template <class S, class In>
class Scores : Forward<S, In> {
  using Base = Forward<S, In>;
  using typename Base::Scalar;
  using Base::args_;
  using Base::at_;
  using Base::lanes;
  using Base::width;

 public:
  using Base::Base;

  HEADWAY_NOINLINE void run() {
    for (std::int64_t p = 0; p < this->panels_; ++p) {
      this->start(p);
    }
    for (std::int64_t key = 0; key < args_.ranges.keys; key += key_block) {
      this->block_begin_ = key;
      this->block_end_ = smaller(key + key_block, args_.ranges.keys);
      this->block_loaded_ = false;
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
    const std::int64_t row = this->panel_row(p) + v * lanes;
    const int rows = at_most(args_.row_end - row, lanes);
    this->template raw_scores<1>(p, v, block);
    if (args_.modifiers.any) {
      this->modify(p, v, 1, block);
    }
    Scalar* scores = this->scores_at(block.begin, v);
    forbid_outside_ranges<S>(scores, width, at_.ranges + p * width + v * lanes, block.begin, block.end - block.begin);
    const WritableMatrix target{static_cast<In*>(args_.weights.data) + block.begin * args_.weights.column_stride,
                                args_.weights.row_stride, args_.weights.column_stride};
    unpack_transposed<S, In>(scores, width, S::set(static_cast<Scalar>(this->to_log2_ / log2e)), target, row, rows,
                             block.end - block.begin);
  }
};

}  // namespace
}  // namespace headway::cpu
