// Attention forward, queries in lanes.
//
// A panel is a few vectors of queries (64 for float on AVX-512). Q is packed once per panel as Q^T [D][queries] with
// what it takes of the scale; K and V are read in place, one broadcast at a time:
//   S^T [keys][queries] = K Q^T      O^T [Dv][queries] += V^T P^T
// For a block of 256 keys the scores stay in the second-level cache; K and V come from memory once per task of several
// panels; Q and O are touched once. The FMA units bound it: 2 (D + Dv) operations a score against one exponential.
// With bf16 dot products Q and K are pairs along d, P and V pairs along keys, and half as many steps do the same.
//
// Softmax runs against a reference m per row. A row's first keys set it to their maximum; later full blocks keep it, so
// that the exponential follows the scores in registers ("fused"). Only when a row's block sum grows past a limit are
// its scores computed again and its reference raised. Each lane decides for itself, so a row's bits depend on no other
// row. Modified scores wait in the first-level cache: their exponentials run between the products of the next 64 keys,
// so a modifier costs its own bytes and arithmetic and one more pass over scores that are at hand.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "engines/cpu/kernel/forward_tiles.h"

namespace headway::cpu {
namespace {

constexpr std::int64_t first_keys = 64;     // of a row without a reference
constexpr std::int64_t foreseen_keys = 16;  // near a row's own position
constexpr int least_around = 32;            // the least head dim whose products hide exponentials

template <class S, class In>
class Forward : protected ForwardTiles<S, In> {
 protected:
  using Base = ForwardTiles<S, In>;
  using Base::args_;
  using Base::at_;
  using Base::block_begin_;
  using Base::block_end_;
  using Base::fold;
  using Base::infinity;
  using Base::keys_;
  using Base::lanes;
  using Base::modified_;
  using Base::modifier_;
  using Base::panel_row;
  using Base::panel_vectors;
  using Base::panels_;
  using Base::scores_at;
  using Base::to_log2_;
  using typename Base::Mask;
  using typename Base::Operand;
  using typename Base::PanelRanges;
  using typename Base::Scalar;
  using typename Base::Vector;

 public:
  using Base::key_block;
  using Base::most_panels;
  using Base::scratch_bytes;
  using Base::width;

  Forward(const ForwardArgs& args, void* scratch) : Base(args, scratch) {}

  HEADWAY_NOINLINE void run() {
    Range all{0, 0};
    if constexpr (HasTiles<S>) {
      this->look_ahead();
    }
    for (std::int64_t p = 0; p < panels_; ++p) {
      this->start_panel(p);
      this->clear_output(p);
      this->clear_totals(p);
      all = joined(all, at_.panel_ranges[p].hull);
    }
    const std::int64_t end = smaller((all.end + fold - 1) / fold * fold, args_.ranges.keys);
    if (args_.modifiers.has_alibi && fuses_modified()) {
      for (std::int64_t p = 0; p < panels_; ++p) {
        foresee_references(p, end);
      }
    }
    // A panel first visits the keys that only some of its rows may attend to, then those that all of them may.
    for (const bool edges : {true, false}) {
      for (std::int64_t key = all.begin / key_block * key_block; key < all.end; key += key_block) {
        this->enter_block(key, end);
        for (std::int64_t p = 0; p < panels_; ++p) {
          edges ? edge_block(p) : core_block(p);
        }
        this->add_to_totals(key / key_block);
      }
    }
    for (std::int64_t p = 0; p < panels_; ++p) {
      this->take_totals(p);
      this->finish_panel(p);
      this->restore_tiny_outputs(p);
    }
  }

 protected:
  // ---- Parts of a block ----

  Range inside_block(const Range& range) const {
    return {larger(range.begin, block_begin_), smaller(range.end, block_end_)};
  }

