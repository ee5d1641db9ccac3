// Rows of the forward in plain arithmetic, by one warp each: those of which a fast kernel found at their end that its
// sums say too little. Their scores are too large (plain_rows.cuh), or their products overflow on the way to finite
// scores. Nothing of this is fast.
#pragma once

#include "engines/cuda/kernels/compensated_sum.cuh"
#include "engines/cuda/kernels/plain_rows.cuh"

namespace headway::cuda {

// Row i of one head, and up to 256 of its value features from `first` on, by all lanes of a warp.
template <class T, Changes changes = Changes::any>
class PlainRow {
  using Real = RealOf<T>;

 public:
  static constexpr int features = 256;

  __device__ __forceinline__ PlainRow(const ForwardArguments& args, std::int64_t b, std::int64_t h, std::int64_t i,
                                      std::int64_t first, int lane)
      : args_(args), head_(args, b, h), b_(b), h_(h), i_(i), first_(first), lane_(lane) {}

  __device__ __forceinline__ void attend() {
    const KeyRange keys = head_.range(i_);
#pragma unroll 1
    for (std::int64_t j = keys.begin; j < keys.end; j += 32) {
      ptx::rarely();
      add_keys(j, keys.end);
      if (__any_sync(~0u, total_.value != total_.value) != 0) {
        break;  // the row is NaN
      }
    }
    Real total = total_.value;
#pragma unroll 1
    for (int lanes = 16; lanes > 0; lanes /= 2) {
      total += __shfl_xor_sync(~0u, total, lanes);
    }
    if (total == 0 && head_.any_allowed(i_, keys, lane_)) {
      total = infinity<Real>() - infinity<Real>();
    }
    store(close_row(RowSoftmax<Real>{highest_, total}, sink_of<Real>(args_, h_), false));
  }

 private:
  static constexpr int each = features / 32;

  __device__ __forceinline__ void add_keys(std::int64_t j, std::int64_t end) {
    Real slope, highest;
    const Real score = j + lane_ < end ? head_.score(i_, j + lane_, slope) : -infinity<Real>();
    highest = score;
#pragma unroll 1
    for (int lanes = 16; lanes > 0; lanes /= 2) {
      highest = higher(highest, __shfl_xor_sync(~0u, highest, lanes));
    }
    RowSoftmax<Real> row{highest_, 0};
    const Real older = row.raise(highest);
    highest_ = row.highest;
    const Real weight = exponential(score - reference(highest_));
    total_.multiply(older);
    total_.add(weight);
    const bool kept = !args_.dropout.active || is_kept(args_.dropout, b_, h_, i_, j + lane_);
    Real sums[each] = {};
    add_plain_rows<T>(
        score != -infinity<Real>(), kept ? weight : Real(0), args_.value.feature, first_, args_.value_dim, lane_,
        [&](int t) { return head_.key_row(args_.value, j + t); }, sums);
#pragma unroll
    for (int x = 0; x < each; ++x) {
      sums_[x].multiply(older);
      sums_[x].add(sums[x]);
    }
  }

  __device__ __forceinline__ void store(const RowEnd<Real>& end) {
    const Real factor = end.factor * static_cast<Real>(args_.dropout.kept_scale);
    T* out = const_cast<T*>(head_.query_row(args_.out, i_));
#pragma unroll
    for (int x = 0; x < each; ++x) {
      const std::int64_t d = first_ + lane_ + 32 * x;
      if (d < args_.value_dim) {
        out[d * args_.out.feature] = element<T>(sums_[x].value * factor);
      }
    }
    if (args_.lse.data != nullptr && first_ == 0 && lane_ == 0) {
      head_of<Real>(args_.lse, b_, h_)[(head_.sequence().query_begin + i_) * args_.lse.row] = end.lse;
    }
  }

  const ForwardArguments& args_;
  const PlainHead<T, changes> head_;
  const std::int64_t b_, h_, i_, first_;
  const int lane_;
  Real highest_ = -infinity<Real>();
  CompensatedSum<Real> total_;  // of this lane's keys
  CompensatedSum<Real> sums_[each];
};

}  // namespace headway::cuda
