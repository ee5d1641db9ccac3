// The data of each row that the backward pass needs before it starts: lse in the units of the scores, and
// delta = <grad_out, out>, the mean of dP under P. grad_out, out and lse are read once; memory bounds it.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/backward_args.h"
#include "engines/cpu/kernel/backward_large_rows.h"
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

// lse times `units`, which is 1 or log2 e, corrected for the rounding of the factor. Infinities are unchanged.
template <class S>
HEADWAY_INLINE typename S::Vector in_units(typename S::Vector lse, double units) {
  using Scalar = typename S::Scalar;
  const auto factor = static_cast<Scalar>(units);
  const auto rest = static_cast<Scalar>(units - static_cast<double>(factor));
  const typename S::Vector product = S::fma(lse, S::set(factor), lse * S::set(rest));
  return S::select(S::equal(S::abs(lse), S::set(static_cast<Scalar>(__builtin_inff()))), lse, product);
}

// delta of up to S::lanes rows from row `begin` on, of any layout; rows without keys are not read and get 0.
template <class S, class In>
HEADWAY_NOINLINE typename S::Vector any_row_deltas(const BackwardArgs& args, const BackwardHead& head,
                                                   std::int64_t begin, int rows) {
  typename S::Vector sums[S::lanes];
  for (int r = 0; r < S::lanes; ++r) {
    sums[r] = S::zero();
    const std::int64_t i = begin + r;
    for (std::int64_t d = 0; r < rows && has_keys(head.ranges, i) && d < args.value_dim; d += S::lanes) {
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
      !rows_share_range(head.ranges, begin, begin + rows)) {
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
HEADWAY_NOINLINE bool attends(const BackwardHead& head, std::int64_t i, Scalar lse, Scalar delta) {
  const Range range = range_of_row(head.ranges, i);
  const bool masks = head.modifiers.mask.data != nullptr || head.modifiers.bias.data != nullptr;
  const bool suspicious = lse == static_cast<Scalar>(head.sink) || lse != lse || !(delta - delta == 0);
  if (!masks || !suspicious) {
    return range.begin < range.end;
  }
  for (std::int64_t key = range.begin; key < range.end; ++key) {
    if (is_allowed(head.ranges, head.modifiers, range, i, key)) {
      return true;
    }
  }
  return false;
}

// exp(exponent), at most 1: beside a large sink lse is rounded, and the difference may come out above 0.
HEADWAY_INLINE double weight_of(double exponent) { return __builtin_exp(exponent > 0 ? 0 : exponent); }

// A row's contribution to the sink's gradient: - exp(sink - lse) delta.
template <class S>
HEADWAY_INLINE double sink_gradient(const BackwardArgs& args, const BackwardHead& head, std::int64_t row) {
  using Scalar = typename S::Scalar;
  const Scalar lse = static_cast<const Scalar*>(head.lse)[row * head.lse_stride];
  const Scalar delta = static_cast<const Scalar*>(head.delta)[row];
  if (!attends(head, row, lse, delta)) {
    return 0;
  }
  if (head.sink == __builtin_inf()) {  // it has all weight
    return lse == lse ? -static_cast<double>(delta) : static_cast<double>(lse);
  }
  const auto reference = static_cast<double>(static_cast<const Scalar*>(head.references)[row]);
  if (reference == 0) {
    return -weight_of(head.sink - static_cast<double>(lse)) * static_cast<double>(delta);
  }
  // Counted from the reference, as the row's lse is.
  const auto factor = tile_factor<S>(args.scale, head.modifiers);
  const double units = change_scores(head.modifiers) ? 1 : 1 / log2e;
  const double natural = change_scores(head.modifiers)
                             ? reference
                             : reference * static_cast<double>(factor.power) * static_cast<double>(factor.rest) * units;
  const double rest = static_cast<double>(static_cast<const Scalar*>(head.prepared_lse)[row]) * units;
  return -weight_of((head.sink - natural) - rest) * static_cast<double>(delta);
}

// Prepares rows [row_begin, row_end) of a head; row_begin is a multiple of query_block. Returns their part of the
// sink's gradient, 0 without a sink.
template <class S, class In>
HEADWAY_NOINLINE double prepare_rows(const BackwardArgs& args, const BackwardHead& head, std::int64_t row_begin,
                                     std::int64_t row_end, void* scratch) {
  using Scalar = typename S::Scalar;
  const auto* lse = static_cast<const Scalar*>(head.lse);
  const double units = change_scores(head.modifiers) ? 1 : log2e;
  bool any_large = false;
  for (std::int64_t i = row_begin; i < row_end; i += S::lanes) {
    const int rows = at_most(row_end - i, S::lanes);
    const typename S::Vector given = load_row<S>(lse + i * head.lse_stride, head.lse_stride, 0, rows);
    S::store_first(static_cast<Scalar*>(head.references) + i, rows, S::zero());
    S::store_first(static_cast<Scalar*>(head.delta) + i, rows, row_deltas<S, In>(args, head, i, rows));
    S::store_first(static_cast<Scalar*>(head.prepared_lse) + i, rows, in_units<S>(given, units));
    for (int r = 0; r < rows; ++r) {
      any_large |= is_large(lse[(i + r) * head.lse_stride]);
    }
  }
  if (any_large) {
    LargeRows<S, In> large(args, head, static_cast<Scalar*>(scratch));
    for (std::int64_t i = row_begin; i < row_end; i += query_block) {
      RowBlock block = row_block(args, head.ranges, i / query_block);
      large.run(block);
    }
  }
  long double sum = 0;  // one type wider than any gradient
  for (std::int64_t row = row_begin; head.has_sink && row < row_end; ++row) {
    sum += sink_gradient<S>(args, head, row);
  }
  return static_cast<double>(sum);
}

}  // namespace
}  // namespace headway::cpu
