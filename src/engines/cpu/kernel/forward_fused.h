// Fused softmax: keys inside every row's range, against references that exist, so that the exponentials follow the
// scores in registers, or hide between the products of the next keys.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/forward_block.h"
#include "engines/cpu/kernel/forward_scores.h"
#include "engines/cpu/kernel/forward_softmax.h"
#include "engines/cpu/kernel/forward_task.h"
#include "engines/cpu/kernel/forward_values.h"
#include "engines/cpu/kernel/key_sums.h"
#include "engines/cpu/kernel/modifiers.h"
#include "engines/cpu/kernel/near_exp2.h"
#include "engines/cpu/kernel/strips.h"
#include "engines/cpu/kernel/tile.h"

namespace headway::cpu {
namespace {

constexpr int least_around = 32;  // the least head dim whose products hide exponentials

// The rows of NV vectors on the way through a piece of keys.
template <class S, int NV, class Exp>
struct Fusing {
  using Scalar = typename S::Scalar;
  using Vector = typename S::Vector;
  static constexpr int lanes = S::lanes;

  Vector negated[NV], to_log2;
  WeightSum<S> sum[NV];
  typename Exp::Witness witness = Exp::no_witness();  // of all vectors together

  Fusing(const Scalar* references, double units) : to_log2(S::set(static_cast<Scalar>(units))) {
    HEADWAY_UNROLL
    for (int n = 0; n < NV; ++n) {
      negated[n] = S::zero() - S::load(references + n * lanes);
    }
  }
  // 2^(score - reference) of vector n.
  HEADWAY_INLINE Vector weight(Vector score, int n) {
    const Vector result = Exp::of((score + negated[n]) * to_log2, witness);
    sum[n].add(result);
    return result;
  }
  // After so many keys.
  HEADWAY_INLINE void end_part(std::int64_t done) {
    if (done % summed_weights == 0) {
      end_parts<S>(sum);
    }
  }
  HEADWAY_INLINE bool out_of_reach() const {
    bool any = false;
    HEADWAY_UNROLL
    for (int n = 0; n < NV; ++n) {
      any |= S::any(Exp::out_of_reach(witness, sum[n].total()));
    }
    return any;
  }
};

template <class S>
class ForwardFused {
  using Scalar = typename S::Scalar;
  using Vector = typename S::Vector;
  using Operand = typename Operands<S>::Scalar;
  static constexpr int lanes = S::lanes, width = ForwardSizes<S>::width, fold = ForwardSizes<S>::fold;
  template <int NV>
  using NearRows = Fusing<S, NV, NearExp2<S>>;
  template <int NV>
  using SummedRows = Fusing<S, NV, SummedExp2<S>>;

 public:
  ForwardFused(const ForwardTask<S>& task, const ForwardBlock<S>& block, ForwardScores<S>& scores,
               ForwardValues<S>& values, ForwardSoftmax<S>& softmax)
      : task_(task), block_(block), args_(task.args), scores_(scores), values_(values), softmax_(softmax) {}

  // Whether the exponentials of modified scores hide between products too.
  bool fuses_modified() const { return fold == 1 && LooksUpPowers<S> && hides_exponentials() && !task_.rescales(); }

  // Keys inside every row's range, against references that exist: exponentials straight from the accumulators.
  template <int NV>
  HEADWAY_NOINLINE void fused(std::int64_t p, const Range& piece) {
    constexpr int NB = broadcasts<S, NV>();
    NearRows<NV> rows(task_.at.references + p * width, task_.to_log2);
    std::int64_t key = piece.begin;
    if constexpr (NV == S::panel_vectors && LooksUpPowers<S>) {
      if ((fold == 1 || !values_.keeps_scalars()) && hides_exponentials()) {
        key = all_overlapped<NV, NB>(p, piece, rows);
      }
    }
    for (; key + NB <= piece.end; key += NB) {
      fused_tile<NV, NB>(p, piece, key, rows);
      rows.end_part(key + NB - piece.begin);
    }
    for (; key < piece.end; key += fold) {
      fused_tile<NV, fold>(p, piece, key, rows);
      rows.end_part(key + fold - piece.begin);
    }
    finish_fused<NV>(p, piece, rows);
  }

