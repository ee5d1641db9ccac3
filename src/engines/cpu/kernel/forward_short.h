// Attention forward for few keys: a row's scores are all there before its softmax, and its output leaves at once.
//
// A panel of queries gives S^T [keys][queries] = K Q^T as in forward.h; each row's maximum, exponentials and sum follow
// in the cache, and then
//   O [queries][Dv] = P V
// with rows of V as vectors and P as broadcasts: O is neither kept in scratch nor transposed nor visited twice. Q, K
// and V are read once a head and O is written once: 16 S D bytes for 4 S^2 D operations, so at S = 16 memory bounds it
// and at S = 128 the FMA units do. Cold misses are what small heads wait for, so the next head's rows are fetched
// on the way, a few at a time.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/ahead.h"
#include "engines/cpu/kernel/forward.h"
#include "engines/cpu/kernel/store_tile.h"

namespace headway::cpu {
namespace {

constexpr std::int64_t short_keys = 256;  // the most that a short sequence has

template <class S, class In>
class ShortForward : Forward<S, In> {
  using Base = Forward<S, In>;
  using Base::args_;
  using Base::at_;
  using Base::keys_;
  using Base::lanes;
  using Base::panel_row;
  using Base::panel_vectors;
  using Base::panels_;
  using Base::scores_at;
  using Base::values_;
  using Base::width;
  using typename Base::Scalar;
  using typename Base::Vector;

 public:
  using Base::Base;

  // A matter of the sequence's own length, so that no row's bits depend on what else is asked for.
  static bool suits(const ForwardArgs& args) { return Base::fold == 1 && args.ranges.keys <= short_keys; }

  HEADWAY_NOINLINE void run() {
    this->enter_block(0, args_.ranges.keys);
    this->load_block();
    if (args_.value_dim % lanes != 0) {
      this->copy_values();  // whose last vector may be read whole
    }
    key_ahead_ = ahead_of<In>(args_.next_key, args_.key, args_.ranges.keys, args_.head_dim);
    value_ahead_ = ahead_of<In>(args_.next_value, args_.value, args_.ranges.keys, args_.value_dim);
    query_ahead_ = ahead_of<In>(args_.next_query, args_.query, args_.row_end - args_.row_begin, args_.head_dim);
    In* out = static_cast<In*>(args_.out.data) + args_.row_begin * args_.out.row_stride;
    out_ahead_ = ahead_of<In>(args_.out.data == nullptr ? nullptr : out,
                              {nullptr, args_.out.row_stride, args_.out.column_stride}, args_.row_end - args_.row_begin,
                              args_.value_dim);
    for (std::int64_t p = 0; p < panels_; ++p) {
      this->start_panel(p);
      attend(p);
      key_ahead_ = {};
    }
  }

 private:
  // All vectors together where their rows share one range, else one by one.
  void attend(std::int64_t p) {
    alignas(64) Scalar factors[width];
    const Range hull = at_.panel_ranges[p].hull;
    const Range core = at_.panel_ranges[p].core;
    if (hull.begin == core.begin && hull.end == core.end) {
      switch (panel_vectors(p)) {
        case 1: attend_vectors<1>(p, 0, hull, false, factors); break;
        case 2: attend_vectors<2>(p, 0, hull, false, factors); break;
        case 3: attend_vectors<3>(p, 0, hull, false, factors); break;
        default: attend_vectors<S::panel_vectors>(p, 0, hull, false, factors); break;
      }
    } else {
      this->watch_values(hull);
      for (int v = 0; v < panel_vectors(p); ++v) {
        attend_vectors<1>(p, v, at_.panel_ranges[p].vector_hull[v], true, factors);
      }
    }
    if (args_.weights.data != nullptr) {
      this->store_weights(p, factors);
    }
  }

  template <int NV>
  HEADWAY_NOINLINE void attend_vectors(std::int64_t p, int v, const Range& piece, bool edge, Scalar* factors) {
    Vector highest[NV];
    scores<NV>(p, v, piece, highest);
    if (edge || this->modified_) {
      if (this->modified_) {
        this->modify(p, v, NV, piece);
      }
      if (edge) {
        this->forbid_outside(p, v, piece);
      }
      this->template load_references<NV>(p, v, highest);  // -inf
      this->template raise_to_scores<NV>(v, piece, highest);
    }
    weigh<NV>(p, v, piece, highest);
    const Scalar* weights = args_.dropout.active ? this->dropped(p, v, NV, piece) : scores_at(piece.begin, v);
    this->remember(p, v, NV, piece);
    for (int n = v; n < v + NV; ++n) {
      this->end_rows(p, n, at_most(larger(args_.row_end - panel_row(p) - n * lanes, 0), lanes), factors + n * lanes);
    }
    add_values(panel_row(p) + v * lanes, NV * lanes, piece, weights, factors + v * lanes);
    if (this->careful_) {
      add_hidden_values(p, v, NV, piece, weights, factors + v * lanes);
    }
  }

