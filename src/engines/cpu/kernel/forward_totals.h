// The totals of a forward task over many keys. Every few blocks a panel's sums and outputs are added to compensated
// totals and start from 0 again, so that no number of keys lets them drift.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/forward_task.h"
#include "engines/cpu/kernel/key_sums.h"

namespace headway::cpu {
namespace {

template <class S>
class ForwardTotals {
  using Scalar = typename S::Scalar;
  using Vector = typename S::Vector;
  using Sizes = ForwardSizes<S>;
  static constexpr int lanes = S::lanes, width = Sizes::width;

 public:
  explicit ForwardTotals(ForwardTask<S>& task) : task_(task), args_(task.args) {}

  void clear(std::int64_t p) {
    if (!Sizes::has_totals(args_)) {
      return;
    }
    for (int v = 0; v < task_.panel_vectors(p); ++v) {
      const std::int64_t row = p * width + v * lanes;
      S::store(task_.at.total_references + row, S::set(-infinity<S>));
      each_sum(p, v, [](Scalar*, Scalar* total, Scalar* lost) HEADWAY_LAMBDA {
        S::store(total, S::zero());
        S::store(lost, S::zero());
      });
    }
  }

  // After a block of keys.
  void add_block(std::int64_t block) {
    if (!Sizes::has_totals(args_) || block % Sizes::total_blocks != Sizes::total_blocks - 1) {
      return;
    }
    for (std::int64_t p = 0; p < task_.panels; ++p) {
      if (task_.at.panel_ranges[p].has_terms) {  // adding zeros would change nothing
        add_panel(p);
      }
    }
  }

  // After the last.
  void take(std::int64_t p) {
    if (!Sizes::has_totals(args_)) {
      return;
    }
    add_panel(p);
    for (int v = 0; v < task_.panel_vectors(p); ++v) {
      each_sum(p, v, [](Scalar* sum, Scalar* total, Scalar* lost) HEADWAY_LAMBDA {
        S::store(sum, CompensatedSum<S>{S::load(total), S::load(lost)}.value());
      });
    }
  }

 private:
  HEADWAY_NOINLINE void add_panel(std::int64_t p) {
    task_.at.panel_ranges[p].has_terms = false;
    for (int v = 0; v < task_.panel_vectors(p); ++v) {
      const std::int64_t row = p * width + v * lanes;
      const Vector reference = S::load(task_.at.references + row);
      const Vector factor = decay<S>(S::load(task_.at.total_references + row), reference, task_.to_log2);
      S::store(task_.at.total_references + row, reference);
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
    body(task_.at.sums + row, task_.at.total_sums + row, task_.at.lost_sums + row);
    for (std::int64_t d = 0; d < args_.value_dim; ++d) {
      const std::int64_t at = (p * Sizes::output_rows(args_) + d) * width + v * lanes;
      body(task_.at.outputs + at, task_.at.total_outputs + at, task_.at.lost_outputs + at);
    }
  }

  ForwardTask<S>& task_;
  const ForwardArgs& args_;
};

}  // namespace
}  // namespace headway::cpu
