// The scores of a forward task, and its softmax in two passes: scores first, then exponentials against references that
// no score passes.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/exp2.h"
#include "engines/cpu/kernel/forward_values.h"
#include "engines/cpu/kernel/key_sums.h"
#include "engines/cpu/kernel/modifiers.h"
#include "engines/cpu/kernel/near_exp2.h"
#include "engines/cpu/kernel/strips.h"
#include "engines/cpu/kernel/tile.h"

namespace headway::cpu {
namespace {

template <class S, class In>
class ForwardScores : public ForwardValues<S, In> {
 protected:
  using Base = ForwardValues<S, In>;
  using Base::args_;
  using Base::at_;
  using Base::fold;
  using Base::keys_;
  using Base::lanes;
  using Base::modified_;
  using Base::panel_row;
  using Base::score_unit_;
  using Base::scores_at;
  using Base::to_log2_;
  using Base::width;
  using typename Base::Mask;
  using typename Base::Operand;
  using typename Base::Scalar;
  using typename Base::Vector;

  ForwardScores(const ForwardArgs& args, void* scratch) : Base(args, scratch), modifier_(args.modifiers, args.ranges) {}

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
    if constexpr (HasTiles<S>) {
      to_come.fetch(NV * lanes);
      scores_by_tiles<S, NV>({keys, keys_.ld}, count, queries, width, folded<S>(args_.head_dim) / tile_pairs, scores);
      if (this->rescales()) {
        rescale<NV>(scores, count);
      }
      return;
    }
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

  // Products become scores.
  template <int NV>
  void rescale(Scalar* products, std::int64_t count) {
    const Vector unit = S::set(score_unit_.first), second = S::set(score_unit_.second);
    for (std::int64_t j = 0; j < count; ++j) {
      for (int n = 0; n < NV; ++n) {
        Scalar* at = products + j * width + n * lanes;
        S::store(at, S::load(at) * unit * second);
      }
    }
  }

  template <int NV, int NB>
  HEADWAY_INLINE void score_tile(const Operand* queries, const Operand* keys, Scalar* scores) {
    Accumulators<S, NV, NB> acc;
    multiply<NV, NB>(acc, queries, keys);
    const Vector unit = S::set(score_unit_.first), second = S::set(score_unit_.second);
    HEADWAY_UNROLL
    for (int c = 0; c < NB; ++c) {
      HEADWAY_UNROLL
      for (int n = 0; n < NV; ++n) {
        S::store(scores + c * width + n * lanes, acc[c][n] * unit * second);
      }
    }
  }

