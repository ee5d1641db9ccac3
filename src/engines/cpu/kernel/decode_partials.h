// The partial softmaxes that the chunks of decode leave for the merge.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/decode_args.h"
#include "engines/cpu/kernel/exp2.h"
#include "engines/cpu/kernel/key_sums.h"
#include "engines/cpu/kernel/pack.h"
#include "engines/cpu/kernel/scratch.h"

namespace headway::cpu {
namespace {

// From the units of decode's scores to those of the exponential. Scores that are modified are natural, and so are those
// whose scale has no room for another factor.
HEADWAY_INLINE double decode_units(const ForwardArgs& head) {
  const bool large = !(head.scale < 0x1p1000 && head.scale > -0x1p1000);
  return head.modifiers.any || large ? log2e : 1;
}

// The softmax of some keys of a row, unnormalised: 2^(score - reference), summed, and times V; with what the sums lost.
template <class S>
struct PartialSoftmaxes {
  using Scalar = typename S::Scalar;
  using Vector = typename S::Vector;

  std::int64_t rows, ld;
  Scalar *references, *sums, *outputs, *lost_sums, *lost_outputs;
  std::int64_t bytes;

  PartialSoftmaxes(std::int64_t chunks, std::int64_t row_count, std::int64_t value_dim, void* memory)
      : rows(row_count), ld(padded<S>(value_dim)) {
    Scratch<char> scratch{static_cast<char*>(memory)};
    references = scratch.take<Scalar>(chunks * rows);
    sums = scratch.take<Scalar>(chunks * rows);
    outputs = scratch.take<Scalar>(chunks * rows * ld);
    lost_sums = scratch.take<Scalar>(chunks * rows);
    lost_outputs = scratch.take<Scalar>(chunks * rows * ld);
    bytes = scratch.used;
  }
  explicit PartialSoftmaxes(const DecodeArgs& args)
      : PartialSoftmaxes(args.chunks, args.rows(), args.heads->value_dim, args.partials) {}

  std::int64_t at(std::int64_t chunk, std::int64_t row) const { return chunk * rows + row; }

  void clear(std::int64_t which) const {
    references[which] = -static_cast<Scalar>(__builtin_inff());
    sums[which] = lost_sums[which] = 0;
    for (std::int64_t d = which * ld; d < (which + 1) * ld; d += S::lanes) {
      S::store(outputs + d, S::zero());
      S::store(lost_outputs + d, S::zero());
    }
  }

  // Adds other keys of the same row. `to_log2` turns the references' units into those of exp2.
  HEADWAY_NOINLINE void absorb(std::int64_t which, Scalar reference, Scalar sum, const Scalar* output,
                               double to_log2) const {
    const Vector units = S::set(static_cast<Scalar>(to_log2));
    const Vector old = S::set(references[which]);
    const Vector raised = raised_reference<S>(old, S::set(reference), units);
    const Vector kept = power(old, raised, units);
    const Vector added = power(S::set(reference), raised, units);
    references[which] = first_lane(raised);
    CompensatedSum<S> total{S::set(sums[which]), S::set(lost_sums[which])};
    total.multiply(kept);
    total.add(S::set(sum) * added);
    sums[which] = first_lane(total.sum);
    lost_sums[which] = first_lane(total.lost);
    for (std::int64_t d = 0; d < ld; d += S::lanes) {
      CompensatedSum<S> one{S::load(outputs + which * ld + d), S::load(lost_outputs + which * ld + d)};
      one.multiply(kept);
      one.add(S::load(output + d) * added);
      S::store(outputs + which * ld + d, one.sum);
      S::store(lost_outputs + which * ld + d, one.lost);
    }
  }

  // Leaves what was summed in `sums` and `outputs`, as numbers of their type.
  void round(std::int64_t which) const {
    sums[which] = first_lane(CompensatedSum<S>{S::set(sums[which]), S::set(lost_sums[which])}.value());
    for (std::int64_t d = which * ld; d < (which + 1) * ld; d += S::lanes) {
      S::store(outputs + d, CompensatedSum<S>{S::load(outputs + d), S::load(lost_outputs + d)}.value());
    }
  }

 private:
  // 2^(from - to), 1 between equal ones; `to` is -inf only where `from` is.
  static HEADWAY_INLINE Vector power(Vector from, Vector to, Vector units) {
    const Vector lowest = S::set(-static_cast<Scalar>(__builtin_inff()));
    const Vector subtract = S::select(S::equal(to, lowest), S::zero(), to);
    return S::select(S::equal(from, to), S::set(1), exp2<S>((from - subtract) * units));
  }
  static HEADWAY_INLINE Scalar first_lane(Vector x) {
    alignas(64) Scalar elements[S::lanes];
    S::store(elements, x);
    return elements[0];
  }
};

}  // namespace
}  // namespace headway::cpu
