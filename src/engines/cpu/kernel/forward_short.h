// Attention forward for few keys: all scores of a row are computed before its softmax, and its output is written once.
//
// A panel of queries gives S^T [keys][queries] = K Q^T as in forward.h; each row's maximum, exponentials and sum follow
// in the cache, and then
//   O [queries][Dv] = P V
// with rows of V as vectors and P as broadcasts: O is neither kept in scratch nor transposed nor visited twice. Q, K
// and V are read once a head and O is written once: 16 S D bytes for 4 S^2 D operations, so at S = 16 memory bounds it
// and at S = 128 the FMA units do. Small heads mostly wait for cold misses, so the next head's rows are prefetched
// meanwhile, a few at a time.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/ahead.h"
#include "engines/cpu/kernel/forward_block.h"
#include "engines/cpu/kernel/forward_finish.h"
#include "engines/cpu/kernel/forward_scores.h"
#include "engines/cpu/kernel/forward_softmax.h"
#include "engines/cpu/kernel/forward_task.h"
#include "engines/cpu/kernel/forward_values.h"
#include "engines/cpu/kernel/store_tile.h"
#include "engines/cpu/kernel/strips.h"

namespace headway::cpu {
namespace {

constexpr std::int64_t short_keys = 256;  // the most that a short sequence has

// The softmax of short rows: their weights, without the division by the sums.
template <class S>
class ShortSoftmax {
  using Scalar = typename S::Scalar;
  using Vector = typename S::Vector;
  static constexpr int lanes = S::lanes, width = ForwardSizes<S>::width;

 public:
  ShortSoftmax(const ForwardTask<S>& task, const ForwardBlock<S>& block, ForwardScores<S>& scores,
               const ForwardSoftmax<S>& softmax)
      : task_(task), block_(block), args_(task.args), scores_(scores), softmax_(softmax) {}

  Ahead key_ahead, query_ahead;  // the next head's rows, to be fetched
  Ahead out_ahead;               // a store that misses holds up all that follow it

  // P^T, the sums and the references of NV vectors from v on, with all keys that one of their rows sees. An `edge` has
  // keys that some rows do not see.
  template <int NV>
  HEADWAY_NOINLINE void run(std::int64_t p, int v, const Range& piece, bool edge) {
    Vector highest[NV];
    scores<NV>(p, v, piece, highest);
    if (edge || task_.modified) {
      if (task_.modified) {
        scores_.modify(p, v, NV, piece);
      }
      if (edge) {
        scores_.forbid_outside(p, v, piece);
      }
      softmax_.template load_references<NV>(p, v, highest);  // -inf
      softmax_.template raise_to_scores<NV>(v, piece, highest);
    }
    weigh<NV>(p, v, piece, highest);
  }

 private:
  // S^T, and the largest of each row's scores.
  template <int NV>
  HEADWAY_INLINE void scores(std::int64_t p, int v, const Range& piece, Vector (&highest)[NV]) {
    constexpr int NB = broadcasts<S, NV>();
    HEADWAY_UNROLL
    for (int n = 0; n < NV; ++n) {
      highest[n] = S::set(-infinity<S>);
    }
    const Scalar* queries = task_.query_panel(p) + v * lanes;
    const Scalar* keys = block_.key_operands(piece.begin);
    Scalar* target = block_.scores_at(piece.begin, v);
    const std::int64_t first = task_.panel_row(p) - args_.row_begin;
    const Vector unit = S::set(task_.score_unit.first), second = S::set(task_.score_unit.second);
    in_strips<NB>(piece.end - piece.begin, [&](auto strip, std::int64_t j) HEADWAY_LAMBDA {
      Accumulators<S, NV, strip.size> acc;
      const std::int64_t steps = args_.head_dim;
      add_in_parts<S, NV, strip.size>(
          acc, steps, short_product_chain, [&](std::int64_t begin, std::int64_t count) HEADWAY_LAMBDA {
            if (v + NV == task_.panel_vectors(p)) {  // a part of the strip's rows with each part of the products
              const int from = static_cast<int>(strip.size * begin / steps);
              const int rows = static_cast<int>(strip.size * (begin + count) / steps) - from;
              query_ahead.template fetch<fetched_locality<strip.size>()>(first + j + from, rows);
              out_ahead.template fetch<fetched_locality<strip.size>()>(first + j + from, rows);
            }
            accumulate<S, NV, strip.size, Scalars::across>(acc, queries + begin * width, width,
                                                           keys + j * block_.keys.ld + begin, block_.keys.ld, count);
          });
      HEADWAY_UNROLL
      for (int c = 0; c < strip.size; ++c) {
        HEADWAY_UNROLL
        for (int n = 0; n < NV; ++n) {
          highest[n] = S::max(acc[c][n], highest[n]);
          S::store(target + (j + c) * width + n * lanes, acc[c][n] * unit * second);
        }
      }
    });
  }

