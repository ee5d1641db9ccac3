// Attention forward, queries in lanes.
//
// A panel is a few vectors of queries (64 for float on AVX-512). Q is packed once per panel as Q^T [D][queries] with
// the scale folded in; K and V are read in place, one broadcast at a time:
//   S^T [keys][queries] = K Q^T      O^T [Dv][queries] += V^T P^T
// For a block of 256 keys the scores stay in the second-level cache; K and V come from memory once per task of several
// panels; Q and O are touched once. The FMA units bound it: 2 (D + Dv) operations a score against one exponential.
// With bf16 dot products Q and K are pairs along d, P and V pairs along keys, and half as many steps do the same.
//
// Softmax runs against a reference m per row. A row's first keys set it to their maximum; later full blocks keep it, so
// that the exponential follows the scores in registers ("fused"). Only when a row's block sum grows past a limit are
// its scores computed again and its reference raised. Each lane decides for itself, so a row's bits depend on no other
// row.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "engines/cpu/kernel/dropout.h"
#include "engines/cpu/kernel/exp2.h"
#include "engines/cpu/kernel/forward_finish.h"
#include "engines/cpu/kernel/modifiers.h"
#include "engines/cpu/kernel/near_exp2.h"
#include "engines/cpu/kernel/strips.h"
#include "engines/cpu/kernel/tile.h"

namespace headway::cpu {
namespace {

constexpr std::int64_t first_keys = 64;  // of a row without a reference

template <class S, class In>
class Forward : protected ForwardFinish<S, In> {
 protected:
  using Base = ForwardFinish<S, In>;
  using Base::args_;
  using Base::at_;
  using Base::block_begin_;
  using Base::block_end_;
  using Base::careful_;
  using Base::fold;
  using Base::infinity;
  using Base::keys_;
  using Base::lanes;
  using Base::panel_row;
  using Base::panel_vectors;
  using Base::panels_;
  using Base::score_factor_;
  using Base::scores_at;
  using Base::to_log2_;
  using Base::values_;
  using typename Base::Mask;
  using typename Base::Operand;
  using typename Base::Scalar;
  using typename Base::Vector;
  using Near = NearExp2<S>;

 public:
  using Base::key_block;
  using Base::most_panels;
  using Base::scratch_bytes;
  using Base::width;

  Forward(const ForwardArgs& args, void* scratch) : Base(args, scratch), modifier_(args.modifiers, args.ranges, 1) {}

  HEADWAY_NOINLINE void run() {
    Range all{0, 0};
    for (std::int64_t p = 0; p < panels_; ++p) {
      this->start_panel(p);
      this->clear_output(p);
      all = Base::joined(all, at_.panel_ranges[p].hull);
    }
    const std::int64_t end = smaller((all.end + fold - 1) / fold * fold, args_.ranges.keys);
    // A panel first visits the keys that only some of its rows may attend to, then those that all of them may.
    for (const bool edges : {true, false}) {
      for (std::int64_t key = all.begin / key_block * key_block; key < all.end; key += key_block) {
        this->enter_block(key, end);
        for (std::int64_t p = 0; p < panels_; ++p) {
          edges ? edge_block(p) : core_block(p);
        }
      }
    }
    for (std::int64_t p = 0; p < panels_; ++p) {
      this->finish_panel(p);
    }
  }

 protected:
  // ---- Parts of a block ----

  Range inside_block(const Range& range) const {
    return {larger(range.begin, block_begin_), smaller(range.end, block_end_)};
  }

  void core_block(std::int64_t p) {
    const Range core = inside_block(at_.panel_ranges[p].core);
    if (core.begin >= core.end) {
      return;
    }
    this->load_block();
    switch (panel_vectors(p)) {
      case 1: core_block_of<1>(p, core); break;
      case 2: core_block_of<2>(p, core); break;
      case 3: core_block_of<3>(p, core); break;
      default: core_block_of<S::panel_vectors>(p, core); break;
    }
  }

