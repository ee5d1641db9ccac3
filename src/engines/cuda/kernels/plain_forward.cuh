// Rows of the forward in plain arithmetic, by one warp each: those of which a fast kernel found at their end that its
// sums say too little. Their scores are too large (plain_rows.cuh), or their products overflow on the way to finite
// scores. Nothing of this is fast.
#pragma once

#include "engines/cuda/dropout.cuh"
#include "engines/cuda/kernels/compensated_sum.cuh"
#include "engines/cuda/kernels/pages.cuh"
#include "engines/cuda/kernels/plain_rows.cuh"
#include "engines/cuda/ptx/hidden.cuh"

namespace headway::cuda {

// Row i of one head, and up to 256 of its value features from `first` on, by all lanes of a warp. `power`: queries are
// multiplied by 2^power, which the caller has taken out of a scale far from 1 (plain_forward.cu). `Stored`: elements of
// keys and values, T or those of 8-bit pages.
template <class T, class Stored = T>
class PlainRow {
  using Real = RealOf<T>;
  static constexpr bool scaled = !std::is_same_v<T, Stored>;

 public:
  static constexpr int features = 256;

  __device__ __forceinline__ PlainRow(const ForwardArguments& args, std::int64_t b, std::int64_t h, std::int64_t i,
                                      std::int64_t first, int lane, int power = 0)
      : args_(args),
        sequence_(sequence_of(args, b)),
        modifiers_(args, sequence_, b, h),
        scale_(args.scale),
        powers_{ldexp(1.0, power / 2), ldexp(1.0, power - power / 2)},
        b_(b),
        h_(h),
        i_(i),
        first_(first),
        lane_(lane) {}

  __device__ __forceinline__ void attend() {
    const KeyRange keys = row_keys(args_, sequence_, b_, h_, i_);
#pragma unroll 1
    for (std::int64_t j = keys.begin; j < keys.end; j += 32) {
      const bool allowed = !args_.spans.given || spans_of_row(args_, sequence_, b_, h_, i_).allows(j + lane_);
      if (__any_sync(~0u, allowed) == 0) {
        continue;
      }
      add_keys(j, static_cast<int>(smaller(keys.end - j, 32)), allowed);
      if (__any_sync(~0u, total_.value != total_.value) != 0) {
        break;  // the row is NaN
      }
    }
    Real total = total_.value;
#pragma unroll 1
    for (int lanes = 16; lanes > 0; lanes /= 2) {
      total += __shfl_xor_sync(~0u, total, lanes);
    }
    store(close_row(RowSoftmax<Real>{highest_, total}, sink_of<Real>(args_, h_), i_ >= sequence_.real_queries));
  }

 private:
  static constexpr int each = features / 32;

  __device__ __forceinline__ const Stored* key_row(const Rows& view, std::int64_t j) const {
    return static_cast<const Stored*>(view.data) + key_offset(args_, view, sequence_, b_, h_ / args_.group, j);
  }
  __device__ __forceinline__ Real scale_of(const PageScales& scales, std::int64_t j) const {
    if constexpr (scaled) {
      return scale_at(scales, h_ / args_.group, slot_of(args_.pages, b_, j));
    } else {
      return 1;
    }
  }

  // This lane's of the products with keys j to j + count, whose features lie across the lanes.
  __device__ __forceinline__ double product(std::int64_t j, int count) const {
    const T* query = head_of<T>(args_.query, b_, h_) + (sequence_.query_begin + i_) * args_.query.row;
    double own = 0;
#pragma unroll 1
    for (std::int64_t from = lane_; from - lane_ < args_.head_dim; from += features) {
      double factors[each];
#pragma unroll
      for (int x = 0; x < each; ++x) {
        const std::int64_t d = from + 32 * x;
        factors[x] = d < args_.head_dim
                         ? number<double>(query[d * args_.query.feature]) * powers_[0] * powers_[1] * scale_.of_queries
                         : 0.0;
      }
#pragma unroll 1
      for (int t = 0; t < count; ++t) {
        const Stored* key = key_row(args_.key, j + t);
        const Real key_scale = scale_of(args_.pages.key_scales, j + t);
        double sum = 0;
#pragma unroll
        for (int x = 0; x < each; ++x) {
          const std::int64_t d = from + 32 * x;
          if (d < args_.head_dim) {
            sum = fma(factors[x], number<double>(key_scale * number<Real>(key[d * args_.key.feature])), sum);
          }
        }
#pragma unroll
        for (int lanes = 16; lanes > 0; lanes /= 2) {
          sum += __shfl_xor_sync(~0u, sum, lanes);
        }
        own += lane_ == t ? sum : 0.0;
      }
    }
    return own;
  }

  // This lane's score of keys j to j + count; -inf where there is none, or it is forbidden.
  __device__ __forceinline__ Real score(std::int64_t j, int count, bool allowed) const {
    Real one[1] = {bounded<Real>(product(j, count) * scale_.of_products)};
    modifiers_.apply_to_scaled(one, [&](int) { return Pair{i_, j + lane_, lane_ < count && allowed}; });
    return one[0];
  }

  __device__ __forceinline__ void add_keys(std::int64_t j, int count, bool allowed) {
    const Real one = score(j, count, allowed);
    Real highest = one;
#pragma unroll 1
    for (int lanes = 16; lanes > 0; lanes /= 2) {
      highest = higher(highest, __shfl_xor_sync(~0u, highest, lanes));
    }
    RowSoftmax<Real> row{highest_, 0};
    const Real older = row.raise(highest);
    highest_ = row.highest;
    const Real weight = exponential(one - reference(highest_));
    total_.multiply(older);
    total_.add(weight);
    const bool kept = !args_.dropout.active || is_kept(args_.dropout, b_, h_, i_, j + lane_);
    Real sums[each] = {};
    const Real value_scale = lane_ < count ? scale_of(args_.pages.value_scales, j + lane_) : Real(0);
    add_plain_rows<Stored>(
        one != -infinity<Real>(), (kept ? weight : Real(0)) * value_scale, args_.value.feature, first_, args_.value_dim,
        lane_, [&](int t) { return key_row(args_.value, j + t); }, sums);
#pragma unroll
    for (int x = 0; x < each; ++x) {
      sums_[x].multiply(older);
      sums_[x].add(sums[x]);
    }
  }

  __device__ __forceinline__ void store(const RowEnd<Real>& end) {
    const std::int64_t position = sequence_.query_begin + i_;
    const Real factor = end.factor * static_cast<Real>(args_.dropout.kept_scale);
    T* out = head_of<T>(args_.out, b_, h_) + position * args_.out.row;
#pragma unroll
    for (int x = 0; x < each; ++x) {
      const std::int64_t d = first_ + lane_ + 32 * x;
      if (d < args_.value_dim) {
        out[d * args_.out.feature] = element<T>(sums_[x].value * factor);
      }
    }
    if (args_.lse.data != nullptr && first_ == 0 && lane_ == 0) {
      head_of<Real>(args_.lse, b_, h_)[position * args_.lse.row] = end.lse;
    }
  }

  const ForwardArguments& args_;
  const Sequence sequence_;
  const Modifiers<Real> modifiers_;
  const SplitScale scale_;
  const double powers_[2];  // 2^power may be beyond the type's range
  const std::int64_t b_, h_, i_, first_;
  const int lane_;
  Real highest_ = -infinity<Real>();
  CompensatedSum<Real> total_;  // of this lane's keys
  CompensatedSum<Real> sums_[each];
};

}  // namespace headway::cuda