  // P^T = 2^(S^T - reference) in place, and the sums.
  template <int NV>
  HEADWAY_INLINE void weigh(std::int64_t p, int v, const Range& piece, const Vector (&reference)[NV]) {
    const Vector to_log2 = S::set(static_cast<Scalar>(task_.to_log2));
    Vector subtract[NV];
    WeightSum<S> sum[NV];
    HEADWAY_UNROLL
    for (int n = 0; n < NV; ++n) {
      subtract[n] = usable_reference<S>(reference[n]);
      S::store(task_.at.references + p * width + (v + n) * lanes, reference[n]);
    }
    Scalar* scores = block_.scores_at(piece.begin, v);
    in_summed_parts(
        piece.end - piece.begin,
        [&](std::int64_t j) HEADWAY_LAMBDA {
          if (v + NV == task_.panel_vectors(p)) {
            key_ahead.template fetch<fetched_locality<broadcasts<S, NV>()>()>(j, 1);
          }
          HEADWAY_UNROLL
          for (int n = 0; n < NV; ++n) {
            Scalar* at = scores + j * width + n * lanes;
            const Vector weight = exp2<S>((S::load(at) - subtract[n]) * to_log2);
            sum[n].add(weight);
            S::store(at, weight);
          }
        },
        [&]() HEADWAY_LAMBDA { end_parts<S>(sum); });
    HEADWAY_UNROLL
    for (int n = 0; n < NV; ++n) {
      S::store(task_.at.sums + p * width + (v + n) * lanes, sum[n].total());
    }
  }

  const ForwardTask<S>& task_;
  const ForwardBlock<S>& block_;
  const ForwardArgs& args_;
  ForwardScores<S>& scores_;
  const ForwardSoftmax<S>& softmax_;
};

template <class S, class In>
class ShortForward {
  using Scalar = typename S::Scalar;
  using Vector = typename S::Vector;
  static constexpr int lanes = S::lanes, width = ForwardSizes<S>::width;

 public:
  ShortForward(const ForwardArgs& args, void* scratch)
      : args_(args), task_(args, reads_keys_in_place<S, In>(args), scratch) {}

  // A matter of the sequence's own length, so that no row's bits depend on what else is asked for.
  static bool suits(const ForwardArgs& args) { return Operands<S>::fold == 1 && args.ranges.keys <= short_keys; }

  HEADWAY_NOINLINE void run() {
    block_.enter(0, args_.ranges.keys);
    block_.template load<In>();
    if (args_.value_dim % lanes != 0) {
      block_.copy_values();  // whose last vector may be read whole
    }
    short_.key_ahead = ahead_of<In>(args_.next_key, args_.key.rows, args_.ranges.keys, args_.head_dim);
    value_ahead_ = ahead_of<In>(args_.next_value, args_.value.rows, args_.ranges.keys, args_.value_dim);
    short_.query_ahead = ahead_of<In>(args_.next_query, args_.query, args_.row_end - args_.row_begin, args_.head_dim);
    In* out = static_cast<In*>(args_.out.data) + args_.row_begin * args_.out.row_stride;
    short_.out_ahead = ahead_of<In>(args_.out.data == nullptr ? nullptr : out,
                                    {nullptr, args_.out.row_stride, args_.out.column_stride},
                                    args_.row_end - args_.row_begin, args_.value_dim);
    for (std::int64_t p = 0; p < task_.panels; ++p) {
      task_.template start_panel<In>(p);
      attend(p);
      short_.key_ahead = {};
    }
  }

 private:
  // All vectors together where their rows share one range, else one by one.
  void attend(std::int64_t p) {
    alignas(64) Scalar factors[width];
    const Range hull = task_.at.panel_ranges[p].hull;
    const Range core = task_.at.panel_ranges[p].core;
    if (hull.begin == core.begin && hull.end == core.end) {
      with_vectors<S::panel_vectors>(task_.panel_vectors(p), [&](auto strip) HEADWAY_LAMBDA {
        attend_vectors<strip.size>(p, 0, hull, false, factors);
      });
    } else {
      block_.watch_values(hull);
      for (int v = 0; v < task_.panel_vectors(p); ++v) {
        attend_vectors<1>(p, v, task_.at.panel_ranges[p].vector_hull[v], true, factors);
      }
    }
    if (args_.weights.data != nullptr) {
      finish_.store_weights(p, factors);
    }
  }