  void core_block(std::int64_t p) {
    if (at_.panel_ranges[p].scattered) {
      for_whole_pieces(at_.panel_spans[p], {block_begin_, block_end_},
                       [&](const Range& piece) HEADWAY_LAMBDA { core_piece(p, piece); });
    } else {
      core_piece(p, inside_block(at_.panel_ranges[p].core));
    }
  }

  void core_piece(std::int64_t p, const Range& core) {
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

  bool hides_exponentials() const {
    return args_.head_dim >= least_around && folded<S>(args_.head_dim) <= widest_in_chains<S>;
  }
  // Whether the exponentials of modified scores hide between products too.
  bool fuses_modified() const { return fold == 1 && LooksUpPowers<S> && hides_exponentials() && !this->rescales(); }

  template <int NV>
  void core_block_of(std::int64_t p, const Range& core) {
    constexpr bool full = NV == S::panel_vectors;
    if (!S::fused_softmax || (modified_ && !(full && fuses_modified()))) {
      this->template two_pass<NV>(p, 0, core, false);
      return;
    }
    std::int64_t begin = core.begin;
    // A row may still lack a reference, behind a mask or NaNs: what one row sees must not change how the others go on.
    if (HasTiles<S> && !at_.panel_ranges[p].has_references) {
      at_.panel_ranges[p].has_references = true;
      this->template first_references<NV>(p, {core.begin, core.begin + tile_steps});
    }
    if (!at_.panel_ranges[p].has_references) {
      at_.panel_ranges[p].has_references = true;
      begin = smaller(core.begin + first_keys, core.end);
      this->template two_pass<NV>(p, 0, {core.begin, begin}, false);
    }
    if (begin == core.end) {
      return;
    }
    if constexpr (HasTiles<S>) {
      fused_in_twos<NV>(p, {begin, core.end});
    } else if (!modified_) {
      fused<NV>(p, {begin, core.end});
    } else if constexpr (full && fold == 1 && LooksUpPowers<S>) {
      if (lacks_reference<NV>(p)) {
        raise_references<NV, SummedExp2<S>>(p, 0, {begin, core.end});
      } else {
        fused_behind<NV>(p, {begin, core.end});
      }
    }
  }

  // Whether a row of the panel has had no allowed key yet.
  template <int NV>
  bool lacks_reference(std::int64_t p) const {
    bool any = false;
    HEADWAY_UNROLL
    for (int n = 0; n < NV; ++n) {
      any |= S::any(S::equal(S::load(at_.references + p * width + n * lanes), S::set(-infinity)));
    }
    return any;
  }

  // ALiBi lets scores rise towards a row's own position: references taken far from there would be raised again and
  // again. A few keys near the panel's middle do.
  HEADWAY_NOINLINE void foresee_references(std::int64_t p, std::int64_t end) {
    PanelRanges& ranges = at_.panel_ranges[p];
    const Range& core = ranges.core;
    if (core.begin >= core.end || panel_vectors(p) != S::panel_vectors) {
      return;
    }
    const std::int64_t middle = panel_row(p) + width / 2 + args_.ranges.offset;
    const std::int64_t nearest = larger(core.begin, smaller(middle, core.end - 1));
    this->enter_block(nearest / key_block * key_block, end);
    this->load_block();
    const std::int64_t begin = nearest / foreseen_keys * foreseen_keys;
    const Range piece{larger(begin, core.begin), smaller(begin + foreseen_keys, core.end)};
    Vector reference[S::panel_vectors];
    this->template raw_scores<S::panel_vectors>(p, 0, piece);
    this->modify(p, 0, S::panel_vectors, piece);
    this->template load_references<S::panel_vectors>(p, 0, reference);
    this->template raise_to_scores<S::panel_vectors>(0, piece, reference);
    for (int n = 0; n < S::panel_vectors; ++n) {
      S::store(at_.references + p * width + n * lanes, reference[n]);
    }
    ranges.has_references = true;
  }

  // What lies in the panel's hull before and after its core.
  void edge_block(std::int64_t p) {
    if (at_.panel_ranges[p].scattered) {
      for_partial_pieces(at_.panel_spans[p], {block_begin_, block_end_},
                         [&](const Range& piece) HEADWAY_LAMBDA { scattered_piece(p, piece); });
      return;
    }
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
        this->template two_pass<1>(p, v, reached, true);
      }
    }
  }