  // fused() for modified scores: those of a chunk of keys are modified in the cache, and their exponentials run between
  // the products of the next chunk.
  template <int NV>
  HEADWAY_NOINLINE void fused_behind(std::int64_t p, const Range& piece) {
    constexpr int NB = broadcasts<S, NV>();
    SummedRows<NV> rows(task_.at.references + p * width, task_.to_log2);
    Range behind{piece.begin, piece.begin};  // modified, and not weighed yet
    for (std::int64_t key = piece.begin; key < piece.end; key += chunk_keys) {
      const Range chunk{key, smaller(key + chunk_keys, piece.end)};
      if (args_.head_dim >= 64) {
        key_scores_around<NV, NB, 64>(p, piece, chunk, behind, rows);
      } else {
        key_scores_around<NV, NB, least_around>(p, piece, chunk, behind, rows);
      }
      scores_.modify(p, 0, NV, chunk);
      behind = chunk;
    }
    weigh_keys<NV>(piece, behind, rows);
    finish_fused<NV>(p, piece, rows);
  }

 private:
  bool hides_exponentials() const {
    return args_.head_dim >= least_around && folded<S>(args_.head_dim) <= widest_in_chains<S>;
  }

  template <int NV, class Exp>
  HEADWAY_INLINE void finish_fused(std::int64_t p, const Range& piece, const Fusing<S, NV, Exp>& rows) {
    if (__builtin_expect(rows.out_of_reach(), 0)) {
      softmax_.template raise_references<NV, Exp>(p, 0, piece);
      return;
    }
    Vector kept[NV], totals[NV];
    HEADWAY_UNROLL
    for (int n = 0; n < NV; ++n) {
      kept[n] = S::set(1);
      totals[n] = rows.sum[n].total();
    }
    softmax_.template add_sums<NV>(p, 0, kept, totals);
    values_.template add<NV>(p, 0, piece, kept,
                             values_.keeps_scalars() ? values_.template weight_operands<NV>(p, 0, piece)
                                                     : values_.operands_at(piece.begin, 0));
  }

  template <int NV, int NB>
  HEADWAY_INLINE void fused_tile(std::int64_t p, const Range& piece, std::int64_t key, NearRows<NV>& rows) {
    Accumulators<S, NV, NB> acc;
    scores_.template multiply<NV, NB>(acc, task_.query_panel(p), block_.key_operands(key));
    Scalar* weights = block_.scores_at(piece.begin, 0) + (key - piece.begin) * width;
    HEADWAY_UNROLL
    for (int c = 0; c < NB; c += fold) {
      HEADWAY_UNROLL
      for (int n = 0; n < NV; ++n) {
        HEADWAY_UNROLL
        for (int k = c; k < c + fold; ++k) {
          acc[k][n] = rows.weight(acc[k][n], n);
          if (values_.keeps_scalars()) {
            S::store(weights + k * width + n * lanes, acc[k][n]);
          }
        }
        if constexpr (fold > 1) {
          if (!values_.keeps_scalars()) {
            Operands<S>::store(values_.operands_at(key + c, n), Operands<S>::pairs(acc[c][n], acc[c + 1][n]));
          }
        }
      }
    }
  }

  // The usual head dims have no more steps than are known: the end of a loop would show beside products of pairs, and
  // the sums of chains stay in registers.
  template <int NV, int NB>
  HEADWAY_INLINE std::int64_t all_overlapped(std::int64_t p, const Range& piece, NearRows<NV>& rows) {
    if (args_.head_dim == 64) {
      return overlapped<NV, NB, 64 / fold>(p, piece, rows, NoMore{});
    }
    if (args_.head_dim == 128) {
      return overlapped<NV, NB, 128 / fold>(p, piece, rows, NoMore{});
    }
    const std::int64_t all = folded<S>(args_.head_dim);
    return args_.head_dim >= 64 ? overlapped<NV, NB, 64 / fold>(p, piece, rows, all - 64 / fold)
                                : overlapped<NV, NB, least_around / fold>(p, piece, rows, all - least_around / fold);
  }