  template <int NV>
  void core_block_of(std::int64_t p, const Range& core) {
    if (!S::fused_softmax || args_.modifiers.any) {
      two_pass<NV>(p, 0, core, false);
      return;
    }
    std::int64_t fused_begin = core.begin;
    if (at_.references[p * width] == -infinity) {
      fused_begin = smaller(core.begin + first_keys, core.end);
      two_pass<NV>(p, 0, {core.begin, fused_begin}, false);
    }
    if (fused_begin < core.end) {
      fused<NV>(p, {fused_begin, core.end});
    }
  }

  // What lies in the panel's hull before and after its core.
  void edge_block(std::int64_t p) {
    const Range& core = at_.panel_ranges[p].core;
    const Range hull = inside_block(at_.panel_ranges[p].hull);
    edge_piece(p, {hull.begin, smaller(hull.end, core.begin)});
    edge_piece(p, {larger(hull.begin, core.end), hull.end});
  }

  // Vector by vector, each with the keys that its own rows reach.
  void edge_piece(std::int64_t p, const Range& piece) {
    if (piece.begin >= piece.end) {
      return;
    }
    this->load_block();
    this->watch_values(piece);
    for (int v = 0; v < panel_vectors(p); ++v) {
      const Range& hull = at_.panel_ranges[p].vector_hull[v];
      const Range reached{larger(hull.begin, piece.begin), smaller(hull.end, piece.end)};
      if (reached.begin < reached.end) {
        two_pass<1>(p, v, reached, true);
      }
    }
  }

  // ---- Scores ----

  // S^T = K Q^T for NV vectors from vector v on.
  template <int NV>
  HEADWAY_NOINLINE void raw_scores(std::int64_t p, int v, const Range& piece) {
    constexpr int NB = broadcasts<S, NV>();
    const Operand* queries = this->query_panel(p) + v * lanes;
    const Operand* keys = this->key_operands(piece.begin);
    Scalar* scores = scores_at(piece.begin, v);
    const std::int64_t count = piece.end - piece.begin;
    const std::int64_t row = panel_row(p) + v * lanes;
    RowsToCome to_come(args_.modifiers, row, at_most(args_.row_end - row, NV * lanes), piece);
    const int rows_a_tile = static_cast<int>(NV * lanes * NB / (count + 1)) + 1;
    std::int64_t j = 0;
    for (; j + NB <= count; j += NB) {
      to_come.fetch(rows_a_tile);
      score_tile<NV, NB>(queries, keys + j * keys_.ld, scores + j * width);
    }
    for (; j < count; ++j) {
      score_tile<NV, 1>(queries, keys + j * keys_.ld, scores + j * width);
    }
  }

  template <int NV, int NB>
  HEADWAY_INLINE void score_tile(const Operand* queries, const Operand* keys, Scalar* scores) {
    Accumulators<S, NV, NB> acc;
    multiply<NV, NB>(acc, queries, keys);
    HEADWAY_UNROLL
    for (int c = 0; c < NB; ++c) {
      HEADWAY_UNROLL
      for (int n = 0; n < NV; ++n) {
        S::store(scores + c * width + n * lanes, acc[c][n]);
      }
    }
  }

  // Scores in registers, scaled: pairs of bf16 cannot take the scale in without losing bits, so it comes after.
  template <int NV, int NB>
  HEADWAY_INLINE void multiply(Accumulators<S, NV, NB>& acc, const Operand* queries, const Operand* keys) {
    clear<S, NV, NB>(acc);
    accumulate<S, NV, NB, Scalars::across>(acc, queries, width, keys, keys_.ld, folded<S>(args_.head_dim));
    if constexpr (fold > 1) {
      const Vector factor = S::set(static_cast<Scalar>(score_factor_));
      HEADWAY_UNROLL
      for (int c = 0; c < NB; ++c) {
        HEADWAY_UNROLL
        for (int n = 0; n < NV; ++n) {
          acc[c][n] = acc[c][n] * factor;
        }
      }
    }
  }

