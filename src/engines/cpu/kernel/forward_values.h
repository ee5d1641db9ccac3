// The output of a forward task: the weights as multiplicands, and O^T += V^T P^T.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/dropout.h"
#include "engines/cpu/kernel/forward_block.h"
#include "engines/cpu/kernel/forward_task.h"
#include "engines/cpu/kernel/modifiers.h"
#include "engines/cpu/kernel/strips.h"
#include "engines/cpu/kernel/tile.h"
#include "engines/cpu/kernel/tile_products.h"

namespace headway::cpu {
namespace {

template <class S>
class ForwardValues {
  using Scalar = typename S::Scalar;
  using Vector = typename S::Vector;
  using Operand = typename Operands<S>::Scalar;
  using Sizes = ForwardSizes<S>;
  static constexpr int lanes = S::lanes, width = Sizes::width, fold = Sizes::fold;

 public:
  ForwardValues(ForwardTask<S>& task, const ForwardBlock<S>& block) : task_(task), block_(block), args_(task.args) {}

  // Whether weights are needed as scalars also where they could go straight into pairs.
  bool keeps_scalars() const {
    return fold == 1 || args_.weights.data != nullptr || args_.dropout.active || block_.hides_values;
  }

  // Where the multiplicands of the keys from `key` on lie: the scores themselves, or pairs beside them.
  Operand* operands_at(std::int64_t key, int v) const {
    if constexpr (fold == 1) {
      return block_.scores_at(key, v);
    } else if constexpr (HasTiles<S>) {
      return task_.at.pairs + v * Sizes::pairs_of_vector + (key - block_.begin) / fold * lanes;
    } else {
      return task_.at.pairs + (key - block_.begin) / fold * width + v * lanes;
    }
  }

  // The weights as add() multiplies them: after dropout, in pairs where the vocabulary wants pairs.
  template <int NV>
  HEADWAY_INLINE const Operand* weight_operands(std::int64_t p, int v, const Range& piece) {
    const Scalar* weights = args_.dropout.active ? dropped(p, v, NV, piece) : block_.scores_at(piece.begin, v);
    if constexpr (fold == 1) {
      return weights;
    } else {
      std::int64_t key = piece.begin / fold * fold;
      const std::int64_t product_end =
          key + (piece.end - key + Sizes::key_step - 1) / Sizes::key_step * Sizes::key_step;
      for (; key < piece.end; key += fold) {
        const Scalar* at = weights + (key - piece.begin) * width;
        HEADWAY_UNROLL
        for (int n = 0; n < NV; ++n) {
          const Vector first = key >= piece.begin ? S::load(at + n * lanes) : S::zero();
          const Vector second = key + 1 < piece.end ? S::load(at + width + n * lanes) : S::zero();
          Operands<S>::store(operands_at(key, v + n), Operands<S>::pairs(first, second));
        }
      }
      for (; key < product_end; key += fold) {
        for (int n = 0; n < NV; ++n) {
          Operands<S>::store(operands_at(key, v + n), Operands<S>::zero());
        }
      }
      return operands_at(piece.begin, v);
    }
  }

  const Scalar* dropped(std::int64_t p, int v, int vectors, const Range& piece) {
    Scalar* target = args_.weights.data != nullptr ? task_.at.dropped + v * lanes : block_.scores_at(piece.begin, v);
    for (int n = 0; n < vectors; ++n) {
      drop<S>(args_.dropout, task_.panel_row(p) + (v + n) * lanes, piece.begin, piece.end - piece.begin,
              block_.scores_at(piece.begin, v + n), target + n * lanes, width);
    }
    return target;
  }

