// The end of a forward task: dividing by the sums, lse, and the weights.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/exp2.h"
#include "engines/cpu/kernel/forward_block.h"
#include "engines/cpu/kernel/forward_task.h"
#include "engines/cpu/kernel/key_sums.h"
#include "engines/cpu/kernel/log2.h"
#include "engines/cpu/kernel/row_end.h"

namespace headway::cpu {
namespace {

template <class S, class In>
class ForwardFinish {
  using Scalar = typename S::Scalar;
  using Vector = typename S::Vector;
  static constexpr int lanes = S::lanes, width = ForwardSizes<S>::width;

 public:
  ForwardFinish(ForwardTask<S>& task, const ForwardBlock<S>& block) : task_(task), block_(block), args_(task.args) {}

  alignas(64) Scalar last_factors[width] = {};  // of the rows of the panel that was finished last: see end_rows

  // Output, lse and weights of a panel whose keys are all done.
  HEADWAY_NOINLINE void finish_panel(std::int64_t p) {
    const Vector kept_scale = S::set(static_cast<Scalar>(args_.dropout.kept_scale));
    for (int v = 0; v < task_.panel_vectors(p); ++v) {
      const std::int64_t row = task_.panel_row(p) + v * lanes;
      const int rows = at_most(args_.row_end - row, lanes);
      end_rows(p, v, rows, last_factors + v * lanes);
      unpack_transposed<S, In>(task_.output_panel(p) + v * lanes, width, S::load(last_factors + v * lanes) * kept_scale,
                               args_.out, row, rows, args_.value_dim, task_.stored_lanes(p, v));
    }
    if (args_.weights.data != nullptr) {
      store_weights(p, last_factors);
    }
  }

  // What a vector of rows multiplies its unnormalised weights and output by; stores lse.
  void end_rows(std::int64_t p, int v, int rows, Scalar* factors) {
    const Vector sum = S::load(task_.at.sums + p * width + v * lanes);
    S::store(factors, S::set(1) / sum);
    if (args_.lse != nullptr) {
      const Vector reference = S::load(task_.at.references + p * width + v * lanes);
      const Vector natural = S::fma(reference, S::set(static_cast<Scalar>(task_.to_log2 / log2e)),
                                    log2<S>(sum) * S::set(static_cast<Scalar>(1 / log2e)));
      store_lse(p, v, rows, natural);
    }
    if (args_.has_sink || S::any(S::equal(sum, S::zero()))) {
      for (int r = 0; r < rows; ++r) {
        const std::int64_t at = p * width + v * lanes + r;
        if (is_stored(p, v * lanes + r) && (args_.has_sink || task_.at.sums[at] == 0)) {
          const RowSoftmax<Scalar> row{task_.at.references[at], task_.at.sums[at], task_.to_log2};
          const double unusual =
              end_unusual_row(args_, task_.panel_row(p) + v * lanes + r, task_.at.ranges[at], row, factors[r]);
          if (args_.lse != nullptr) {
            *lse_at(p, v * lanes + r) = static_cast<Scalar>(unusual);
          }
        }
      }
    }
  }

  // weights(i, j) = P^T(j, i) * 2^(reference then - reference now) / sum, piece by piece; 0 where no piece was.
  HEADWAY_NOINLINE void store_weights(std::int64_t p, const Scalar* factors) {
    for (int v = 0; v < task_.panel_vectors(p); ++v) {
      const Range& hull = task_.at.panel_ranges[p].vector_hull[v];
      if (task_.at.panel_ranges[p].scattered) {
        clear_weights(p, v, hull.begin, hull.end);
      }
      clear_weights(p, v, 0, hull.begin);
      clear_weights(p, v, hull.end, args_.ranges.keys);
    }
    const Vector to_log2 = S::set(static_cast<Scalar>(task_.to_log2));
    for (std::int64_t k = 0; k < task_.pieces; ++k) {
      const auto& piece = task_.at.pieces[k];
      for (int v = piece.vector; v < piece.vector + piece.vectors; ++v) {
        const Vector now = usable_reference<S>(S::load(task_.at.references + p * width + v * lanes));
        const Vector then = S::load(task_.at.piece_references + k * width + v * lanes);
        const Range keys{piece.key_begin, piece.key_begin + piece.keys};
        const Vector rise = lower_by_half(v, keys, (then - now) * to_log2);
        store_piece(p, v, keys, S::load(factors + v * lanes) * exp2<S>(rise));
      }
    }
    task_.pieces = 0;
    for (int r = 0; r < task_.panel_rows(p); ++r) {
      if (factors[r] != factors[r] && is_stored(p, r)) {
        clear_forbidden(p, r);
      }
    }
  }

