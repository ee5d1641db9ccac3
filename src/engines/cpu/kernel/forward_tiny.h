// Outputs that are lost in dot products of bf16 pairs. The instruction flushes denormals, so an output whose terms are
// all tiny becomes 0 or lacks some of them. Such outputs are rare: they are detected when a panel is done and
// recomputed in float.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/exp2.h"
#include "engines/cpu/kernel/forward_block.h"
#include "engines/cpu/kernel/forward_scores.h"
#include "engines/cpu/kernel/forward_task.h"
#include "engines/cpu/kernel/forward_values.h"
#include "engines/cpu/kernel/key_sums.h"

namespace headway::cpu {
namespace {

template <class S, class In>
class TinyOutputs {
  using Scalar = typename S::Scalar;
  using Vector = typename S::Vector;
  using Mask = typename S::Mask;
  using Sizes = ForwardSizes<S>;
  static constexpr int lanes = S::lanes, width = Sizes::width, fold = Sizes::fold;

 public:
  TinyOutputs(const ForwardTask<S>& task, ForwardBlock<S>& block, ForwardScores<S>& scores, ForwardValues<S>& values,
              const Scalar* factors)
      : task_(task), block_(block), args_(task.args), scores_(scores), values_(values), factors_(factors) {}

  // After ForwardFinish::finish_panel, whose outputs are still in scratch.
  void restore_panel(std::int64_t p) {
    if constexpr (fold > 1) {
      for (int v = 0; v < task_.panel_vectors(p); ++v) {
        if (may_lack_terms(p, v)) {
          restore(p, v);
        }
      }
    }
  }

 private:
  // A term is lost below 2^-126, or below that times its value where the weight is flushed before. Beside an output
  // from here on, for values up to 1, a million such terms are nothing.
  static constexpr double tiny_output = 0x1p-90;
  static constexpr double largest_value = 0x1p60;  // 1e18, the largest that the contract speaks of

  HEADWAY_INLINE static Vector least_safe_output(Vector largest) {
    return S::max(largest, S::set(1)) * S::set(static_cast<Scalar>(tiny_output));
  }
  Vector output_of(std::int64_t p, int v, std::int64_t d) const {
    return S::load(task_.output_panel(p) + d * width + v * lanes);
  }
  Mask has_weights(std::int64_t p, int v) const {
    return S::less(S::zero(), S::load(task_.at.sums + p * width + v * lanes));
  }

  // Whether an output of these rows may be short of terms: a quick look that may err on the side of yes.
  bool may_lack_terms(std::int64_t p, int v) {
    Vector least = S::set(infinity<S>);
    for (std::int64_t d = 0; d < args_.value_dim; ++d) {
      least = S::min(S::abs(output_of(p, v, d)), least);  // NaN passes by
    }
    const Mask rows = has_weights(p, v);
    if (!S::any(S::both(rows, S::less(least, S::set(static_cast<Scalar>(tiny_output * largest_value)))))) {
      return false;
    }
    find_largest_values();
    bool found = false;
    for (std::int64_t d = 0; d < args_.value_dim; ++d) {
      const Scalar largest = task_.at.largest_values[d];
      const Mask lacking = S::less(S::abs(output_of(p, v, d)), least_safe_output(S::set(largest)));
      found |= largest != 0 && S::any(S::both(rows, lacking));
    }
    return found;
  }

  // Of each column of V, over all keys; once a task.
  void find_largest_values() {
    if (knows_largest_values_) {
      return;
    }
    knows_largest_values_ = true;
    for (std::int64_t d = 0; d < args_.value_dim; d += lanes) {
      const int count = at_most(args_.value_dim - d, lanes);
      Vector largest = S::zero();
      for (std::int64_t key = 0; key < args_.ranges.keys; ++key) {
        largest = S::max(S::abs(SourceRow<S, In>(args_.value, key).part(d, count)), largest);
      }
      S::store_first(task_.at.largest_values + d, count, largest);
    }
  }