  // O^T = O^T * decay + V^T P^T, a piece's sum first, so that long rows keep their accuracy.
  template <int NV>
  HEADWAY_NOINLINE void add(std::int64_t p, int v, const Range& piece, const Vector (&decay)[NV],
                            const Operand* weights) {
    constexpr int NB = broadcasts<S, NV>();
    task_.at.panel_ranges[p].has_terms = true;
    task_.remember(p, v, NV, piece);
    const Operand* values = block_.value_operands(piece.begin);
    const std::int64_t steps = (piece.end + fold - 1) / fold - piece.begin / fold;
    Scalar* output = task_.output_panel(p) + v * lanes;
    if constexpr (HasTiles<S>) {
      const std::int64_t rows = Sizes::output_rows(args_);
      multiply_rows<S, NV>(output, width, rows, decay);
      add_values_by_tiles<S, NV>({values, block_.values.ld, tile_side * block_.values.ld},
                                 {weights, lanes, Sizes::pairs_of_vector}, (steps + tile_pairs - 1) / tile_pairs,
                                 {output, width, tile_side * width}, rows);
    } else {
      std::int64_t d = 0;
      for (; d + NB <= args_.value_dim; d += NB) {
        value_tile<NV, NB>(weights, values + d, steps, output + d * width, decay);
      }
      for (; d < args_.value_dim; ++d) {
        value_tile<NV, 1>(weights, values + d, steps, output + d * width, decay);
      }
    }
    if (block_.hides_values) {
      add_hidden_values(p, v, NV, piece);
    }
  }

  // add(r, d, weight * value) for each hidden value and each row r, counted from vector v on, that may attend to it.
  template <class Add>
  void for_hidden_values(std::int64_t p, int v, int vectors, const Range& piece, const Scalar* weights,
                         const Add& add) {
    const std::int64_t row = task_.panel_row(p) + v * lanes;
    const int rows = at_most(args_.row_end - row, vectors * lanes);
    for (std::int64_t key = piece.begin; key < piece.end; ++key) {
      for (std::int64_t d = 0; d < args_.value_dim; ++d) {
        const Scalar value = block_.value_at(key, d);
        if (!block_.is_hidden(value)) {
          continue;
        }
        for (int r = 0; r < rows; ++r) {
          if (is_allowed(args_.ranges, args_.modifiers, task_.at.ranges[p * width + v * lanes + r], row + r, key)) {
            add(r, d, weights[(key - piece.begin) * width + r] * value);
          }
        }
      }
    }
  }

 private:
  template <int NV, int NB>
  HEADWAY_INLINE void value_tile(const Operand* weights, const Operand* values, std::int64_t steps, Scalar* output,
                                 const Vector (&decay)[NV]) {
    Accumulators<S, NV, NB> acc;
    add_in_parts<S, NV, NB>(acc, steps, summed_values<S>, [&](std::int64_t begin, std::int64_t count) HEADWAY_LAMBDA {
      accumulate<S, NV, NB, Scalars::along>(acc, weights + begin * width, width, values + begin * block_.values.ld,
                                            block_.values.ld, count);
    });
    HEADWAY_UNROLL
    for (int c = 0; c < NB; ++c) {
      HEADWAY_UNROLL
      for (int n = 0; n < NV; ++n) {
        Scalar* at = output + c * width + n * lanes;
        S::store(at, S::fma(S::load(at), decay[n], acc[c][n]));
      }
    }
  }

  // The values that were hidden, for the rows that may attend to them.
  HEADWAY_NOINLINE void add_hidden_values(std::int64_t p, int v, int vectors, const Range& piece) {
    const bool apart = args_.dropout.active && args_.weights.data != nullptr;
    const Scalar* weights = apart ? task_.at.dropped + v * lanes : block_.scores_at(piece.begin, v);
    for_hidden_values(p, v, vectors, piece, weights, [&](int r, std::int64_t d, Scalar term) {
      task_.output_panel(p)[d * width + v * lanes + r] += term;
    });
  }

  ForwardTask<S>& task_;
  const ForwardBlock<S>& block_;
  const ForwardArgs& args_;
};

}  // namespace
}  // namespace headway::cpu