  HEADWAY_NOINLINE void modify(std::int64_t p, int v, int vectors, const Range& piece) {
    std::uint64_t bits[chunk_keys];
    const std::int64_t row = panel_row(p) + v * lanes;
    const int rows = at_most(args_.row_end - row, vectors * lanes);
    for (std::int64_t key = piece.begin; key < piece.end; key += chunk_keys) {
      const int keys = at_most(piece.end - key, chunk_keys);
      if (args_.modifiers.mask.data != nullptr) {
        load_mask_bits<S>(args_.modifiers.mask, {row, rows, key, keys}, bits);
      }
      for (int n = 0; n < vectors; ++n) {
        const ChunkPlace place{row + n * lanes, at_most(larger(rows - n * lanes, 0), lanes), key, keys};
        modifier_.apply(scores_at(piece.begin, v + n) + (key - piece.begin) * width, width, place, bits, n * lanes);
      }
    }
  }

  // ---- Softmax ----

  // Scores, modifiers, a new reference where a row's maximum passes the old one, exponentials, output. Scores are
  // modified while they are in the first-level cache.
  template <int NV>
  HEADWAY_NOINLINE void two_pass(std::int64_t p, int v, const Range& piece, bool edge) {
    Vector highest[NV];
    load_references<NV>(p, v, highest);
    for (std::int64_t key = piece.begin; key < piece.end; key += chunk_keys) {
      const Range chunk{key, smaller(key + chunk_keys, piece.end)};
      raw_scores<NV>(p, v, chunk);
      if (args_.modifiers.any) {
        modify(p, v, NV, chunk);
      }
      if (edge) {
        forbid_outside_ranges<S>(scores_at(key, v), width, at_.ranges + p * width + v * lanes, key, chunk.end - key);
      }
      raise_to_scores<NV>(v, chunk, highest);
    }
    exponentiate<NV>(p, v, piece, highest);
  }

  template <int NV>
  HEADWAY_INLINE void load_references(std::int64_t p, int v, Vector (&references)[NV]) {
    HEADWAY_UNROLL
    for (int n = 0; n < NV; ++n) {
      references[n] = S::load(at_.references + p * width + (v + n) * lanes);
    }
  }

  // The larger of `highest` and each row's scores in the piece.
  template <int NV>
  HEADWAY_INLINE void raise_to_scores(int v, const Range& piece, Vector (&highest)[NV]) {
    const Scalar* scores = scores_at(piece.begin, v);
    for (std::int64_t j = 0; j < piece.end - piece.begin; ++j) {
      HEADWAY_UNROLL
      for (int n = 0; n < NV; ++n) {
        highest[n] = S::max(S::load(scores + j * width + n * lanes), highest[n]);
      }
    }
  }

  // P^T = 2^(S^T - reference) in place, the sums, and the output, for new references that are given. Where rows are not
  // `far`, in the bits of fused().
  template <int NV>
  HEADWAY_INLINE void exponentiate(std::int64_t p, int v, const Range& piece, const Vector (&reference)[NV],
                                   const Mask* far = nullptr) {
    Vector decay[NV], subtract[NV], sum[NV];
    const Vector to_log2 = S::set(static_cast<Scalar>(to_log2_));
    Scalar* references = at_.references + p * width + v * lanes;
    HEADWAY_UNROLL
    for (int n = 0; n < NV; ++n) {
      subtract[n] = Base::usable(reference[n]);
      const Vector old = S::load(references + n * lanes);
      decay[n] = S::select(S::equal(old, reference[n]), S::set(1), exp2<S>((old - subtract[n]) * to_log2));
      S::store(references + n * lanes, reference[n]);
      sum[n] = S::zero();
    }
    Scalar* scores = scores_at(piece.begin, v);
    for (std::int64_t j = 0; j < piece.end - piece.begin; ++j) {
      HEADWAY_UNROLL
      for (int n = 0; n < NV; ++n) {
        Scalar* at = scores + j * width + n * lanes;
        const Vector x = (S::load(at) - subtract[n]) * to_log2;
        Vector weight = exp2<S>(x);
        if (LooksUpPowers<S> && far != nullptr) {
          auto witness = Near::no_witness();
          weight = S::select(far[n], weight, Near::of(x, witness));
        }
        sum[n] = sum[n] + weight;
        S::store(at, weight);
      }
    }
    add_sums<NV>(p, v, decay, sum);
    add_values<NV>(p, v, piece, decay, weight_operands<NV>(p, v, piece));
  }