  // Part of a tile: all vectors together where all rows see the same few keys, as the first ones of a sequence; else
  // vector by vector, each from the first to the last key that one of its rows sees.
  void scattered_piece(std::int64_t p, const Range& piece) {
    static_assert(span_tile == chunk_keys);
    const auto& bits = this->tile_bits(p, piece.begin);
    const std::uint64_t inside = range_word({piece.begin - bits.key_begin, piece.end - bits.key_begin});
    std::uint64_t reached = 0;
    for (int v = 0; v < panel_vectors(p); ++v) {
      reached |= bits.reach[v] & inside;
    }
    if (reached == 0) {
      return;
    }
    const auto keys_of = [&](std::uint64_t word) HEADWAY_LAMBDA {
      const Range hull = word_hull(word);
      return Range{bits.key_begin + hull.begin, bits.key_begin + hull.end};
    };
    this->load_block();
    this->watch_values(keys_of(reached));
    if (reached == (bits.common & inside) && range_word(word_hull(reached)) == reached) {
      with_vectors<S::panel_vectors>(panel_vectors(p), [&](auto strip) HEADWAY_LAMBDA {
        this->template two_pass<strip.size>(p, 0, keys_of(reached), false);
      });
      return;
    }
    for (int v = 0; v < panel_vectors(p); ++v) {
      if ((bits.reach[v] & inside) != 0) {
        this->template two_pass<1>(p, v, keys_of(bits.reach[v] & inside), true);
      }
    }
  }

  // ---- Fused softmax ----

  // By tiles, two vectors at a time.
  template <int NV>
  void fused_in_twos(std::int64_t p, const Range& piece) {
    for (std::int64_t key = piece.begin; key < piece.end; key += weighed_keys) {
      const Range part{key, smaller(key + weighed_keys, piece.end)};
      for (int v = 0; v + 2 <= NV; v += 2) {
        if (!this->template fused_by_tiles<2>(p, v, part)) {
          raise_references<2, TileExp2<S>>(p, v, part);
        }
      }
      if constexpr (NV % 2 == 1) {
        if (!this->template fused_by_tiles<1>(p, NV - 1, part)) {
          raise_references<1, TileExp2<S>>(p, NV - 1, part);
        }
      }
    }
  }

  template <int NV, class Exp>
  struct Fusing {
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

