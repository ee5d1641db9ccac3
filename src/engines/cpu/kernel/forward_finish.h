// The end of a forward task: dividing by the sums, lse, and the weights.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/exp2.h"
#include "engines/cpu/kernel/forward_state.h"

namespace headway::cpu {
namespace {

template <class S, class In>
class ForwardFinish : public ForwardState<S, In> {
 protected:
  using Base = ForwardState<S, In>;
  using typename Base::Scalar;
  using typename Base::Vector;
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

  // Output, lse and weights of a panel whose keys are all done.
  HEADWAY_NOINLINE void finish_panel(std::int64_t p) {
    alignas(64) Scalar factors[width] = {};
    for (int r = 0; r < panel_rows(p); ++r) {
      const RowEnd end = row_end(p, r);
      factors[r] = end.factor;
      if (args_.lse != nullptr) {
        static_cast<Scalar*>(args_.lse)[(panel_row(p) + r) * args_.lse_stride] = static_cast<Scalar>(end.lse);
      }
    }
    const Vector kept_scale = S::set(static_cast<Scalar>(args_.dropout.kept_scale));
    for (int v = 0; v < panel_vectors(p); ++v) {
      const std::int64_t row = panel_row(p) + v * lanes;
      unpack_transposed<S, In>(this->output_panel(p) + v * lanes, width, S::load(factors + v * lanes) * kept_scale,
                               args_.out, row, at_most(args_.row_end - row, lanes), args_.value_dim);
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

 private:
  // A row in the end: what its unnormalised weights and output are multiplied by, and its lse.
  struct RowEnd {
    Scalar factor;
    double lse;
  };

  RowEnd row_end(std::int64_t p, int r) const {
    const std::int64_t row = panel_row(p) + r;
    const double reference = at_.references[p * width + r] * to_log2_;
    const double sum = at_.sums[p * width + r];
    const bool sinks = args_.has_sink && row < args_.ranges.real_queries;
    if (sum == 0) {  // no key may be attended to, or a key may and every score is -inf
      const bool lost = any_allowed(at_.ranges[p * width + r], row);
      const double lse = lost ? __builtin_nan("") : sinks ? args_.sink : -static_cast<double>(infinity);
      return {lost ? static_cast<Scalar>(__builtin_nanf("")) : Scalar{0}, lse};
    }
    if (!sinks) {
      return {static_cast<Scalar>(1 / sum), (reference + __builtin_log2(sum)) / log2e};
    }
    const double sink = args_.sink * log2e;
    const double highest = sink > reference ? sink : reference;
    const double total = sum * __builtin_exp2(reference - highest) + __builtin_exp2(sink - highest);
    return {static_cast<Scalar>(__builtin_exp2(reference - highest) / total),
            (highest + __builtin_log2(total)) / log2e};
  }

  bool any_allowed(const Range& range, std::int64_t row) const {
    for (std::int64_t key = range.begin; key < range.end; ++key) {
      if (is_allowed(args_.modifiers, range, row, key)) {
        return true;
      }
    }
    return false;
  }

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
    const WritableMatrix target{static_cast<In*>(weights.data) + piece.begin * weights.column_stride, weights.row_stride,
                                weights.column_stride};
    unpack_transposed<S, In>(this->scores_at(piece.begin, v), width, factor, target, row,
                             at_most(args_.row_end - row, lanes), piece.end - piece.begin);
  }
};

}  // namespace
}  // namespace headway::cpu