  // fused_tile for all whole tiles of a piece, with the exponentials of each tile between the products of the next:
  // they take few of the multipliers' cycles and wait a lot, so this hides most of them. Returns the first key that is
  // left.
  template <int NV, int NB, int steps, class More>
  HEADWAY_INLINE std::int64_t overlapped(std::int64_t p, const Range& piece, NearRows<NV>& rows, More more) {
    constexpr int jobs = NB / fold * NV;
    const Operand* queries = task_.query_panel(p);
    Operand* const operands = values_.operands_at(piece.begin, 0);
    alignas(64) Scalar raw[NB * NV * lanes];
    const auto weigh = [&](std::int64_t key, int job) HEADWAY_LAMBDA {
      const int n = job % NV;
      const int c = job / NV * fold;
      Vector weights[fold];
      HEADWAY_UNROLL
      for (int k = 0; k < fold; ++k) {
        const Vector score = S::load(raw + ((c + k) * NV + n) * lanes);
        weights[k] = rows.weight(score, n);
      }
      Operand* at = operands + (key + c - piece.begin) / fold * width + n * lanes;
      if constexpr (fold > 1) {
        Operands<S>::store(at, Operands<S>::pairs(weights[0], weights[1]));
      } else {
        S::store(at, weights[0]);
      }
    };
    std::int64_t key = piece.begin;
    if (key + NB <= piece.end) {
      multiply_in_chains_around<S, NV, NB, steps, 0>(raw, queries, width, block_.key_operands(key), block_.keys.ld,
                                                     more, [](int) {});
      for (key += NB; key + NB <= piece.end; key += NB) {
        multiply_in_chains_around<S, NV, NB, steps, jobs>(raw, queries, width, block_.key_operands(key), block_.keys.ld,
                                                          more, [&](int job) HEADWAY_LAMBDA { weigh(key - NB, job); });
        rows.end_part(key - piece.begin);
      }
      HEADWAY_UNROLL
      for (int job = 0; job < jobs; ++job) {
        weigh(key - NB, job);
      }
      rows.end_part(key - piece.begin);
    }
    return key;
  }

  // The scores of a chunk, and the weights of the keys behind it.
  template <int NV, int NB, int steps>
  HEADWAY_INLINE void key_scores_around(std::int64_t p, const Range& piece, const Range& chunk, Range behind,
                                        SummedRows<NV>& rows) {
    const Operand* queries = task_.query_panel(p);
    const std::int64_t more = args_.head_dim - steps;
    RowsToCome to_come(args_.modifiers, task_.panel_row(p), task_.panel_rows(p), chunk);
    std::int64_t key = chunk.begin;
    for (; key + NB <= chunk.end; key += NB) {
      to_come.fetch(width / chunk_keys * NB);
      Scalar* scores = block_.scores_at(piece.begin, 0) + (key - piece.begin) * width;
      if (behind.begin + NB <= behind.end) {
        Scalar* weights = block_.scores_at(piece.begin, 0) + (behind.begin - piece.begin) * width;
        multiply_in_chains_around<S, NV, NB, steps, NB * NV>(scores, queries, width, block_.key_operands(key),
                                                             block_.keys.ld, more, [&](int job) HEADWAY_LAMBDA {
                                                               Scalar* at = weights + job * lanes;
                                                               S::store(at, rows.weight(S::load(at), job % NV));
                                                             });
        behind.begin += NB;
      } else {
        multiply_in_chains_around<S, NV, NB, steps, 0>(scores, queries, width, block_.key_operands(key), block_.keys.ld,
                                                       more, [](int) {});
      }
    }
    for (; key < chunk.end; ++key) {
      scores_.template score_tile<NV, 1>(queries, block_.key_operands(key),
                                         block_.scores_at(piece.begin, 0) + (key - piece.begin) * width);
    }
    weigh_keys<NV>(piece, behind, rows);
  }

  template <int NV>
  HEADWAY_INLINE void weigh_keys(const Range& piece, const Range& keys, SummedRows<NV>& rows) {
    for (std::int64_t key = keys.begin; key < keys.end; ++key) {
      HEADWAY_UNROLL
      for (int n = 0; n < NV; ++n) {
        Scalar* at = block_.scores_at(piece.begin, n) + (key - piece.begin) * width;
        S::store(at, rows.weight(S::load(at), n));
      }
    }
    rows.end_part(keys.end - piece.begin);
  }

  const ForwardTask<S>& task_;
  const ForwardBlock<S>& block_;
  const ForwardArgs& args_;
  ForwardScores<S>& scores_;
  ForwardValues<S>& values_;
  ForwardSoftmax<S>& softmax_;
};

}  // namespace
}  // namespace headway::cpu
