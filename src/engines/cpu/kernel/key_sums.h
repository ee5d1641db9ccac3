// Sums over keys that stay accurate however many there are. A chain of n equal terms, added one by one, may be n / 4
// units of the last place off, so chains are short: what they give is added up in turn, the longest sums with the
// rounding errors beside them.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/compensated.h"
#include "engines/cpu/kernel/exp2.h"
#include "engines/cpu/kernel/tile.h"
#include "engines/cpu/simd/common.h"

namespace headway::cpu {
namespace {

constexpr std::int64_t summed_weights = 64;  // of a row, before the next level
template <class S>  // weighted values of a row, before the next level; the weights of pairs are far less accurate
constexpr int summed_values = Operands<S>::fold > 1 ? 1 << 20 : 128;

// A row's weights in each lane: `part` of up to summed_weights keys, `whole` of those before.
template <class S>
struct WeightSum {
  using Vector = typename S::Vector;
  Vector part = S::zero();
  Vector whole = S::zero();

  HEADWAY_INLINE void add(Vector weight) { part = part + weight; }
  HEADWAY_INLINE void end_part() {
    whole = whole + part;
    part = S::zero();
  }
  HEADWAY_INLINE Vector total() const { return whole + part; }
};

template <class S, int NV>
HEADWAY_INLINE void end_parts(WeightSum<S> (&sums)[NV]) {
  HEADWAY_UNROLL
  for (int n = 0; n < NV; ++n) {
    sums[n].end_part();
  }
}

// body(j) for j < count, and end_part() wherever a part of the sums ends.
template <class Body, class EndPart>
HEADWAY_INLINE void in_summed_parts(std::int64_t count, const Body& body, const EndPart& end_part) {
  for (std::int64_t j = 0; j < count;) {
    const std::int64_t stop = count - j < summed_weights ? count : j + summed_weights;
    for (; j < stop; ++j) {
      body(j);
    }
    if (j % summed_weights == 0) {
      end_part();
    }
  }
}

// sum + lost is what was added, almost exactly.
template <class S>
struct CompensatedSum {
  using Vector = typename S::Vector;
  Vector sum, lost;

  HEADWAY_INLINE void add(Vector x) {
    const Compensated<S> next(sum, x);
    sum = next.sum;
    lost = lost + next.lost;
  }
  HEADWAY_INLINE void multiply(Vector factor) {
    sum = sum * factor;
    lost = lost * factor;
  }
  HEADWAY_INLINE Vector value() const { return sum + lost; }
};

// Where a row's highest score passes its reference by no more than this, in units of log2, the reference stays: each
// time that it is raised, all that was summed before is multiplied by a rounded factor.
constexpr double reference_slack = 8;

// The new reference of a row with scores up to `highest`.
template <class S>
HEADWAY_INLINE typename S::Vector raised_reference(typename S::Vector old, typename S::Vector highest,
                                                   typename S::Vector to_log2) {
  const auto passed = S::not_less_equal((highest - old) * to_log2,  // NaN where both are -inf
                                        S::set(static_cast<typename S::Scalar>(reference_slack)));
  return S::select(passed, highest, old);
}

// The reference that an exponent may subtract: a row with no allowed key yet has -inf scores only.
template <class S>
HEADWAY_INLINE typename S::Vector usable_reference(typename S::Vector reference) {
  const auto none = S::set(-static_cast<typename S::Scalar>(__builtin_inff()));
  return S::select(S::equal(reference, none), S::zero(), reference);
}

// What multiplies the sums of a row when its reference changes.
template <class S>
HEADWAY_INLINE typename S::Vector decay(typename S::Vector old, typename S::Vector now, double to_log2) {
  const auto exponent = (old - usable_reference<S>(now)) * S::set(static_cast<typename S::Scalar>(to_log2));
  return S::select(S::equal(old, now), S::set(1), exp2<S>(exponent));
}

}  // namespace
}  // namespace headway::cpu