  // weights(row, key) = factor[lane] * scores[key][lane] for a vector of rows and the keys of a piece.
  void store_piece(std::int64_t p, int v, const Range& piece, Vector factor) {
    const std::int64_t row = task_.panel_row(p) + v * lanes;
    const WritableMatrix& weights = args_.weights;
    const WritableMatrix target{static_cast<In*>(weights.data) + piece.begin * weights.column_stride,
                                weights.row_stride, weights.column_stride};
    unpack_transposed<S, In>(block_.scores_at(piece.begin, v), width, factor, target, row,
                             at_most(args_.row_end - row, lanes), piece.end - piece.begin, task_.stored_lanes(p, v));
  }

 private:
  bool is_stored(std::int64_t p, int r) const { return (task_.stored_lanes(p, r / lanes) >> (r % lanes) & 1) != 0; }

  void store_lse(std::int64_t p, int v, int rows, Vector lse) {
    if (args_.stored_rows == ~std::uint64_t{0}) {
      store_row<S>(lse_at(p, v * lanes), args_.lse_stride, 0, rows, lse);
      return;
    }
    alignas(64) Scalar elements[lanes];
    S::store(elements, lse);
    for (int r = 0; r < rows; ++r) {
      if (is_stored(p, v * lanes + r)) {
        *lse_at(p, v * lanes + r) = elements[r];
      }
    }
  }

  Scalar* lse_at(std::int64_t p, int r) const {
    return static_cast<Scalar*>(args_.lse) + (task_.panel_row(p) + r) * args_.lse_stride;
  }

  // Where 2^rise would have few bits or none, the piece's weights take half of it in, which leaves none of them smaller
  // than it ends. Returns what is left.
  Vector lower_by_half(int v, const Range& piece, Vector rise) {
    constexpr int least = sizeof(Scalar) == 4 ? -100 : -1000;
    const auto low = S::less(rise, S::set(least));
    if (!S::any(low)) {
      return rise;
    }
    rise = S::max(S::set(4 * least), rise);  // -inf where no key was allowed yet
    const Vector half = S::select(low, rise * S::set(static_cast<Scalar>(0.5)), S::zero());
    const Vector factor = exp2<S>(half);
    Scalar* weights = block_.scores_at(piece.begin, v);
    for (std::int64_t j = 0; j < piece.end - piece.begin; ++j) {
      S::store(weights + j * width,
               S::select(low, S::load(weights + j * width) * factor, S::load(weights + j * width)));
    }
    return rise - half;
  }

  // Also in a row that is NaN, the weight of a key that may not be attended to is 0.
  void clear_forbidden(std::int64_t p, int r) {
    const std::int64_t row = task_.panel_row(p) + r;
    In* weights = static_cast<In*>(args_.weights.data) + row * args_.weights.row_stride;
    for (std::int64_t key = 0; key < args_.ranges.keys; ++key) {
      if (!is_allowed(args_.ranges, args_.modifiers, task_.at.ranges[p * width + r], row, key)) {
        weights[key * args_.weights.column_stride] = In{};
      }
    }
  }

  void clear_weights(std::int64_t p, int v, std::int64_t from, std::int64_t to) {
    const std::int64_t row = task_.panel_row(p) + v * lanes;
    for (int r = 0; r < at_most(args_.row_end - row, lanes); ++r) {
      if (!is_stored(p, v * lanes + r)) {
        continue;
      }
      In* weights = static_cast<In*>(args_.weights.data) + (row + r) * args_.weights.row_stride;
      for (std::int64_t key = from; key < to; ++key) {
        weights[key * args_.weights.column_stride] = In{};
      }
    }
  }

  ForwardTask<S>& task_;
  const ForwardBlock<S>& block_;
  const ForwardArgs& args_;
};

}  // namespace
}  // namespace headway::cpu
