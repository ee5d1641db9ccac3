// What the walks over scores (mma_walk.cuh, simt_walk.cuh) do with those that say too little: infinite or NaN ones,
// because of the inputs, or because products overflowed on the way to a finite score. Both are rare: such a pair is
// found again in plain arithmetic.
#pragma once

#include "engines/cuda/kernels/plain_rows.cuh"

namespace headway::cuda {

// Of the stages before masks the score is the scaled product; of the others that of an allowed pair is meant.
template <class Real>
__device__ inline bool is_unsettled(const Stage& stage, Real score) {
  const bool masked = stage == Stage::biased || stage == Stage::weights;
  return masked ? is_odd_score(score) : !(score >= -Limits<Real>::highest && score <= Limits<Real>::highest);
}

// The scaled product, or the score, of a pair of existing rows.
template <class T>
__device__ __noinline__ RealOf<T> settled(const Arguments& args, const Stage& stage, std::int64_t b, std::int64_t h,
                                          std::int64_t i, std::int64_t j) {
  const PlainHead<T> head(args, b, h);
  if (stage == Stage::scaled || stage == Stage::capped) {
    return head.scaled(i, j);
  }
  RealOf<T> slope;
  const RealOf<T> score = head.score(i, j, slope);
  // In the matrix of scores an allowed pair's -inf is itself.
  return stage == Stage::biased && score == -Limits<RealOf<T>>::highest ? -infinity<RealOf<T>>() : score;
}

// The end of a row's keys: the sink joins the sum where there is a key. Scores that are all -inf make the row NaN, but
// for a sink.
template <class Real>
__device__ inline void end_softmax(RowSoftmax<Real>& row, Real sink) {
  if (row.empty()) {
    return;
  }
  if (row.all_vanish() && !(sink > -infinity<Real>())) {
    row.total = infinity<Real>() - infinity<Real>();
  }
  row.add_sink(sink);
}

}  // namespace headway::cuda