  // S^T, and the largest of each row's scores.
  template <int NV>
  HEADWAY_INLINE void scores(std::int64_t p, int v, const Range& piece, Vector (&highest)[NV]) {
    constexpr int NB = broadcasts<S, NV>();
    HEADWAY_UNROLL
    for (int n = 0; n < NV; ++n) {
      highest[n] = S::set(-Base::infinity);
    }
    const Scalar* queries = this->query_panel(p) + v * lanes;
    const Scalar* keys = this->key_operands(piece.begin);
    Scalar* target = scores_at(piece.begin, v);
    const std::int64_t first = panel_row(p) - args_.row_begin;
    const Vector unit = S::set(this->score_unit_.first), second = S::set(this->score_unit_.second);
    in_strips<NB>(piece.end - piece.begin, [&](auto strip, std::int64_t j) HEADWAY_LAMBDA {
      Accumulators<S, NV, strip.size> acc;
      const std::int64_t steps = args_.head_dim;
      add_in_parts<S, NV, strip.size>(
          acc, steps, short_product_chain, [&](std::int64_t begin, std::int64_t count) HEADWAY_LAMBDA {
            if (v + NV == panel_vectors(p)) {  // a part of the strip's rows with each part of the products
              const int from = static_cast<int>(strip.size * begin / steps);
              const int rows = static_cast<int>(strip.size * (begin + count) / steps) - from;
              query_ahead_.template fetch<fetched_locality<strip.size>()>(first + j + from, rows);
              out_ahead_.template fetch<fetched_locality<strip.size>()>(first + j + from, rows);
            }
            accumulate<S, NV, strip.size, Scalars::across>(acc, queries + begin * width, width,
                                                           keys + j * keys_.ld + begin, keys_.ld, count);
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
    const Vector to_log2 = S::set(static_cast<Scalar>(this->to_log2_));
    Vector subtract[NV];
    WeightSum<S> sum[NV];
    HEADWAY_UNROLL
    for (int n = 0; n < NV; ++n) {
      subtract[n] = Base::usable(reference[n]);
      S::store(at_.references + p * width + (v + n) * lanes, reference[n]);
    }
    Scalar* scores = scores_at(piece.begin, v);
    in_summed_parts(
        piece.end - piece.begin,
        [&](std::int64_t j) HEADWAY_LAMBDA {
          if (v + NV == panel_vectors(p)) {
            key_ahead_.template fetch<fetched_locality<broadcasts<S, NV>()>()>(j, 1);
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
      S::store(at_.sums + p * width + (v + n) * lanes, sum[n].total());
    }
  }

  // ---- Output ----

  // out(row + r) = factors[r] * sum over the piece's keys of weights[key][r] * V(key)
  void add_values(std::int64_t row, int rows, const Range& piece, const Scalar* weights, const Scalar* factors) {
    const int count = at_most(args_.row_end - row, rows);
    const std::int64_t vectors = (args_.value_dim + lanes - 1) / lanes;
    for (std::int64_t v = 0; v < vectors; v += S::panel_vectors) {
      switch (vectors - v) {
        case 1: store_columns<1>(row, count, piece, weights, factors, v * lanes); break;
        case 2: store_columns<2>(row, count, piece, weights, factors, v * lanes); break;
        case 3: store_columns<3>(row, count, piece, weights, factors, v * lanes); break;
        default: store_columns<S::panel_vectors>(row, count, piece, weights, factors, v * lanes); break;
      }
    }
  }

  template <int NV>
  HEADWAY_NOINLINE void store_columns(std::int64_t row, int rows, const Range& piece, const Scalar* weights,
                                      const Scalar* factors, std::int64_t d) {
    const Scalar* values = this->value_operands(piece.begin) + d;
    const auto kept_scale = static_cast<Scalar>(args_.dropout.kept_scale);
    in_strips<broadcasts<S, NV>()>(rows, [&](auto strip, std::int64_t r) HEADWAY_LAMBDA {
      constexpr int NB = strip.size;
      Accumulators<S, NV, NB> acc;
      add_in_parts<S, NV, NB>(
          acc, piece.end - piece.begin, summed_values<S>, [&](std::int64_t begin, std::int64_t keys) HEADWAY_LAMBDA {
            accumulate_fetching<S, NV, NB, Scalars::along>(
                acc, values + begin * values_.ld, values_.ld, weights + begin * width + r, width, keys,
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
    const std::int64_t row = panel_row(p) + v * lanes;
    this->for_hidden_values(p, v, vectors, piece, weights,
                            [&](int r, std::int64_t d, Scalar term) { add_to_output(row + r, d, term * factors[r]); });
  }

  void add_to_output(std::int64_t row, std::int64_t d, Scalar term) {
    In* at = static_cast<In*>(args_.out.data) + row * args_.out.row_stride;
    const std::int64_t stride = args_.out.column_stride;
    store_row<S>(at, stride, d, 1, load_row<S>(at, stride, d, 1) + S::set(term));
  }

  Ahead key_ahead_, value_ahead_, query_ahead_;
  Ahead out_ahead_;  // a store that misses holds up all that follow it
};

}  // namespace
}  // namespace headway::cpu
