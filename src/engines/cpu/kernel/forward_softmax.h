// The softmax of a forward task, each row relative to its reference, in two passes: scores first, then exponentials
// relative to references that no score exceeds by much.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/exp2.h"
#include "engines/cpu/kernel/forward_block.h"
#include "engines/cpu/kernel/forward_scores.h"
#include "engines/cpu/kernel/forward_task.h"
#include "engines/cpu/kernel/forward_values.h"
#include "engines/cpu/kernel/key_sums.h"
#include "engines/cpu/kernel/modifiers.h"
#include "engines/cpu/kernel/near_exp2.h"

namespace headway::cpu {
namespace {

template <class S>
class ForwardSoftmax {
  using Scalar = typename S::Scalar;
  using Vector = typename S::Vector;
  using Mask = typename S::Mask;
  static constexpr int lanes = S::lanes, width = ForwardSizes<S>::width;

 public:
  ForwardSoftmax(const ForwardTask<S>& task, const ForwardBlock<S>& block, ForwardScores<S>& scores,
                 ForwardValues<S>& values)
      : task_(task), block_(block), scores_(scores), values_(values) {}

  // Scores, modifiers, a new reference where a row's maximum passes the old one by far, exponentials, output. Scores
  // are modified while they are in the first-level cache.
  template <int NV>
  HEADWAY_NOINLINE void two_pass(std::int64_t p, int v, const Range& piece, bool edge) {
    Vector highest[NV];
    load_references<NV>(p, v, highest);
    for (std::int64_t key = piece.begin; key < piece.end; key += chunk_keys) {
      const Range chunk{key, smaller(key + chunk_keys, piece.end)};
      scores_.template products<NV>(p, v, chunk);
      if (task_.modified) {
        scores_.modify(p, v, NV, chunk);
      }
      if (edge) {
        scores_.forbid_outside(p, v, chunk);
      }
      raise_to_scores<NV>(v, chunk, highest);
    }
    HEADWAY_UNROLL
    for (int n = 0; n < NV; ++n) {
      highest[n] = raised_reference<S>(S::load(task_.at.references + p * width + (v + n) * lanes), highest[n],
                                       S::set(static_cast<Scalar>(task_.to_log2)));
    }
    exponentiate<NV>(p, v, piece, highest);
  }

  template <int NV>
  HEADWAY_INLINE void load_references(std::int64_t p, int v, Vector (&references)[NV]) const {
    HEADWAY_UNROLL
    for (int n = 0; n < NV; ++n) {
      references[n] = S::load(task_.at.references + p * width + (v + n) * lanes);
    }
  }

  // The larger of `highest` and each row's scores in the piece.
  template <int NV>
  HEADWAY_INLINE void raise_to_scores(int v, const Range& piece, Vector (&highest)[NV]) const {
    const Scalar* scores = block_.scores_at(piece.begin, v);
    for (std::int64_t j = 0; j < piece.end - piece.begin; ++j) {
      HEADWAY_UNROLL
      for (int n = 0; n < NV; ++n) {
        highest[n] = S::max(S::load(scores + j * width + n * lanes), highest[n]);
      }
    }
  }

  // P^T = 2^(S^T - reference) in place, the sums, and the output, for new references that are given. Where rows are not
  // `far`, by Exp.
  template <int NV, class Exp = SummedExp2<S>>
  HEADWAY_INLINE void exponentiate(std::int64_t p, int v, const Range& piece, const Vector (&reference)[NV],
                                   const Mask* far = nullptr) {
    Vector fade[NV], subtract[NV], totals[NV];
    WeightSum<S> sum[NV];
    const Vector to_log2 = S::set(static_cast<Scalar>(task_.to_log2));
    Scalar* references = task_.at.references + p * width + v * lanes;
    HEADWAY_UNROLL
    for (int n = 0; n < NV; ++n) {
      subtract[n] = usable_reference<S>(reference[n]);
      fade[n] = decay<S>(S::load(references + n * lanes), reference[n], task_.to_log2);
      S::store(references + n * lanes, reference[n]);
    }
    Scalar* scores = block_.scores_at(piece.begin, v);
    in_summed_parts(
        piece.end - piece.begin,
        [&](std::int64_t j) HEADWAY_LAMBDA {
          HEADWAY_UNROLL
          for (int n = 0; n < NV; ++n) {
            Scalar* at = scores + j * width + n * lanes;
            const Vector x = (S::load(at) - subtract[n]) * to_log2;
            Vector weight = exp2<S>(x);
            if (LooksUpPowers<S> && far != nullptr) {
              auto witness = Exp::no_witness();
              weight = S::select(far[n], weight, Exp::of(Exp::exponent(S::load(at), subtract[n], to_log2), witness));
            }
            sum[n].add(weight);
            S::store(at, weight);
          }
        },
        [&]() HEADWAY_LAMBDA { end_parts<S>(sum); });
    HEADWAY_UNROLL
    for (int n = 0; n < NV; ++n) {
      totals[n] = sum[n].total();
    }
    add_sums<NV>(p, v, fade, totals);
    values_.template add<NV>(p, v, piece, fade, values_.template weight_operands<NV>(p, v, piece));
  }

