// The end of a forward task: dividing by the sums, lse, and the weights.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/exp2.h"
#include "engines/cpu/kernel/forward_state.h"
#include "engines/cpu/kernel/log2.h"
#include "engines/cpu/kernel/row_end.h"

namespace headway::cpu {
namespace {

template <class S, class In>
class ForwardFinish : public ForwardState<S, In> {
 protected:
  using Base = ForwardState<S, In>;
  using Base::args_;
  using Base::at_;
  using Base::Base;
  using Base::infinity;
  using Base::lanes;
  using Base::panel_row;
  using Base::panel_rows;
  using Base::panel_vectors;
  using Base::pieces_;
  using Base::to_log2_;
  using Base::width;
  using typename Base::Scalar;
  using typename Base::Vector;

  // Output, lse and weights of a panel whose keys are all done.
  HEADWAY_NOINLINE void finish_panel(std::int64_t p) {
    alignas(64) Scalar factors[width] = {};
    const Vector kept_scale = S::set(static_cast<Scalar>(args_.dropout.kept_scale));
    for (int v = 0; v < panel_vectors(p); ++v) {
      const std::int64_t row = panel_row(p) + v * lanes;
      const int rows = at_most(args_.row_end - row, lanes);
      end_rows(p, v, rows, factors + v * lanes);
      unpack_transposed<S, In>(this->output_panel(p) + v * lanes, width, S::load(factors + v * lanes) * kept_scale,
                               args_.out, row, rows, args_.value_dim);
    }
    if (args_.weights.data != nullptr) {
      store_weights(p, factors);
    }
  }

  // The reference that an exponent may subtract: a row with no allowed key yet has -inf scores only.
  HEADWAY_INLINE static Vector usable(Vector reference) {
    return S::select(S::equal(reference, S::set(-infinity)), S::zero(), reference);
  }

  // Remembers the references behind a piece's weights until all keys are done.
  void remember(std::int64_t p, int v, int vectors, const Range& piece) {
    if (args_.weights.data == nullptr) {
      return;
    }
    at_.pieces[pieces_] = {piece.begin, piece.end - piece.begin, v, vectors};
    for (int r = 0; r < width; ++r) {
      at_.piece_references[pieces_ * width + r] = at_.references[p * width + r];
    }
    ++pieces_;
  }

  // What a vector of rows multiplies its unnormalised weights and output by; stores lse.
  void end_rows(std::int64_t p, int v, int rows, Scalar* factors) {
    const Vector sum = S::load(at_.sums + p * width + v * lanes);
    S::store(factors, S::set(1) / sum);
    if (args_.lse != nullptr) {
      const Vector reference = S::load(at_.references + p * width + v * lanes);
      const Vector natural = S::fma(reference, S::set(static_cast<Scalar>(to_log2_ / log2e)),
                                    log2<S>(sum) * S::set(static_cast<Scalar>(1 / log2e)));
      store_row<S>(lse_at(p, v * lanes), args_.lse_stride, 0, rows, natural);
    }
    if (args_.has_sink || S::any(S::equal(sum, S::zero()))) {
      for (int r = 0; r < rows; ++r) {
        const std::int64_t at = p * width + v * lanes + r;
        if (args_.has_sink || at_.sums[at] == 0) {
          const RowSoftmax<Scalar> row{at_.references[at], at_.sums[at], to_log2_};
          const double unusual = end_unusual_row(args_, panel_row(p) + v * lanes + r, at_.ranges[at], row, factors[r]);
          if (args_.lse != nullptr) {
            *lse_at(p, v * lanes + r) = static_cast<Scalar>(unusual);
          }
        }
      }
    }
  }

 private:
  Scalar* lse_at(std::int64_t p, int r) const {
    return static_cast<Scalar*>(args_.lse) + (panel_row(p) + r) * args_.lse_stride;
  }

 protected:
  // weights(i, j) = P^T(j, i) * 2^(reference then - reference now) / sum, piece by piece; 0 where no piece was.
  HEADWAY_NOINLINE void store_weights(std::int64_t p, const Scalar* factors) {
    for (int v = 0; v < panel_vectors(p); ++v) {
      const Range& hull = at_.panel_ranges[p].vector_hull[v];
      clear_weights(p, v, 0, hull.begin);
      clear_weights(p, v, hull.end, args_.ranges.keys);
    }
    const Vector to_log2 = S::set(static_cast<Scalar>(to_log2_));
    for (std::int64_t k = 0; k < pieces_; ++k) {
      const auto& piece = at_.pieces[k];
      for (int v = piece.vector; v < piece.vector + piece.vectors; ++v) {
        const Vector now = usable(S::load(at_.references + p * width + v * lanes));
        const Vector then = S::load(at_.piece_references + k * width + v * lanes);
        const Vector factor = S::load(factors + v * lanes) * exp2<S>((then - now) * to_log2);
        store_piece(panel_row(p) + v * lanes, v, {piece.key_begin, piece.key_begin + piece.keys}, factor);
      }
    }
    pieces_ = 0;
    for (int r = 0; r < panel_rows(p); ++r) {
      if (factors[r] != factors[r]) {
        clear_forbidden(p, r);
      }
    }
  }

 private:
  // Also in a row that is NaN, the weight of a key that may not be attended to is 0.
  void clear_forbidden(std::int64_t p, int r) {
    const std::int64_t row = panel_row(p) + r;
    In* weights = static_cast<In*>(args_.weights.data) + row * args_.weights.row_stride;
    for (std::int64_t key = 0; key < args_.ranges.keys; ++key) {
      if (!is_allowed(args_.modifiers, at_.ranges[p * width + r], row, key)) {
        weights[key * args_.weights.column_stride] = In{};
      }
    }
  }

  void clear_weights(std::int64_t p, int v, std::int64_t from, std::int64_t to) {
    const std::int64_t row = panel_row(p) + v * lanes;
    for (std::int64_t r = row; r < smaller(row + lanes, args_.row_end); ++r) {
      In* weights = static_cast<In*>(args_.weights.data) + r * args_.weights.row_stride;
      for (std::int64_t key = from; key < to; ++key) {
        weights[key * args_.weights.column_stride] = In{};
      }
    }
  }

 protected:
  // weights(row + lane, key) = factor[lane] * scores[key][lane] for the keys of a piece.
  void store_piece(std::int64_t row, int v, const Range& piece, Vector factor) {
    const WritableMatrix& weights = args_.weights;
    const WritableMatrix target{static_cast<In*>(weights.data) + piece.begin * weights.column_stride,
                                weights.row_stride, weights.column_stride};
    unpack_transposed<S, In>(this->scores_at(piece.begin, v), width, factor, target, row,
                             at_most(args_.row_end - row, lanes), piece.end - piece.begin);
  }
};

}  // namespace
}  // namespace headway::cpu