  template <int NV>
  HEADWAY_INLINE void add_sums(std::int64_t p, int v, const Vector (&decay)[NV], const Vector (&sum)[NV]) {
    Scalar* sums = at_.sums + p * width + v * lanes;
    HEADWAY_UNROLL
    for (int n = 0; n < NV; ++n) {
      S::store(sums + n * lanes, S::fma(S::load(sums + n * lanes), decay[n], sum[n]));
    }
  }

  // Keys inside every row's range, against references that exist: exponentials straight from the accumulators.
  template <int NV>
  struct Fusing {
    Vector negated[NV], sum[NV];
    typename Near::Witness witness;  // of all vectors together
  };

  template <int NV>
  HEADWAY_NOINLINE void fused(std::int64_t p, const Range& piece) {
    constexpr int NB = broadcasts<S, NV>();
    Fusing<NV> rows;
    rows.witness = Near::no_witness();
    HEADWAY_UNROLL
    for (int n = 0; n < NV; ++n) {
      rows.negated[n] = S::zero() - S::load(at_.references + p * width + n * lanes);
      rows.sum[n] = S::zero();
    }
    std::int64_t key = piece.begin;
    if constexpr (NV == S::panel_vectors && LooksUpPowers<S>) {
      if ((fold == 1 || !keeps_scalars()) && args_.head_dim == 64) {
        key = overlapped<NV, NB, 64 / fold>(p, piece, rows);
      } else if ((fold == 1 || !keeps_scalars()) && args_.head_dim == 128) {
        key = overlapped<NV, NB, 128 / fold>(p, piece, rows);
      }
    }
    for (; key + NB <= piece.end; key += NB) {
      fused_tile<NV, NB>(p, piece, key, rows);
    }
    for (; key < piece.end; key += fold) {
      fused_tile<NV, fold>(p, piece, key, rows);
    }
    if (__builtin_expect(any_out_of_reach<NV>(rows), 0)) {
      raise_references<NV>(p, piece);
      return;
    }
    Vector decay[NV];
    HEADWAY_UNROLL
    for (int n = 0; n < NV; ++n) {
      decay[n] = S::set(1);
    }
    add_sums<NV>(p, 0, decay, rows.sum);
    add_values<NV>(p, 0, piece, decay,
                   keeps_scalars() ? weight_operands<NV>(p, 0, piece) : operands_at(piece.begin, 0));
  }

  template <int NV>
  HEADWAY_INLINE static bool any_out_of_reach(const Fusing<NV>& rows) {
    bool any = false;
    HEADWAY_UNROLL
    for (int n = 0; n < NV; ++n) {
      any |= S::any(Near::out_of_reach(rows.witness, rows.sum[n]));
    }
    return any;
  }

  template <int NV, int NB>
  HEADWAY_INLINE void fused_tile(std::int64_t p, const Range& piece, std::int64_t key, Fusing<NV>& rows) {
    Accumulators<S, NV, NB> acc;
    multiply<NV, NB>(acc, this->query_panel(p), this->key_operands(key));
    Scalar* weights = scores_at(piece.begin, 0) + (key - piece.begin) * width;
    HEADWAY_UNROLL
    for (int c = 0; c < NB; c += fold) {
      HEADWAY_UNROLL
      for (int n = 0; n < NV; ++n) {
        HEADWAY_UNROLL
        for (int k = c; k < c + fold; ++k) {
          acc[k][n] = Near::of(acc[k][n] + rows.negated[n], rows.witness);
          rows.sum[n] = rows.sum[n] + acc[k][n];
          if (keeps_scalars()) {
            S::store(weights + k * width + n * lanes, acc[k][n]);
          }
        }
        if constexpr (fold > 1) {
          if (!keeps_scalars()) {
            Operands<S>::store(operands_at(key + c, n), Operands<S>::pairs(acc[c][n], acc[c + 1][n]));
          }
        }
      }
    }
  }