  template <int NV>
  HEADWAY_INLINE void add_sums(std::int64_t p, int v, const Vector (&fade)[NV], const Vector (&sum)[NV]) {
    Scalar* sums = task_.at.sums + p * width + v * lanes;
    HEADWAY_UNROLL
    for (int n = 0; n < NV; ++n) {
      S::store(sums + n * lanes, S::fma(S::load(sums + n * lanes), fade[n], sum[n]));
    }
  }

  // References for rows that have none yet: the highest of their scores with a few keys.
  template <int NV>
  HEADWAY_NOINLINE void first_references(std::int64_t p, const Range& piece) {
    Vector highest[NV];
    HEADWAY_UNROLL
    for (int n = 0; n < NV; ++n) {
      highest[n] = S::set(-infinity<S>);
    }
    scores_.template products<NV>(p, 0, piece);
    raise_to_scores<NV>(0, piece, highest);
    HEADWAY_UNROLL
    for (int n = 0; n < NV; ++n) {
      Scalar* at = task_.at.references + p * width + n * lanes;
      const auto missing = S::equal(S::load(at), S::set(-infinity<S>));
      S::store(at, S::select(missing, highest[n], S::load(at)));
    }
  }

  // Whether a row of the panel has had no allowed key yet.
  template <int NV>
  bool lacks_reference(std::int64_t p) const {
    bool any = false;
    HEADWAY_UNROLL
    for (int n = 0; n < NV; ++n) {
      any |= S::any(S::equal(S::load(task_.at.references + p * width + n * lanes), S::set(-infinity<S>)));
    }
    return any;
  }

  // The piece again, with new references and the exponential of any number for the rows with scores out of reach; the
  // other rows repeat their bits.
  template <int NV, class Exp>
  HEADWAY_NOINLINE void raise_references(std::int64_t p, int v, const Range& piece) {
    scores_.template products<NV>(p, v, piece);
    if (task_.modified) {
      scores_.modify(p, v, NV, piece);
    }
    Vector reference[NV];
    Mask far[NV];
    load_references<NV>(p, v, reference);
    raise_to_scores<NV>(v, piece, reference);
    HEADWAY_UNROLL
    for (int n = 0; n < NV; ++n) {
      const Vector old = S::load(task_.at.references + p * width + (v + n) * lanes);
      far[n] = rows_out_of_reach<Exp>(piece, v + n, old);
      const Vector raised = raised_reference<S>(old, reference[n], S::set(static_cast<Scalar>(task_.to_log2)));
      reference[n] = S::select(far[n], raised, old);
    }
    exponentiate<NV, Exp>(p, v, piece, reference, far);
  }

 private:
  template <class Exp>
  Mask rows_out_of_reach(const Range& piece, int n, Vector reference) const {
    WeightSum<S> sum;
    auto witness = Exp::no_witness();
    const Scalar* scores = block_.scores_at(piece.begin, n);
    const Vector to_log2 = S::set(static_cast<Scalar>(task_.to_log2));
    in_summed_parts(
        piece.end - piece.begin,
        [&](std::int64_t j) HEADWAY_LAMBDA {
          sum.add(Exp::of(Exp::exponent(S::load(scores + j * width), reference, to_log2), witness));
        },
        [&]() HEADWAY_LAMBDA { sum.end_part(); });
    return Exp::out_of_reach(witness, sum.total());
  }

  const ForwardTask<S>& task_;
  const ForwardBlock<S>& block_;
  ForwardScores<S>& scores_;
  ForwardValues<S>& values_;
};

}  // namespace
}  // namespace headway::cpu