  // Keys inside every row's range, against references that exist: exponentials straight from the accumulators.
  template <int NV>
  HEADWAY_NOINLINE void fused(std::int64_t p, const Range& piece) {
    constexpr int NB = broadcasts<S, NV>();
    Fusing<NV, NearExp2<S>> rows(at_.references + p * width, to_log2_);
    std::int64_t key = piece.begin;
    if constexpr (NV == S::panel_vectors && LooksUpPowers<S>) {
      if ((fold == 1 || !this->keeps_scalars()) && hides_exponentials()) {
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

  template <int NV, class Exp>
  HEADWAY_INLINE void finish_fused(std::int64_t p, const Range& piece, const Fusing<NV, Exp>& rows) {
    if (__builtin_expect(rows.out_of_reach(), 0)) {
      raise_references<NV, Exp>(p, 0, piece);
      return;
    }
    Vector decay[NV], totals[NV];
    HEADWAY_UNROLL
    for (int n = 0; n < NV; ++n) {
      decay[n] = S::set(1);
      totals[n] = rows.sum[n].total();
    }
    this->template add_sums<NV>(p, 0, decay, totals);
    this->template add_values<NV>(
        p, 0, piece, decay,
        this->keeps_scalars() ? this->template weight_operands<NV>(p, 0, piece) : this->operands_at(piece.begin, 0));
  }

  template <int NV, int NB>
  HEADWAY_INLINE void fused_tile(std::int64_t p, const Range& piece, std::int64_t key, Fusing<NV, NearExp2<S>>& rows) {
    Accumulators<S, NV, NB> acc;
    this->template multiply<NV, NB>(acc, this->query_panel(p), this->key_operands(key));
    Scalar* weights = scores_at(piece.begin, 0) + (key - piece.begin) * width;
    HEADWAY_UNROLL
    for (int c = 0; c < NB; c += fold) {
      HEADWAY_UNROLL
      for (int n = 0; n < NV; ++n) {
        HEADWAY_UNROLL
        for (int k = c; k < c + fold; ++k) {
          acc[k][n] = rows.weight(acc[k][n], n);
          if (this->keeps_scalars()) {
            S::store(weights + k * width + n * lanes, acc[k][n]);
          }
        }
        if constexpr (fold > 1) {
          if (!this->keeps_scalars()) {
            Operands<S>::store(this->operands_at(key + c, n), Operands<S>::pairs(acc[c][n], acc[c + 1][n]));
          }
        }
      }
    }
  }

  // The usual head dims have no more steps than are known: the end of a loop would show beside products of pairs, and
  // the sums of chains stay in registers.
  template <int NV, int NB>
  HEADWAY_INLINE std::int64_t all_overlapped(std::int64_t p, const Range& piece, Fusing<NV, NearExp2<S>>& rows) {
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
  HEADWAY_INLINE std::int64_t overlapped(std::int64_t p, const Range& piece, Fusing<NV, NearExp2<S>>& rows, More more) {
    constexpr int jobs = NB / fold * NV;
    const Operand* queries = this->query_panel(p);
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
      if constexpr (fold > 1) {
        Operands<S>::store(this->operands_at(key + c, n), Operands<S>::pairs(weights[0], weights[1]));
      } else {
        S::store(scores_at(piece.begin, n) + (key + c - piece.begin) * width, weights[0]);
      }
    };
    std::int64_t key = piece.begin;
    if (key + NB <= piece.end) {
      multiply_in_chains_around<S, NV, NB, steps, 0>(raw, queries, width, this->key_operands(key), keys_.ld, more,
                                                     [](int) {});
      for (key += NB; key + NB <= piece.end; key += NB) {
        multiply_in_chains_around<S, NV, NB, steps, jobs>(raw, queries, width, this->key_operands(key), keys_.ld, more,
                                                          [&](int job) HEADWAY_LAMBDA { weigh(key - NB, job); });
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

  // fused() for modified scores: those of a chunk of keys are modified in the cache, and their exponentials run between
  // the products of the next chunk.
  template <int NV>
  HEADWAY_NOINLINE void fused_behind(std::int64_t p, const Range& piece) {
    constexpr int NB = broadcasts<S, NV>();
    Fusing<NV, SummedExp2<S>> rows(at_.references + p * width, to_log2_);
    Range behind{piece.begin, piece.begin};  // modified, and not weighed yet
    for (std::int64_t key = piece.begin; key < piece.end; key += chunk_keys) {
      const Range chunk{key, smaller(key + chunk_keys, piece.end)};
      if (args_.head_dim >= 64) {
        key_scores_around<NV, NB, 64>(p, piece, chunk, behind, rows);
      } else {
        key_scores_around<NV, NB, least_around>(p, piece, chunk, behind, rows);
      }
      this->modify(p, 0, NV, chunk);
      behind = chunk;
    }
    weigh_keys<NV>(piece, behind, rows);
    finish_fused<NV>(p, piece, rows);
  }

  // The scores of a chunk, and the weights of the keys behind it.
  template <int NV, int NB, int steps>
  HEADWAY_INLINE void key_scores_around(std::int64_t p, const Range& piece, const Range& chunk, Range behind,
                                        Fusing<NV, SummedExp2<S>>& rows) {
    const Operand* queries = this->query_panel(p);
    const std::int64_t more = args_.head_dim - steps;
    RowsToCome to_come(args_.modifiers, panel_row(p), this->panel_rows(p), chunk);
    std::int64_t key = chunk.begin;
    for (; key + NB <= chunk.end; key += NB) {
      to_come.fetch(width / chunk_keys * NB);
      Scalar* scores = scores_at(piece.begin, 0) + (key - piece.begin) * width;
      if (behind.begin + NB <= behind.end) {
        Scalar* weights = scores_at(piece.begin, 0) + (behind.begin - piece.begin) * width;
        multiply_in_chains_around<S, NV, NB, steps, NB * NV>(scores, queries, width, this->key_operands(key), keys_.ld,
                                                             more, [&](int job) HEADWAY_LAMBDA {
                                                               Scalar* at = weights + job * lanes;
                                                               S::store(at, rows.weight(S::load(at), job % NV));
                                                             });
        behind.begin += NB;
      } else {
        multiply_in_chains_around<S, NV, NB, steps, 0>(scores, queries, width, this->key_operands(key), keys_.ld, more,
                                                       [](int) {});
      }
    }
    for (; key < chunk.end; ++key) {
      this->template score_tile<NV, 1>(queries, this->key_operands(key),
                                       scores_at(piece.begin, 0) + (key - piece.begin) * width);
    }
    weigh_keys<NV>(piece, behind, rows);
  }

  template <int NV>
  HEADWAY_INLINE void weigh_keys(const Range& piece, const Range& keys, Fusing<NV, SummedExp2<S>>& rows) {
    for (std::int64_t key = keys.begin; key < keys.end; ++key) {
      HEADWAY_UNROLL
      for (int n = 0; n < NV; ++n) {
        Scalar* at = scores_at(piece.begin, n) + (key - piece.begin) * width;
        S::store(at, rows.weight(S::load(at), n));
      }
    }
    rows.end_part(keys.end - piece.begin);
  }

  // The piece again, with new references and the exponential of any number for the rows with scores out of reach; the
  // other rows repeat their bits.
  template <int NV, class Exp>
  HEADWAY_NOINLINE void raise_references(std::int64_t p, int v, const Range& piece) {
    this->template raw_scores<NV>(p, v, piece);
    if (modified_) {
      this->modify(p, v, NV, piece);
    }
    Vector reference[NV];
    Mask far[NV];
    this->template load_references<NV>(p, v, reference);
    this->template raise_to_scores<NV>(v, piece, reference);
    HEADWAY_UNROLL
    for (int n = 0; n < NV; ++n) {
      const Vector old = S::load(at_.references + p * width + (v + n) * lanes);
      far[n] = rows_out_of_reach<Exp>(piece, v + n, old);
      const Vector raised = raised_reference<S>(old, reference[n], S::set(static_cast<Scalar>(to_log2_)));
      reference[n] = S::select(far[n], raised, old);
    }
    this->template exponentiate<NV, Exp>(p, v, piece, reference, far);
  }

  template <class Exp>
  Mask rows_out_of_reach(const Range& piece, int n, Vector reference) const {
    WeightSum<S> sum;
    auto witness = Exp::no_witness();
    const Scalar* scores = scores_at(piece.begin, n);
    const Vector to_log2 = S::set(static_cast<Scalar>(to_log2_));
    in_summed_parts(
        piece.end - piece.begin,
        [&](std::int64_t j) HEADWAY_LAMBDA {
          sum.add(Exp::of(Exp::exponent(S::load(scores + j * width), reference, to_log2), witness));
        },
        [&]() HEADWAY_LAMBDA { sum.end_part(); });
    return Exp::out_of_reach(witness, sum.total());
  }
};

}  // namespace
}  // namespace headway::cpu