  // The outputs of a vector of rows again, in float. What a row's own keys hold decides which of them replace those
  // before.
  HEADWAY_NOINLINE void restore(std::int64_t p, int v) {
    for (std::int64_t d = 0; d < 2 * args_.value_dim; ++d) {
      S::store(task_.at.exact_outputs + d * lanes, S::zero());
    }
    const Range& hull = task_.at.panel_ranges[p].vector_hull[v];
    for (std::int64_t key = hull.begin / Sizes::key_block * Sizes::key_block; key < hull.end; key += Sizes::key_block) {
      block_.enter(key, smaller((hull.end + fold - 1) / fold * fold, args_.ranges.keys));
      block_.template load<In>();
      add_block(p, v, {larger(key, hull.begin), smaller(key + Sizes::key_block, hull.end)});
    }
    const Vector factor = S::load(factors_ + v * lanes) * S::set(static_cast<Scalar>(args_.dropout.kept_scale));
    for (std::int64_t d = 0; d < args_.value_dim; ++d) {
      const Vector largest = S::load(task_.at.exact_outputs + (args_.value_dim + d) * lanes);
      const Mask lacking = S::both(has_weights(p, v), S::less(S::abs(output_of(p, v, d)), least_safe_output(largest)));
      if (S::any(lacking)) {
        store_column(p, v, d, lacking, S::load(task_.at.exact_outputs + d * lanes) * factor);
      }
    }
  }

  // Adds weights * values of these keys, and finds the largest values, where weights are not 0.
  void add_block(std::int64_t p, int v, const Range& piece) {
    const Vector reference = usable_reference<S>(S::load(task_.at.references + p * width + v * lanes));
    const Vector to_log2 = S::set(static_cast<Scalar>(task_.to_log2));
    scores_.template products<1>(p, v, piece);
    if (task_.modified) {
      scores_.modify(p, v, 1, piece);
    }
    Scalar* scores = block_.scores_at(piece.begin, v);
    scores_.forbid_outside(p, v, piece);
    for (std::int64_t j = 0; j < piece.end - piece.begin; ++j) {
      S::store(scores + j * width, exp2<S>((S::load(scores + j * width) - reference) * to_log2));
    }
    const Scalar* weights = args_.dropout.active ? values_.dropped(p, v, 1, piece) : scores;
    for (std::int64_t j = 0; j < piece.end - piece.begin; ++j) {
      const Vector weight = S::load(weights + j * width);
      const Mask counts = S::less(S::zero(), weight);
      for (std::int64_t d = 0; d < args_.value_dim; ++d) {
        const Vector value = S::set(block_.value_at(piece.begin + j, d));
        Scalar* sum = task_.at.exact_outputs + d * lanes;
        Scalar* largest = sum + args_.value_dim * lanes;
        S::store(sum, S::select(counts, S::fma(weight, value, S::load(sum)), S::load(sum)));
        S::store(largest, S::select(counts, S::max(S::abs(value), S::load(largest)), S::load(largest)));
      }
    }
  }

  void store_column(std::int64_t p, int v, std::int64_t d, Mask wanted, Vector numbers) {
    alignas(64) Scalar marks[lanes];
    alignas(64) Scalar elements[lanes];
    S::store(marks, S::select(wanted, S::set(1), S::zero()));
    S::store(elements, numbers);
    const std::int64_t row = task_.panel_row(p) + v * lanes;
    for (int r = 0; r < at_most(args_.row_end - row, lanes); ++r) {
      if (marks[r] != 0 && (task_.stored_lanes(p, v) >> r & 1) != 0) {
        In* at = static_cast<In*>(args_.out.data) + (row + r) * args_.out.row_stride;
        store_row<S>(at, args_.out.column_stride, d, 1, S::set(elements[r]));
      }
    }
  }

  const ForwardTask<S>& task_;
  ForwardBlock<S>& block_;
  const ForwardArgs& args_;
  ForwardScores<S>& scores_;
  ForwardValues<S>& values_;
  const Scalar* factors_;  // of the panel's rows, as ForwardFinish found them
  bool knows_largest_values_ = false;
};

}  // namespace
}  // namespace headway::cpu
