// What the backward pass wants to know about each row before it starts: lse in the units of the scores, and
// delta = <grad_out, out>, the mean of dP under P. grad_out, out and lse are read once; memory bounds it.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/backward_args.h"
#include "engines/cpu/kernel/key_lanes.h"
#include "engines/cpu/kernel/lane_sums.h"
#include "engines/cpu/kernel/modifiers.h"
#include "engines/cpu/kernel/pack.h"
#include "engines/cpu/kernel/ranges.h"

namespace headway::cpu {
namespace {

HEADWAY_INLINE bool has_keys(const RangeRule& rule, std::int64_t i) {
  const Range range = range_of_row(rule, i);
  return range.begin < range.end;
}

// lse times `units`, which is 1 or log2 e: with what rounding the factor would lose. -inf stays -inf.
template <class S>
HEADWAY_INLINE typename S::Vector in_units(typename S::Vector lse, double units) {
  using Scalar = typename S::Scalar;
  const auto factor = static_cast<Scalar>(units);
  const auto rest = static_cast<Scalar>(units - static_cast<double>(factor));
  const typename S::Vector product = S::fma(lse, S::set(factor), lse * S::set(rest));
  return S::select(S::equal(lse, S::set(-static_cast<Scalar>(__builtin_inff()))), lse, product);
}

// delta of up to S::lanes rows from row `begin` on, of any layout; rows without keys are not read and get 0.
template <class S, class In>
HEADWAY_NOINLINE typename S::Vector any_row_deltas(const BackwardArgs& args, const BackwardHead& head,
                                                   std::int64_t begin, int rows) {
  typename S::Vector sums[S::lanes];
  for (int r = 0; r < S::lanes; ++r) {
    sums[r] = S::zero();
    const std::int64_t i = begin + r;
    for (std::int64_t d = 0; r < rows && has_keys(args.ranges, i) && d < args.value_dim; d += S::lanes) {
      const int count = at_most(args.value_dim - d, S::lanes);
      const In* grad_out = static_cast<const In*>(head.grad_out.data) + i * head.grad_out.row_stride;
      const In* out = static_cast<const In*>(head.out.data) + i * head.out.row_stride;
      sums[r] = S::fma(load_row<S>(grad_out, head.grad_out.column_stride, d, count),
                       load_row<S>(out, head.out.column_stride, d, count), sums[r]);
    }
  }
  return lane_sums<S>(sums);
}

// The same, with whole vectors of rows that lie dense and have keys all at once.
template <class S, class In>
HEADWAY_INLINE typename S::Vector row_deltas(const BackwardArgs& args, const BackwardHead& head, std::int64_t begin,
                                             int rows) {
  if (rows < S::lanes || head.grad_out.column_stride != 1 || head.out.column_stride != 1 ||
      !rows_share_range(args.ranges, begin, begin + rows)) {
    return any_row_deltas<S, In>(args, head, begin, rows);
  }
  const In* grad_out = static_cast<const In*>(head.grad_out.data) + begin * head.grad_out.row_stride;
  const In* out = static_cast<const In*>(head.out.data) + begin * head.out.row_stride;
  typename S::Vector sums[S::lanes];
  HEADWAY_UNROLL
  for (int r = 0; r < S::lanes; ++r) {
    sums[r] = S::zero();
  }
  for (std::int64_t d = 0; d < args.value_dim; d += S::lanes) {
    const int count = at_most(args.value_dim - d, S::lanes);
    HEADWAY_UNROLL
    for (int r = 0; r < S::lanes; ++r) {
      sums[r] = S::fma(S::load_first(grad_out + r * head.grad_out.row_stride + d, count),
                       S::load_first(out + r * head.out.row_stride + d, count), sums[r]);
    }
  }
  return lane_sums<S>(sums);
}

// Whether a row of a head with a sink takes part in the sink's gradient: it does if any key is allowed. The search is
// for rows that look as if none were.
template <class Scalar>
HEADWAY_NOINLINE bool attends(const BackwardArgs& args, const BackwardHead& head, std::int64_t i, Scalar lse,
                              Scalar delta) {
  const Range range = range_of_row(args.ranges, i);
  const bool masks = head.modifiers.mask.data != nullptr || head.modifiers.bias.data != nullptr;
  const bool suspicious = lse == static_cast<Scalar>(head.sink) || !(delta - delta == 0);
  if (!masks || !suspicious) {
    return range.begin < range.end;
  }
  for (std::int64_t key = range.begin; key < range.end; ++key) {
    if (is_allowed(head.modifiers, range, i, key)) {
      return true;
    }
  }
  return false;
}

// Prepares rows [row_begin, row_end) of a head. Returns their part of the sink's gradient, 0 without a sink:
// - sum over rows of exp(sink - lse) delta.
template <class S, class In>
HEADWAY_NOINLINE double prepare_rows(const BackwardArgs& args, const BackwardHead& head, std::int64_t row_begin,
                                     std::int64_t row_end) {
  using Scalar = typename S::Scalar;
  const auto* lse = static_cast<const Scalar*>(head.lse);
  auto* prepared_lse = static_cast<Scalar*>(head.prepared_lse);
  auto* delta = static_cast<Scalar*>(head.delta);
  const double units = change_scores(head.modifiers) ? 1 : log2e;
  double sink_gradient = 0;
  for (std::int64_t i = row_begin; i < row_end; i += S::lanes) {
    const int rows = at_most(row_end - i, S::lanes);
    S::store_first(delta + i, rows, row_deltas<S, In>(args, head, i, rows));
    S::store_first(prepared_lse + i, rows,
                   in_units<S>(load_row<S>(lse + i * head.lse_stride, head.lse_stride, 0, rows), units));
    for (std::int64_t row = i; head.has_sink && row < i + rows; ++row) {
      const Scalar natural = lse[row * head.lse_stride];
      if (attends(args, head, row, natural, delta[row])) {
        sink_gradient -= __builtin_exp(head.sink - static_cast<double>(natural)) * static_cast<double>(delta[row]);
      }
    }
  }
  return sink_gradient;
}

}  // namespace
}  // namespace headway::cpu