  // Products in registers.
  template <int NV, int NB>
  HEADWAY_INLINE void multiply(Accumulators<S, NV, NB>& acc, const Operand* queries, const Operand* keys) {
    add_in_parts<S, NV, NB>(acc, folded<S>(args_.head_dim), product_chain<S>(args_.head_dim),
                            [&](std::int64_t begin, std::int64_t count) HEADWAY_LAMBDA {
                              accumulate<S, NV, NB, Scalars::across>(acc, queries + begin * width, width, keys + begin,
                                                                     keys_.ld, count);
                            });
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

  // ---- Permission ----

  // What rows of a panel with holes see of one tile of keys.
  struct TileBits {
    std::int64_t panel = -1, key_begin = -1;
    std::uint64_t reach[S::panel_vectors];  // what some row of each vector sees, a bit a key
    std::uint64_t common;                   // what every row of the panel sees
    std::uint64_t rows[chunk_keys];         // of each key, a bit a row
  };

  const TileBits& tile_bits(std::int64_t p, std::int64_t key) {
    const std::int64_t begin = key / chunk_keys * chunk_keys;
    if (bits_.panel != p || bits_.key_begin != begin) {
      load_tile_bits(p, begin);
    }
    return bits_;
  }

  HEADWAY_NOINLINE void load_tile_bits(std::int64_t p, std::int64_t key) {
    bits_.panel = p;
    bits_.key_begin = key;
    const std::int64_t keys = smaller(args_.ranges.keys - key, chunk_keys);
    bits_.common = ~std::uint64_t{0};
    for (int v = 0; v < S::panel_vectors; ++v) {
      bits_.reach[v] = 0;
    }
    for (int r = 0; r < chunk_keys; ++r) {
      const bool exists = r < this->panel_rows(p);
      bits_.rows[r] =
          exists ? row_word(args_.ranges, at_.ranges[p * width + r], panel_row(p) + r, key, keys) : std::uint64_t{0};
      if (exists) {
        bits_.reach[r / lanes] |= bits_.rows[r];
        bits_.common &= bits_.rows[r];
      }
    }
    transpose_bits<S>(bits_.rows);
  }

  // Scores of a vector's rows outside their ranges and spans become -inf.
  HEADWAY_NOINLINE void forbid_outside(std::int64_t p, int v, const Range& piece) {
    if (!at_.panel_ranges[p].scattered) {
      forbid_outside_ranges<S>(scores_at(piece.begin, v), width, at_.ranges + p * width + v * lanes, piece.begin,
                               piece.end - piece.begin);
      return;
    }
    const Vector forbidden = S::set(-static_cast<Scalar>(__builtin_inff()));
    for (std::int64_t key = piece.begin; key < piece.end; ++key) {
      const TileBits& bits = tile_bits(p, key);
      const auto allowed = S::mask_from_bits(bits.rows[key - bits.key_begin] >> (v * lanes));
      Scalar* at = scores_at(piece.begin, v) + (key - piece.begin) * width;
      S::store(at, S::select(allowed, S::load(at), forbidden));
    }
  }

  // ---- Softmax ----

  // Scores, modifiers, a new reference where a row's maximum passes the old one by far, exponentials, output. Scores
  // are modified while they are in the first-level cache.
  template <int NV>
  HEADWAY_NOINLINE void two_pass(std::int64_t p, int v, const Range& piece, bool edge) {
    Vector highest[NV];
    load_references<NV>(p, v, highest);
    for (std::int64_t key = piece.begin; key < piece.end; key += chunk_keys) {
      const Range chunk{key, smaller(key + chunk_keys, piece.end)};
      raw_scores<NV>(p, v, chunk);
      if (modified_) {
        modify(p, v, NV, chunk);
      }
      if (edge) {
        forbid_outside(p, v, chunk);
      }
      raise_to_scores<NV>(v, chunk, highest);
    }
    HEADWAY_UNROLL
    for (int n = 0; n < NV; ++n) {
      highest[n] = raised_reference<S>(S::load(at_.references + p * width + (v + n) * lanes), highest[n],
                                       S::set(static_cast<Scalar>(to_log2_)));
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
  // `far`, by Exp.
  template <int NV, class Exp = SummedExp2<S>>
  HEADWAY_INLINE void exponentiate(std::int64_t p, int v, const Range& piece, const Vector (&reference)[NV],
                                   const Mask* far = nullptr) {
    Vector decay[NV], subtract[NV], totals[NV];
    WeightSum<S> sum[NV];
    const Vector to_log2 = S::set(static_cast<Scalar>(to_log2_));
    Scalar* references = at_.references + p * width + v * lanes;
    HEADWAY_UNROLL
    for (int n = 0; n < NV; ++n) {
      subtract[n] = Base::usable(reference[n]);
      decay[n] = this->Base::decay(S::load(references + n * lanes), reference[n]);
      S::store(references + n * lanes, reference[n]);
    }
    Scalar* scores = scores_at(piece.begin, v);
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
    add_sums<NV>(p, v, decay, totals);
    this->template add_values<NV>(p, v, piece, decay, this->template weight_operands<NV>(p, v, piece));
  }

  template <int NV>
  HEADWAY_INLINE void add_sums(std::int64_t p, int v, const Vector (&decay)[NV], const Vector (&sum)[NV]) {
    Scalar* sums = at_.sums + p * width + v * lanes;
    HEADWAY_UNROLL
    for (int n = 0; n < NV; ++n) {
      S::store(sums + n * lanes, S::fma(S::load(sums + n * lanes), decay[n], sum[n]));
    }
  }

  ScoreModifier<S> modifier_;
  TileBits bits_;
};

}  // namespace
}  // namespace headway::cpu