  template <int NV>
  HEADWAY_NOINLINE void attend_vectors(std::int64_t p, int v, const Range& whole, bool edge, Scalar* factors) {
    const Range piece = scores_.template without_forbidden_end<NV>(p, v, whole);
    short_.template run<NV>(p, v, piece, edge);
    const Scalar* weights = args_.dropout.active ? values_.dropped(p, v, NV, piece) : block_.scores_at(piece.begin, v);
    task_.remember(p, v, NV, piece);
    for (int n = v; n < v + NV; ++n) {
      finish_.end_rows(p, n, at_most(larger(args_.row_end - task_.panel_row(p) - n * lanes, 0), lanes),
                       factors + n * lanes);
    }
    add_values(task_.panel_row(p) + v * lanes, NV * lanes, piece, weights, factors + v * lanes);
    if (block_.hides_values) {
      add_hidden_values(p, v, NV, piece, weights, factors + v * lanes);
    }
  }

  // ---- Output ----

  // out(row + r) = factors[r] * sum over the piece's keys of weights[key][r] * V(key)
  void add_values(std::int64_t row, int rows, const Range& piece, const Scalar* weights, const Scalar* factors) {
    const int count = at_most(args_.row_end - row, rows);
    in_panels<S>((args_.value_dim + lanes - 1) / lanes, [&](auto strip, std::int64_t v) HEADWAY_LAMBDA {
      store_columns<strip.size>(row, count, piece, weights, factors, v * lanes);
    });
  }

  template <int NV>
  HEADWAY_NOINLINE void store_columns(std::int64_t row, int rows, const Range& piece, const Scalar* weights,
                                      const Scalar* factors, std::int64_t d) {
    const Scalar* values = block_.value_operands(piece.begin) + d;
    const auto kept_scale = static_cast<Scalar>(args_.dropout.kept_scale);
    in_strips<broadcasts<S, NV>()>(rows, [&](auto strip, std::int64_t r) HEADWAY_LAMBDA {
      constexpr int NB = strip.size;
      Accumulators<S, NV, NB> acc;
      add_in_parts<S, NV, NB>(
          acc, piece.end - piece.begin, summed_values<S>, [&](std::int64_t begin, std::int64_t keys) HEADWAY_LAMBDA {
            accumulate_fetching<S, NV, NB, Scalars::along>(
                acc, values + begin * block_.values.ld, block_.values.ld, weights + begin * width + r, width, keys,
                [&](int c, int count) HEADWAY_LAMBDA {
                  if (begin == 0) {
                    value_ahead_.template fetch<fetched_locality<NB>()>(row - args_.row_begin + r + c, count);
                  }
                });
          });
      HEADWAY_UNROLL
      for (int c = 0; c < NB; ++c) {
        HEADWAY_UNROLL
        for (int n = 0; n < NV; ++n) {
          acc[c][n] = (S::zero() + acc[c][n]) * S::set(factors[r + c] * kept_scale);  // 0 has one sign
        }
      }
      store_tile<S, In, NV, NB>(acc, args_.out, row + r, d, args_.value_dim);
    });
  }
  // They are infinite or NaN, and so is what they are added to.
  HEADWAY_NOINLINE void add_hidden_values(std::int64_t p, int v, int vectors, const Range& piece, const Scalar* weights,
                                          const Scalar* factors) {
    const std::int64_t row = task_.panel_row(p) + v * lanes;
    values_.for_hidden_values(p, v, vectors, piece, weights, [&](int r, std::int64_t d, Scalar term) {
      add_to_output(row + r, d, term * factors[r]);
    });
  }

  void add_to_output(std::int64_t row, std::int64_t d, Scalar term) {
    In* at = static_cast<In*>(args_.out.data) + row * args_.out.row_stride;
    const std::int64_t stride = args_.out.column_stride;
    store_row<S>(at, stride, d, 1, load_row<S>(at, stride, d, 1) + S::set(term));
  }

  const ForwardArgs& args_;
  ForwardTask<S> task_;
  ForwardBlock<S> block_{task_};
  ForwardScores<S> scores_{task_, block_};
  ForwardValues<S> values_{task_, block_};
  ForwardSoftmax<S> softmax_{task_, block_, scores_, values_};
  ShortSoftmax<S> short_{task_, block_, scores_, softmax_};
  ForwardFinish<S, In> finish_{task_, block_};
  Ahead value_ahead_;
};

}  // namespace
}  // namespace headway::cpu