  // fused_tile for all whole tiles of a piece, with the exponentials of each tile between the products of the next:
  // they take few of the multipliers' cycles and wait a lot, so this hides most of them. The compiler must know how
  // many steps there are. Returns the first key that is left.
  template <int NV, int NB, int steps>
  HEADWAY_INLINE std::int64_t overlapped(std::int64_t p, const Range& piece, Fusing<NV>& rows) {
    constexpr int jobs = NB / fold * NV;
    const Operand* queries = this->query_panel(p);
    const Vector factor = S::set(static_cast<Scalar>(score_factor_));
    alignas(64) Scalar raw[NB * NV * lanes];
    const auto weigh = [&](std::int64_t key, int job) HEADWAY_LAMBDA {
      const int n = job % NV;
      const int c = job / NV * fold;
      Vector weights[fold];
      HEADWAY_UNROLL
      for (int k = 0; k < fold; ++k) {
        Vector score = S::load(raw + ((c + k) * NV + n) * lanes);
        score = fold > 1 ? score * factor : score;
        weights[k] = Near::of(score + rows.negated[n], rows.witness);
        rows.sum[n] = rows.sum[n] + weights[k];
      }
      if constexpr (fold > 1) {
        Operands<S>::store(operands_at(key + c, n), Operands<S>::pairs(weights[0], weights[1]));
      } else {
        S::store(scores_at(piece.begin, n) + (key + c - piece.begin) * width, weights[0]);
      }
    };
    std::int64_t key = piece.begin;
    if (key + NB <= piece.end) {
      multiply_around<S, NV, NB, steps, 1>(raw, queries, width, this->key_operands(key), keys_.ld, [](int) {});
      for (key += NB; key + NB <= piece.end; key += NB) {
        multiply_around<S, NV, NB, steps, jobs>(raw, queries, width, this->key_operands(key), keys_.ld,
                                                [&](int job) HEADWAY_LAMBDA { weigh(key - NB, job); });
      }
      HEADWAY_UNROLL
      for (int job = 0; job < jobs; ++job) {
        weigh(key - NB, job);
      }
    }
    return key;
  }

  // The piece again, with new references and the exponential of any number for the rows with scores out of reach; the
  // other rows repeat their bits.
  template <int NV>
  HEADWAY_NOINLINE void raise_references(std::int64_t p, const Range& piece) {
    raw_scores<NV>(p, 0, piece);
    Vector reference[NV];
    Mask far[NV];
    load_references<NV>(p, 0, reference);
    raise_to_scores<NV>(0, piece, reference);
    HEADWAY_UNROLL
    for (int n = 0; n < NV; ++n) {
      const Vector old = S::load(at_.references + p * width + n * lanes);
      far[n] = rows_out_of_reach(piece, n, old);
      reference[n] = S::select(far[n], reference[n], old);
    }
    exponentiate<NV>(p, 0, piece, reference, far);
  }

  Mask rows_out_of_reach(const Range& piece, int n, Vector reference) const {
    Vector sum = S::zero();
    auto witness = Near::no_witness();
    const Scalar* scores = scores_at(piece.begin, n);
    for (std::int64_t j = 0; j < piece.end - piece.begin; ++j) {
      sum = sum + Near::of(S::load(scores + j * width) - reference, witness);
    }
    return Near::out_of_reach(witness, sum);
  }

  // ---- Output ----

  // Whether weights are needed as scalars also where they could go straight into pairs.
  bool keeps_scalars() const { return fold == 1 || args_.weights.data != nullptr || args_.dropout.active || careful_; }

