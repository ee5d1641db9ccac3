// How a row ends once all its keys are done: its lse, and the factor that makes unnormalised weights and outputs
// probabilities and means.
#pragma once

#include <cstdint>
#include <type_traits>

#include "engines/cpu/kernel/args.h"
#include "engines/cpu/kernel/modifiers.h"
#include "engines/cpu/kernel/ranges.h"

namespace headway::cpu {
namespace {

HEADWAY_INLINE double log2_of(float x) { return __builtin_log2f(x); }
HEADWAY_INLINE double log2_of(double x) { return __builtin_log2(x); }
HEADWAY_INLINE long double log2_of(long double x) { return __builtin_log2l(x); }
HEADWAY_INLINE double exp2_of(double x) { return __builtin_exp2(x); }
HEADWAY_INLINE long double exp2_of(long double x) { return __builtin_exp2l(x); }

HEADWAY_INLINE bool any_allowed(const RangeRule& rule, const Modifiers& modifiers, const Range& range,
                                std::int64_t row) {
  for (std::int64_t key = range.begin; key < range.end; ++key) {
    if (is_allowed(rule, modifiers, range, row, key)) {
      return true;
    }
  }
  return false;
}

// `sum` of 2^(score - reference), with the reference in units of log2 after multiplication by `to_log2`.
template <class Scalar>
struct RowSoftmax {
  Scalar reference, sum;
  double to_log2;
};

// The lse of a row without a sink that has a weight; its factor is 1 / sum.
template <class Scalar>
HEADWAY_INLINE double usual_lse(const RowSoftmax<Scalar>& row) {
  return (row.reference * row.to_log2 + log2_of(row.sum)) / log2e;
}

// The lse and factor of a row with a sink, or without a weight.
template <class Scalar>
HEADWAY_NOINLINE double end_unusual_row(const ForwardArgs& args, std::int64_t i, const Range& range,
                                        const RowSoftmax<Scalar>& row, Scalar& factor) {
  // One type wider than the scores, so that a large sink costs no accuracy.
  using Wider = std::conditional_t<sizeof(Scalar) == 8, long double, double>;
  constexpr auto wide_log2e = static_cast<Wider>(1.442695040888963407359924681001892137L);
  constexpr Scalar infinity = __builtin_inff();
  const Wider reference = row.reference * (row.to_log2 == log2e ? wide_log2e : static_cast<Wider>(row.to_log2));
  const Wider sum = row.sum;
  const bool sinks = args.has_sink && i < args.ranges.real_queries;
  if (sum == 0) {  // no key may be attended to; or a key may and every score is -inf, the sink too unless it is NaN
    const bool lost =
        !(sinks && args.sink > -static_cast<double>(infinity)) && any_allowed(args.ranges, args.modifiers, range, i);
    factor = lost ? static_cast<Scalar>(__builtin_nanf("")) : Scalar{0};
    return lost ? __builtin_nan("") : sinks ? args.sink : -static_cast<double>(infinity);
  }
  if (sinks && args.sink == static_cast<double>(infinity)) {  // every weight is exp(score - inf)
    factor = sum == sum ? Scalar{0} : row.sum;
    return args.sink + static_cast<double>(sum);
  }
  const Wider sink = sinks ? args.sink * wide_log2e : -static_cast<Wider>(infinity);
  const Wider highest = sink > reference ? sink : reference;
  const Wider total = sum * exp2_of(reference - highest) + exp2_of(sink - highest);
  factor = static_cast<Scalar>(exp2_of(reference - highest) / total);
  return static_cast<double>((highest + log2_of(total)) / wide_log2e);
}

}  // namespace
}  // namespace headway::cpu
