// Query rows in plain arithmetic, a thread for each pair: for the few rows whose scores are so large that what the fast
// kernels keep of them says too little.
//
// A float near 2^24 has no fraction left. A weight that is found from a rounded lse, or relative to a rounded product
// of the highest score and the scale, is then off by a factor that grows with the score until it overflows or vanishes;
// and two kernels that sum a product in different orders disagree as much. Here one function finds a pair's score, so
// that a row's statistics and its weights come from the same bits, and the highest score is subtracted first.
#pragma once

#include "engines/cuda/dropout.cuh"
#include "engines/cuda/kernels/softmax.cuh"
#include "engines/cuda/key_range.cuh"
#include "engines/cuda/modifiers.cuh"
#include "engines/cuda/spans.cuh"

namespace headway::cuda {

// A row is coarse if the last bit of its lse moves its weights by 2^-10 or more, not by the rounding that its type
// allows; or if its lse is NaN or +inf, of inputs or a sink that are not finite. (-inf is that of a row without keys.)
template <class Real>
__device__ inline bool is_coarse(Real lse) {
  constexpr Real limit = sizeof(Real) == 4 ? Real(1 << 14) : Real(std::int64_t{1} << 43);
  return !(lse < limit && lse > -limit) && lse != -infinity<Real>();
}
template <class Real>
__device__ inline bool is_coarse(const CoarseRows& rows, Real lse) {
  return is_coarse(lse) || (rows.all && lse != -infinity<Real>());
}

// A scale in two factors: queries take in a power of two, which rounds nothing, of at most 1, so that products overflow
// only if scores do. (A scale of 0 they take in whole.)
struct SplitScale {
  double of_queries, of_products;

  __device__ __forceinline__ explicit SplitScale(double scale) {
    int exponent;
    frexp(scale, &exponent);
    const int power = min(exponent - 1, 0);
    of_queries = scale == 0 ? 0.0 : ldexp(1.0, power);
    of_products = ldexp(scale, -power);
  }
};

// How the products of two rows' features are added up: in short chains, so that equal ones do not drift, in f64, so
// that they overflow only if scores do; or as simt_pairs.cuh does, with its bits: f32 one after another, f64 in chains
// of 8.
enum class Summing : std::uint8_t { in_chains, in_order };

template <class T, Summing summing = Summing::in_chains, class Real = double>
__device__ inline Real plain_product(const T* a, std::int64_t a_feature, const T* b, std::int64_t b_feature,
                                     std::int64_t width, Real a_factor = 1) {
  constexpr int chains = summing == Summing::in_chains ? 8 : 1, length = 8 * chains;
  constexpr bool one_after_another = chains == 1 && sizeof(Real) == sizeof(float);
  Real sum = 0;
#pragma unroll 1
  for (std::int64_t first = 0; first < width; first += length) {
    Real parts[chains] = {};
    parts[0] = one_after_another ? sum : Real(0);
#pragma unroll
    for (int x = 0; x < length; ++x) {
      const std::int64_t d = first + x;
      if (d < width) {
        const Real left = number<Real>(a[d * a_feature]) * a_factor;
        parts[x % chains] = fma(left, number<Real>(b[d * b_feature]), parts[x % chains]);
      }
    }
#pragma unroll
    for (int apart = chains / 2; apart > 0; apart /= 2) {
#pragma unroll
      for (int x = 0; x < apart; ++x) {
        parts[x] += parts[x + apart];
      }
    }
    sum = one_after_another ? parts[0] : sum + parts[0];
  }
  return sum;
}

// <grad_out, out> of a row, by all lanes of a warp. Where out is 0 the term is 0.
template <class T>
__device__ inline RealOf<T> warp_delta(const T* grad, std::int64_t grad_feature, const T* out, std::int64_t out_feature,
                                       std::int64_t width, int lane) {
  using Real = RealOf<T>;
  Real sum = 0;
  for (std::int64_t d = lane; d < width; d += 32) {
    const Real value = number<Real>(out[d * out_feature]);
    sum += value == 0 ? Real(0) : number<Real>(grad[d * grad_feature]) * value;
  }
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    sum += __shfl_xor_sync(~0u, sum, lanes);
  }
  return sum;
}

// The pairs of one query head.
template <class T>
class PlainHead {
 public:
  using Real = RealOf<T>;

  __device__ PlainHead(const Arguments& args, std::int64_t b, std::int64_t h)
      : args_(args), sequence_(sequence_of(args, b)), modifiers_(args, sequence_, b, h), b_(b), h_(h) {}

  __device__ const Sequence& sequence() const { return sequence_; }
  __device__ KeyRange range(std::int64_t i) const { return row_keys(args_, sequence_, b_, h_, i); }

  __device__ const T* query_row(const Rows& view, std::int64_t i) const {
    return head_of<T>(view, b_, h_) + (sequence_.query_begin + i) * view.row;
  }
  __device__ const T* key_row(const Rows& view, std::int64_t j) const {
    return head_of<T>(view, b_, h_ / args_.group) + (sequence_.key_begin + j) * view.row;
  }

  // The score of a key in the row's range, -inf where spans, mask or bias forbid it; `slope` is d(capped) / d(scaled).
  template <Summing summing = Summing::in_chains>
  __device__ Real score(std::int64_t i, std::int64_t j, Real& slope) const {
    Real one[1] = {scaled<summing>(i, j)};
    const bool allowed = !args_.spans.given || spans_of_row(args_, sequence_, b_, h_, i).allows(j);
    modifiers_.apply_to_scaled(
        one,
        [&](int) {
          return Pair{i, j, allowed};
        },
        &slope);
    return one[0];
  }

