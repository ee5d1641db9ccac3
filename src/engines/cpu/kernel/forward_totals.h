// The totals of a forward task over many keys. Every few blocks a panel's sums and outputs are added to compensated
// totals and start from 0 again, so that no number of keys lets them drift.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/exp2.h"
#include "engines/cpu/kernel/forward_state.h"
#include "engines/cpu/kernel/key_sums.h"

namespace headway::cpu {
namespace {

template <class S, class In>
class ForwardTotals : public ForwardState<S, In> {
 protected:
  using Base = ForwardState<S, In>;
  using Base::args_;
  using Base::at_;
  using Base::Base;
  using Base::infinity;
  using Base::lanes;
  using Base::panel_vectors;
  using Base::to_log2_;
  using Base::width;
  using typename Base::Scalar;
  using typename Base::Vector;

  // The reference that an exponent may subtract: a row with no allowed key yet has -inf scores only.
  HEADWAY_INLINE static Vector usable(Vector reference) {
    return S::select(S::equal(reference, S::set(-infinity)), S::zero(), reference);
  }

  // What multiplies the sums of a row when its reference changes.
  HEADWAY_INLINE Vector decay(Vector old, Vector now) const {
    const Vector exponent = (old - usable(now)) * S::set(static_cast<Scalar>(to_log2_));
    return S::select(S::equal(old, now), S::set(1), exp2<S>(exponent));
  }

  void clear_totals(std::int64_t p) {
    if (!Base::has_totals(args_)) {
      return;
    }
    for (int v = 0; v < panel_vectors(p); ++v) {
      const std::int64_t row = p * width + v * lanes;
      S::store(at_.total_references + row, S::set(-infinity));
      each_sum(p, v, [](Scalar*, Scalar* total, Scalar* lost) HEADWAY_LAMBDA {
        S::store(total, S::zero());
        S::store(lost, S::zero());
      });
    }
  }

  // After a block of keys.
  void add_to_totals(std::int64_t block) {
    if (!Base::has_totals(args_) || block % Base::total_blocks != Base::total_blocks - 1) {
      return;
    }
    for (std::int64_t p = 0; p < this->panels_; ++p) {
      if (at_.panel_ranges[p].has_terms) {  // adding zeros would change nothing
        add_panel(p);
      }
    }
  }

  // After the last.
  void take_totals(std::int64_t p) {
    if (!Base::has_totals(args_)) {
      return;
    }
    add_panel(p);
    for (int v = 0; v < panel_vectors(p); ++v) {
      each_sum(p, v, [](Scalar* sum, Scalar* total, Scalar* lost) HEADWAY_LAMBDA {
        S::store(sum, CompensatedSum<S>{S::load(total), S::load(lost)}.value());
      });
    }
  }

 private:
  HEADWAY_NOINLINE void add_panel(std::int64_t p) {
    at_.panel_ranges[p].has_terms = false;
    for (int v = 0; v < panel_vectors(p); ++v) {
      const std::int64_t row = p * width + v * lanes;
      const Vector reference = S::load(at_.references + row);
      const Vector factor = decay(S::load(at_.total_references + row), reference);
      S::store(at_.total_references + row, reference);
      each_sum(p, v, [&](Scalar* sum, Scalar* total, Scalar* lost) HEADWAY_LAMBDA {
        CompensatedSum<S> both{S::load(total), S::load(lost)};
        both.multiply(factor);
        both.add(S::load(sum));
        S::store(total, both.sum);
        S::store(lost, both.lost);
        S::store(sum, S::zero());
      });
    }
  }

  // body(sum, its total, what the total lost) for the sums and the outputs of a vector of rows.
  template <class Body>
  HEADWAY_INLINE void each_sum(std::int64_t p, int v, const Body& body) {
    const std::int64_t row = p * width + v * lanes;
    body(at_.sums + row, at_.total_sums + row, at_.lost_sums + row);
    for (std::int64_t d = 0; d < args_.value_dim; ++d) {
      const std::int64_t at = (p * Base::output_rows(args_) + d) * width + v * lanes;
      body(at_.outputs + at, at_.total_outputs + at, at_.lost_outputs + at);
    }
  }
};

}  // namespace
}  // namespace headway::cpu