  // Where the multiplicands of the keys from `key` on lie: the scores themselves, or pairs beside them.
  Operand* operands_at(std::int64_t key, int v) const {
    if constexpr (fold == 1) {
      return scores_at(key, v);
    } else {
      return at_.pairs + (key - block_begin_) / fold * width + v * lanes;
    }
  }

  // The weights as add_values multiplies them: after dropout, in pairs where the vocabulary wants pairs.
  template <int NV>
  HEADWAY_INLINE const Operand* weight_operands(std::int64_t p, int v, const Range& piece) {
    const Scalar* weights = args_.dropout.active ? dropped(p, v, NV, piece) : scores_at(piece.begin, v);
    if constexpr (fold == 1) {
      return weights;
    } else {
      for (std::int64_t key = piece.begin / fold * fold; key < piece.end; key += fold) {
        const Scalar* at = weights + (key - piece.begin) * width;
        HEADWAY_UNROLL
        for (int n = 0; n < NV; ++n) {
          const Vector first = key >= piece.begin ? S::load(at + n * lanes) : S::zero();
          const Vector second = key + 1 < piece.end ? S::load(at + width + n * lanes) : S::zero();
          Operands<S>::store(operands_at(key, v + n), Operands<S>::pairs(first, second));
        }
      }
      return operands_at(piece.begin, v);
    }
  }

  const Scalar* dropped(std::int64_t p, int v, int vectors, const Range& piece) {
    Scalar* target = args_.weights.data != nullptr ? at_.dropped + v * lanes : scores_at(piece.begin, v);
    for (int n = 0; n < vectors; ++n) {
      drop<S>(args_.dropout, panel_row(p) + (v + n) * lanes, piece.begin, piece.end - piece.begin,
              scores_at(piece.begin, v + n), target + n * lanes, width);
    }
    return target;
  }

  // O^T = O^T * decay + V^T P^T, a piece's sum first, so that long rows keep their accuracy.
  template <int NV>
  HEADWAY_NOINLINE void add_values(std::int64_t p, int v, const Range& piece, const Vector (&decay)[NV],
                                   const Operand* weights) {
    constexpr int NB = broadcasts<S, NV>();
    this->remember(p, v, NV, piece);
    const Operand* values = this->value_operands(piece.begin);
    const std::int64_t steps = (piece.end + fold - 1) / fold - piece.begin / fold;
    Scalar* output = this->output_panel(p) + v * lanes;
    std::int64_t d = 0;
    for (; d + NB <= args_.value_dim; d += NB) {
      value_tile<NV, NB>(weights, values + d, steps, output + d * width, decay);
    }
    for (; d < args_.value_dim; ++d) {
      value_tile<NV, 1>(weights, values + d, steps, output + d * width, decay);
    }
    if (careful_) {
      add_hidden_values(p, v, NV, piece);
    }
  }

  template <int NV, int NB>
  HEADWAY_INLINE void value_tile(const Operand* weights, const Operand* values, std::int64_t steps, Scalar* output,
                                 const Vector (&decay)[NV]) {
    Accumulators<S, NV, NB> acc;
    clear<S, NV, NB>(acc);
    accumulate<S, NV, NB, Scalars::along>(acc, weights, width, values, values_.ld, steps);
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
    const Scalar* weights = apart ? at_.dropped + v * lanes : scores_at(piece.begin, v);
    const std::int64_t row = panel_row(p) + v * lanes;
    const int rows = at_most(args_.row_end - row, vectors * lanes);
    for (std::int64_t key = piece.begin; key < piece.end; ++key) {
      for (std::int64_t d = 0; d < args_.value_dim; ++d) {
        const Scalar value = this->value_at(key, d);
        if (!Base::is_hidden(value)) {
          continue;
        }
        for (int r = 0; r < rows; ++r) {
          if (is_allowed(args_.modifiers, at_.ranges[p * width + v * lanes + r], row + r, key)) {
            this->output_panel(p)[d * width + v * lanes + r] += weights[(key - piece.begin) * width + r] * value;
          }
        }
      }
    }
  }

  ScoreModifier<S> modifier_;
};

}  // namespace
}  // namespace headway::cpu