  // Whether a key in the row's range may be attended to.
  __device__ bool is_allowed(std::int64_t i, std::int64_t j) const {
    Real one[1] = {0};
    const bool allowed = !args_.spans.given || spans_of_row(args_, sequence_, b_, h_, i).allows(j);
    modifiers_.apply_to_scaled(one, [&](int) { return Pair{i, j, allowed}; });
    return one[0] != -infinity<Real>();
  }

  // Whether the row sees a key, for all lanes of a warp.
  __device__ bool sees_a_key(std::int64_t i, int lane) const {
    const KeyRange keys = range(i);
#pragma unroll 1
    for (std::int64_t j = keys.begin; j < keys.end; j += 32) {
      if (__any_sync(~0u, j + lane < keys.end && is_allowed(i, j + lane)) != 0) {
        return true;
      }
    }
    return false;
  }

  // The softmax of row i without the sink, by all lanes of a warp.
  template <Summing summing = Summing::in_chains>
  __device__ RowSoftmax<Real> softmax(std::int64_t i, int lane) const {
    const KeyRange keys = range(i);
    RowSoftmax<Real> own;
    Real slope;
#pragma unroll 1
    for (std::int64_t j = keys.begin + lane; j < keys.end; j += 32) {
      const Real one = score<summing>(i, j, slope);
      own.raise(one);
      own.total += exponential(one - reference(own.highest));
    }
    RowSoftmax<Real> all = own;
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) {
      all.highest = higher(all.highest, __shfl_xor_sync(~0u, all.highest, lanes));
    }
    all.total = own.total * exponential(own.highest - reference(all.highest));
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) {
      all.total += __shfl_xor_sync(~0u, all.total, lanes);
    }
    return all;
  }

  // The product of a pair times the scale; a finite one is within the type's range.
  template <Summing summing = Summing::in_chains>
  __device__ Real scaled(std::int64_t i, std::int64_t j) const {
    const T *query = query_row(args_.query, i), *key = key_row(args_.key, j);
    if constexpr (summing == Summing::in_order) {
      const Real ordered = modifiers_.scaled(plain_product<T, Summing::in_order, Real>(
          query, args_.query.feature, key, args_.key.feature, args_.head_dim));
      if (ordered >= -Limits<Real>::highest && ordered <= Limits<Real>::highest) {
        return ordered;
      }
    }
    return bounded<Real>(scaled_in_f64(query, key));
  }

  // d(capped) / d(scaled) of a pair, for a softcap of which Real has few bits.
  __device__ double slope(std::int64_t i, std::int64_t j) const {
    const double share = tanh(scaled_in_f64(query_row(args_.query, i), key_row(args_.key, j)) / args_.softcap);
    return 1 - share * share;
  }

 private:
  __device__ double scaled_in_f64(const T* query, const T* key) const {
    const SplitScale scale(args_.scale);
    return plain_product<T>(query, args_.query.feature, key, args_.key.feature, args_.head_dim, scale.of_queries) *
           scale.of_products;
  }

  const Arguments& args_;
  const Sequence sequence_;
  const Modifiers<Real> modifiers_;
  const std::int64_t b_, h_;
};

// What a walk over scores does where one of an allowed pair is odd (is_odd_score), which is rare: the pair's score in
// plain arithmetic instead. `slope` receives d(capped) / d(scaled).
template <class T, Summing summing = Summing::in_chains>
__device__ __noinline__ RealOf<T> settled_score(const Arguments& args, std::int64_t b, std::int64_t h, std::int64_t i,
                                                std::int64_t j, RealOf<T>& slope) {
  return PlainHead<T>(args, b, h).template score<summing>(i, j, slope);
}

template <class Real>
__device__ inline CoarseRow<Real>& coarse_row(const CoarseRows& rows, std::int64_t b, std::int64_t h,
                                              std::int64_t position) {
  return head_of<CoarseRow<Real>>(rows.statistics, b, h)[position];
}

// What weights are relative to, for a row's softmax and its sink.
template <class Real>
__device__ inline WeightBase<Real> weight_base(RowSoftmax<Real> row, Real sink) {
  if (row.all_vanish() && !(sink > -infinity<Real>())) {  // 0 / 0
    row.total = infinity<Real>() - infinity<Real>();
  }
  row.add_sink(sink);
  return {reference(row.highest), 1 / row.total};
}

// What a row's weights are relative to: its lse, or what was found for a coarse one from scores that are summed so.
template <Summing summing, class Real>
__device__ inline WeightBase<Real> weight_base(const CoarseRows& rows, std::int64_t b, std::int64_t h,
                                               std::int64_t position, Real lse) {
  if (!is_coarse(rows, lse)) {
    return {lse, 1};
  }
  const CoarseRow<Real>& row = coarse_row<Real>(rows, b, h, position);
  return summing == Summing::in_chains ? row.weights : row.ordered_weights;
}

// sums += the lanes' coefficients times their rows: lane t's row is row_of(t), and a lane adds up features
// first + lane, first + lane + 32, ...
template <class T, int Each, class Real, class RowOf>
__device__ inline void add_plain_rows(bool allowed, Real coefficient, std::int64_t feature, std::int64_t first,
                                      std::int64_t width, int lane, const RowOf& row_of, Real (&sums)[Each]) {
#pragma unroll 1
  for (unsigned left = __ballot_sync(~0u, allowed); left != 0; left &= left - 1) {
    const int t = __ffs(static_cast<int>(left)) - 1;
    const Real factor = __shfl_sync(~0u, coefficient, t);
    const T* row = row_of(t);
#pragma unroll
    for (int x = 0; x < Each; ++x) {
      const std::int64_t d = first + lane + 32 * x;
      if (d < width) {
        sums[x] = fma(factor, number<Real>(row[d * feature]), sums[x]);
      }
    }
  }
}

}  // namespace headway::cuda
