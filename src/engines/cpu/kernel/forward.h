// Attention forward, queries in lanes.
//
// A panel is a few vectors of queries (64 for float on AVX-512). Q is packed once per panel as Q^T [D][queries] with the
// scale folded in; K and V are read in place, one broadcast at a time:
//   S^T [keys][queries] = K Q^T      O^T [Dv][queries] += V^T P^T
// For a block of 256 keys the scores stay in the second-level cache; K and V come from memory once per task of several
// panels; Q and O are touched once. The FMA units bound it: 2 (D + Dv) operations a score against one exponential.
//
// Softmax runs against a reference m per row. A row's first keys set it to their maximum; later full blocks keep it, so
// that the exponential follows the scores in registers ("fused"). Only when a row's block sum grows past a limit are its
// scores computed again and its reference raised. Each lane decides for itself, so a row's bits depend on no other row.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "engines/cpu/kernel/args.h"
#include "engines/cpu/kernel/dropout.h"
#include "engines/cpu/kernel/exp2.h"
#include "engines/cpu/kernel/modifiers.h"
#include "engines/cpu/kernel/pack.h"
#include "engines/cpu/kernel/ranges.h"
#include "engines/cpu/kernel/tile.h"

namespace headway::cpu {
namespace {

constexpr std::int64_t key_block = 256;
constexpr std::int64_t first_keys = 64;  // of a row without a reference

template <class S, class In>
class Forward {
 public:
  using Scalar = typename S::Scalar;
  using Vector = typename S::Vector;
  using Mask = typename S::Mask;
  static constexpr int lanes = S::lanes;
  static constexpr int width = S::lanes * S::panel_vectors;

  // Scratch, in Scalars, of a task of `panels` panels. Weights keep a whole panel's scores, so they take one panel a task.
  static std::int64_t scratch_size(const ForwardArgs& args, std::int64_t panels) {
    Layout layout(args, panels, nullptr);
    return layout.used;
  }

  Forward(const ForwardArgs& args, Scalar* scratch)
      : args_(args),
        modifier_(args.modifiers, args.ranges, 1),
        to_log2_(args.modifiers.any ? log2e : 1),
        panels_((args.row_end - args.row_begin + width - 1) / width),
        at_(args, panels_, scratch) {}

  HEADWAY_NOINLINE void run() {
    for (std::int64_t p = 0; p < panels_; ++p) {
      start(p);
    }
    const Range all = hull_of_rows(0, panels_ * width);
    for (Part part : {Part::edges, Part::core}) {
      for (std::int64_t k = all.begin / key_block * key_block; k < all.end; k += key_block) {
        block_begin_ = k;
        block_end_ = smaller(k + key_block, args_.ranges.keys);
        block_loaded_ = false;
        for (std::int64_t p = 0; p < panels_; ++p) {
          part == Part::edges ? edge_block(p) : core_block(p);
        }
      }
    }
    for (std::int64_t p = 0; p < panels_; ++p) {
      finish(p);
    }
  }

 protected:
  // A panel first visits the keys that only some of its rows may attend to, then those that all of them may.
  enum class Part { edges, core };

  // Keys of one panel that were computed together, remembered for the weights.
  struct Piece {
    std::int64_t key_begin, keys;
    int vector, vectors;
  };

  // Where things lie in the scratch.
  struct Layout {
    std::int64_t used = 0;
    Scalar* base;
    Scalar *queries, *outputs, *references, *sums, *scores, *dropped, *key_copy, *value_copy, *piece_references;
    Range* ranges;
    Piece* pieces;

    Layout(const ForwardArgs& args, std::int64_t panels, Scalar* scratch) : base(scratch) {
      const bool weights = args.weights.data != nullptr;
      const std::int64_t blocks = args.ranges.keys / key_block + 2;
      const std::int64_t most_pieces = weights ? blocks * (2 * S::panel_vectors + 2) : 0;
      queries = take<Scalar>(panels * args.head_dim * width);
      outputs = take<Scalar>(panels * args.value_dim * width);
      references = take<Scalar>(panels * width);
      sums = take<Scalar>(panels * width);
      scores = take<Scalar>((weights ? args.ranges.keys : key_block) * width);
      dropped = take<Scalar>(weights && args.dropout.active ? key_block * width : 0);
      key_copy = take<Scalar>(readable_in_place<S, In>(args.key) ? 0 : key_block * args.head_dim);
      value_copy = take<Scalar>(readable_in_place<S, In>(args.value) ? 0 : key_block * args.value_dim);
      ranges = take<Range>(panels * width);
      pieces = take<Piece>(most_pieces);
      piece_references = take<Scalar>(most_pieces * width);
    }

    template <class T>
    T* take(std::int64_t count) {
      Scalar* taken = base + used;
      const std::int64_t line = 64 / sizeof(Scalar);
      const std::int64_t scalars = (count * static_cast<std::int64_t>(sizeof(T)) + 63) / 64 * line;
      used += scalars;
      return reinterpret_cast<T*>(taken);
    }
  };

  static constexpr Scalar infinity = __builtin_inff();

  // ---- Panels and their ranges ----

  std::int64_t panel_row(std::int64_t p) const { return args_.row_begin + p * width; }
  int panel_rows(std::int64_t p) const { return at_most(args_.row_end - panel_row(p), width); }
  int panel_vectors(std::int64_t p) const { return (panel_rows(p) + lanes - 1) / lanes; }
  Scalar* query_panel(std::int64_t p) const { return at_.queries + p * args_.head_dim * width; }
  Scalar* output_panel(std::int64_t p) const { return at_.outputs + p * args_.value_dim * width; }

  // The smallest range that holds the ranges of rows [from, to) of the task.
  Range hull_of_rows(std::int64_t from, std::int64_t to) const {
    Range hull{0, 0};
    for (std::int64_t r = from; r < to; ++r) {
      if (at_.ranges[r].begin < at_.ranges[r].end) {
        const bool empty = hull.begin == hull.end;
        hull.begin = empty ? at_.ranges[r].begin : smaller(hull.begin, at_.ranges[r].begin);
        hull.end = empty ? at_.ranges[r].end : larger(hull.end, at_.ranges[r].end);
      }
    }
    return hull;
  }
  // The keys that all of these rows may attend to.
  Range core_of_rows(std::int64_t from, std::int64_t to) const {
    Range core{0, args_.ranges.keys};
    for (std::int64_t r = from; r < to; ++r) {
      core.begin = larger(core.begin, at_.ranges[r].begin);
      core.end = smaller(core.end, at_.ranges[r].end);
    }
    return core;
  }
  Range hull_of_panel(std::int64_t p) const { return hull_of_rows(p * width, p * width + panel_rows(p)); }
  Range core_of_panel(std::int64_t p) const { return core_of_rows(p * width, p * width + panel_rows(p)); }

  void start(std::int64_t p) {
    // Plain scores are wanted in units of log2, ready for the exponential; those that a bias may push to the end of the
    // range stay natural; a capped one is divided by its cap.
    const double units = args_.modifiers.softcap != 0 ? 1 / args_.modifiers.softcap : log2e / to_log2_;
    const auto factor = static_cast<Scalar>(args_.scale * units);
    for (int v = 0; v < S::panel_vectors; ++v) {
      const int rows = at_most(larger(panel_rows(p) - v * lanes, 0), lanes);
      pack_transposed<S, In>(args_.query, panel_row(p) + v * lanes, rows, args_.head_dim, factor,
                             query_panel(p) + v * lanes, width);
    }
    for (int r = 0; r < width; ++r) {
      at_.ranges[p * width + r] = r < panel_rows(p) ? range_of_row(args_.ranges, panel_row(p) + r) : Range{0, 0};
      at_.references[p * width + r] = -infinity;
      at_.sums[p * width + r] = 0;
    }
    Scalar* output = output_panel(p);
    for (std::int64_t at = 0; at < args_.value_dim * width; at += lanes) {
      S::store(output + at, S::zero());
    }
  }

  // Makes the block's keys and values readable, once for all panels that visit it.
  void load_block() {
    if (block_loaded_) {
      return;
    }
    const std::int64_t count = block_end_ - block_begin_;
    keys_ = readable_rows<S, In>(args_.key, block_begin_, count, args_.head_dim, at_.key_copy);
    values_ = readable_rows<S, In>(args_.value, block_begin_, count, args_.value_dim, at_.value_copy);
    const bool forbids = args_.modifiers.mask.data != nullptr || args_.modifiers.bias.data != nullptr;
    careful_ = forbids && !values_are_finite(block_begin_, count);
    block_loaded_ = true;
  }

  // Whether a weight of 0 can forget each of these values.
  HEADWAY_NOINLINE bool values_are_finite(std::int64_t key, std::int64_t count) const {
    Vector zeros = S::zero();  // NaN after 0 * inf or 0 * NaN
    for (std::int64_t j = key - block_begin_; j < key - block_begin_ + count; ++j) {
      for (std::int64_t d = 0; d < args_.value_dim; d += lanes) {
        zeros = S::fma(S::load_first(values_.data + j * values_.ld + d, at_most(args_.value_dim - d, lanes)), S::zero(), zeros);
      }
    }
    return !S::any(S::not_less_equal(zeros, S::zero()));
  }

  // ---- Parts of a block ----

  Range inside_block(const Range& range) const {
    const Range cut{larger(range.begin, block_begin_), smaller(range.end, block_end_)};
    return cut.begin < cut.end ? cut : Range{block_begin_, block_begin_};
  }

  void core_block(std::int64_t p) {
    const Range core = inside_block(core_of_panel(p));
    if (core.begin == core.end) {
      return;
    }
    load_block();
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
      two_pass<NV>(p, 0, core, false, careful_);
      return;
    }
    std::int64_t fused_begin = core.begin;
    if (at_.references[p * width] == -infinity) {
      fused_begin = smaller(core.begin + first_keys, core.end);
      two_pass<NV>(p, 0, {core.begin, fused_begin}, false, false);
    }
    if (fused_begin < core.end) {
      fused<NV>(p, {fused_begin, core.end});
    }
  }

  // What lies in the panel's hull before and after its core.
  void edge_block(std::int64_t p) {
    const Range core = core_of_panel(p);
    const Range hull = inside_block(hull_of_panel(p));
    if (core.begin >= core.end) {
      edge_piece(p, hull);
      return;
    }
    edge_piece(p, {hull.begin, smaller(hull.end, core.begin)});
    edge_piece(p, {larger(hull.begin, core.end), hull.end});
  }

  // Vector by vector, each with the keys that its own rows reach.
  void edge_piece(std::int64_t p, const Range& piece) {
    if (piece.begin >= piece.end) {
      return;
    }
    load_block();
    const bool careful = careful_ || !values_are_finite(piece.begin, piece.end - piece.begin);
    for (int v = 0; v < panel_vectors(p); ++v) {
      const Range hull = hull_of_rows(p * width + v * lanes, p * width + (v + 1) * lanes);
      const Range reached{larger(hull.begin, piece.begin), smaller(hull.end, piece.end)};
      if (reached.begin < reached.end) {
        two_pass<1>(p, v, reached, true, careful);
      }
    }
  }

  // ---- Scores ----

  template <int NV>
  static constexpr int broadcasts() {
    return NV == 1 ? S::edge_scalars : NV == 2 ? S::panel_vectors * S::tile_scalars / 2 : S::tile_scalars;
  }

  // The scores, then weights, of a piece that starts at `key`, for the vectors from v on.
  Scalar* scores_at(std::int64_t key, int v) const {
    return at_.scores + (args_.weights.data != nullptr ? key * width : 0) + v * lanes;
  }
  const Scalar* key_row(std::int64_t key) const { return keys_.data + (key - block_begin_) * keys_.ld; }
  const Scalar* value_row(std::int64_t key) const { return values_.data + (key - block_begin_) * values_.ld; }

  // S^T = K Q^T for NV vectors from vector v on.
  template <int NV>
  HEADWAY_NOINLINE void raw_scores(std::int64_t p, int v, const Range& piece) {
    constexpr int NB = broadcasts<NV>();
    const Scalar* queries = query_panel(p) + v * lanes;
    const Scalar* keys = key_row(piece.begin);
    Scalar* scores = scores_at(piece.begin, v);
    const std::int64_t count = piece.end - piece.begin;
    std::int64_t j = 0;
    for (; j + NB <= count; j += NB) {
      score_tile<NV, NB>(queries, keys + j * keys_.ld, scores + j * width);
    }
    for (; j < count; ++j) {
      score_tile<NV, 1>(queries, keys + j * keys_.ld, scores + j * width);
    }
  }

  template <int NV, int NB>
  HEADWAY_INLINE void score_tile(const Scalar* queries, const Scalar* keys, Scalar* scores) {
    Accumulators<S, NV, NB> acc;
    clear<S, NV, NB>(acc);
    accumulate<S, NV, NB, Scalars::across>(acc, queries, width, keys, keys_.ld, args_.head_dim);
    HEADWAY_UNROLL
    for (int c = 0; c < NB; ++c) {
      HEADWAY_UNROLL
      for (int n = 0; n < NV; ++n) {
        S::store(scores + c * width + n * lanes, acc[c][n]);
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
        load_mask_bits(args_.modifiers.mask, {row, rows, key, keys}, bits);
      }
      for (int n = 0; n < vectors; ++n) {
        const ChunkPlace place{row + n * lanes, at_most(larger(rows - n * lanes, 0), lanes), key, keys};
        modifier_.apply(scores_at(piece.begin, v + n) + (key - piece.begin) * width, width, place, bits, n * lanes);
      }
    }
  }

  // ---- Softmax ----

  // The reference that an exponent may subtract: a row with no allowed key yet has -inf scores only.
  HEADWAY_INLINE static Vector usable(Vector reference) {
    return S::select(S::equal(reference, S::set(-infinity)), S::zero(), reference);
  }

  // Scores, modifiers, a new reference where a row's maximum passes the old one, exponentials, output.
  template <int NV>
  HEADWAY_NOINLINE void two_pass(std::int64_t p, int v, const Range& piece, bool edge, bool careful) {
    raw_scores<NV>(p, v, piece);
    if (args_.modifiers.any) {
      modify(p, v, NV, piece);
    }
    if (edge) {
      forbid_outside_ranges<S>(scores_at(piece.begin, v), width, at_.ranges + p * width + v * lanes, piece.begin,
                               piece.end - piece.begin);
    }
    Vector highest[NV];
    highest_scores<NV>(p, v, piece, highest);
    exponentiate<NV>(p, v, piece, highest, careful);
  }

  // The larger of each row's reference and its scores in the piece.
  template <int NV>
  HEADWAY_INLINE void highest_scores(std::int64_t p, int v, const Range& piece, Vector (&highest)[NV]) {
    HEADWAY_UNROLL
    for (int n = 0; n < NV; ++n) {
      highest[n] = S::load(at_.references + p * width + (v + n) * lanes);
    }
    const Scalar* scores = scores_at(piece.begin, v);
    for (std::int64_t j = 0; j < piece.end - piece.begin; ++j) {
      HEADWAY_UNROLL
      for (int n = 0; n < NV; ++n) {
        highest[n] = S::max(S::load(scores + j * width + n * lanes), highest[n]);
      }
    }
  }

  // P^T = 2^(S^T - reference) in place, the sums, and the output, for new references that are given.
  template <int NV>
  HEADWAY_INLINE void exponentiate(std::int64_t p, int v, const Range& piece, const Vector (&reference)[NV],
                                   bool careful) {
    Vector decay[NV], subtract[NV], sum[NV];
    const Vector to_log2 = S::set(static_cast<Scalar>(to_log2_));
    Scalar* references = at_.references + p * width + v * lanes;
    HEADWAY_UNROLL
    for (int n = 0; n < NV; ++n) {
      subtract[n] = usable(reference[n]);
      decay[n] = exp2<S>((S::load(references + n * lanes) - subtract[n]) * to_log2);
      S::store(references + n * lanes, reference[n]);
      sum[n] = S::zero();
    }
    Scalar* scores = scores_at(piece.begin, v);
    for (std::int64_t j = 0; j < piece.end - piece.begin; ++j) {
      HEADWAY_UNROLL
      for (int n = 0; n < NV; ++n) {
        Scalar* at = scores + j * width + n * lanes;
        const Vector weight = exp2<S>((S::load(at) - subtract[n]) * to_log2);
        sum[n] = sum[n] + weight;
        S::store(at, weight);
      }
    }
    add_sums<NV>(p, v, decay, sum);
    add_values<NV>(p, v, piece, decay, careful);
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
  HEADWAY_NOINLINE void fused(std::int64_t p, const Range& piece) {
    constexpr int NB = broadcasts<NV>();
    Vector negated[NV], sum[NV], decay[NV];
    HEADWAY_UNROLL
    for (int n = 0; n < NV; ++n) {
      negated[n] = S::zero() - S::load(at_.references + p * width + n * lanes);
      sum[n] = S::zero();
      decay[n] = S::set(1);
    }
    const Scalar* keys = key_row(piece.begin);
    Scalar* weights = scores_at(piece.begin, 0);
    const std::int64_t count = piece.end - piece.begin;
    std::int64_t j = 0;
    for (; j + NB <= count; j += NB) {
      fused_tile<NV, NB>(query_panel(p), keys + j * keys_.ld, weights + j * width, negated, sum);
    }
    for (; j < count; ++j) {
      fused_tile<NV, 1>(query_panel(p), keys + j * keys_.ld, weights + j * width, negated, sum);
    }
    Mask grown[NV];
    bool redo = false;
    HEADWAY_UNROLL
    for (int n = 0; n < NV; ++n) {
      grown[n] = S::not_less_equal(sum[n], S::set(static_cast<Scalar>(sum_limit)));
      redo |= S::any(grown[n]);
    }
    if (__builtin_expect(redo, 0)) {
      raise_references<NV>(p, piece, grown);
      return;
    }
    add_sums<NV>(p, 0, decay, sum);
    add_values<NV>(p, 0, piece, decay, false);
  }

  // A row's block sum may grow to this before its reference is raised: far below overflow also for values of 1e18, far
  // above what ordinary scores reach.
  static constexpr double sum_limit = 0x1p30;

  template <int NV, int NB>
  HEADWAY_INLINE void fused_tile(const Scalar* queries, const Scalar* keys, Scalar* weights, const Vector (&negated)[NV],
                                 Vector (&sum)[NV]) {
    Accumulators<S, NV, NB> acc;
    clear<S, NV, NB>(acc);
    accumulate<S, NV, NB, Scalars::across>(acc, queries, width, keys, keys_.ld, args_.head_dim);
    HEADWAY_UNROLL
    for (int c = 0; c < NB; ++c) {
      HEADWAY_UNROLL
      for (int n = 0; n < NV; ++n) {
        const Vector weight = exp2<S>(acc[c][n] + negated[n]);
        sum[n] = sum[n] + weight;
        S::store(weights + c * width + n * lanes, weight);
      }
    }
  }

  // The piece again, with new references for the rows that outgrew theirs; the other rows repeat their bits.
  template <int NV>
  HEADWAY_NOINLINE void raise_references(std::int64_t p, const Range& piece, const Mask (&grown)[NV]) {
    raw_scores<NV>(p, 0, piece);
    Vector reference[NV];
    highest_scores<NV>(p, 0, piece, reference);
    HEADWAY_UNROLL
    for (int n = 0; n < NV; ++n) {
      reference[n] = S::select(grown[n], reference[n], S::load(at_.references + p * width + n * lanes));
    }
    exponentiate<NV>(p, 0, piece, reference, false);
  }

  // ---- Output ----

  // O^T = O^T * decay + V^T P^T, a piece's sum first, so that long rows keep their accuracy.
  template <int NV>
  HEADWAY_NOINLINE void add_values(std::int64_t p, int v, const Range& piece, const Vector (&decay)[NV], bool careful) {
    constexpr int NB = broadcasts<NV>();
    remember(p, v, NV, piece);
    const Scalar* weights = args_.dropout.active ? dropped(p, v, NV, piece) : scores_at(piece.begin, v);
    if (careful) {
      add_values_carefully(p, v, NV, piece, weights, decay);
      return;
    }
    const Scalar* values = value_row(piece.begin);
    const std::int64_t count = piece.end - piece.begin;
    Scalar* output = output_panel(p) + v * lanes;
    std::int64_t d = 0;
    for (; d + NB <= args_.value_dim; d += NB) {
      value_tile<NV, NB>(weights, values + d, count, output + d * width, decay);
    }
    for (; d < args_.value_dim; ++d) {
      value_tile<NV, 1>(weights, values + d, count, output + d * width, decay);
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

  // Where a value is NaN or infinite, rows that may not attend to it must not multiply it by their 0. Same sums in the
  // same order, pair by pair.
  HEADWAY_NOINLINE void add_values_carefully(std::int64_t p, int v, int vectors, const Range& piece,
                                             const Scalar* weights, const Vector* decay) {
    const std::int64_t row = panel_row(p) + v * lanes;
    const int rows = at_most(args_.row_end - row, vectors * lanes);
    const Scalar* decays = reinterpret_cast<const Scalar*>(decay);
    for (int r = 0; r < rows; ++r) {
      const Range& range = at_.ranges[p * width + v * lanes + r];
      for (std::int64_t d = 0; d < args_.value_dim; ++d) {
        Scalar sum = 0;
        for (std::int64_t key = piece.begin; key < piece.end; ++key) {
          if (is_allowed(args_.modifiers, range, row + r, key)) {
            sum = S::fma_scalar(weights[(key - piece.begin) * width + r], value_row(key)[d], sum);
          }
        }
        Scalar& output = output_panel(p)[d * width + v * lanes + r];
        output = S::fma_scalar(output, decays[r], sum);
      }
    }
  }

  template <int NV, int NB>
  HEADWAY_INLINE void value_tile(const Scalar* weights, const Scalar* values, std::int64_t count, Scalar* output,
                                 const Vector (&decay)[NV]) {
    Accumulators<S, NV, NB> acc;
    clear<S, NV, NB>(acc);
    accumulate<S, NV, NB, Scalars::along>(acc, weights, width, values, values_.ld, count);
    HEADWAY_UNROLL
    for (int c = 0; c < NB; ++c) {
      HEADWAY_UNROLL
      for (int n = 0; n < NV; ++n) {
        Scalar* at = output + c * width + n * lanes;
        S::store(at, S::fma(S::load(at), decay[n], acc[c][n]));
      }
    }
  }

  // ---- Finishing ----

  // A row's softmax in the end: its weights are stored weight * factor, its lse is lse.
  struct RowEnd {
    Scalar factor;
    double lse;
  };

  RowEnd row_end(std::int64_t p, int r) const {
    const std::int64_t row = panel_row(p) + r;
    const Range& range = at_.ranges[p * width + r];
    const double reference = at_.references[p * width + r] * to_log2_;
    const double sum = at_.sums[p * width + r];
    const bool sinks = args_.has_sink && row < args_.ranges.real_queries;
    if (sum == 0) {  // no key, or none that may attend: unless a key was allowed and all scores are -inf
      const bool lost = reference == -infinity && any_allowed(range, row);
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

  HEADWAY_NOINLINE void finish(std::int64_t p) {
    alignas(64) Scalar factors[width] = {};
    const auto kept_scale = static_cast<Scalar>(args_.dropout.kept_scale);
    for (int r = 0; r < panel_rows(p); ++r) {
      const RowEnd end = row_end(p, r);
      factors[r] = end.factor;
      if (args_.lse != nullptr) {
        static_cast<Scalar*>(args_.lse)[(panel_row(p) + r) * args_.lse_stride] = static_cast<Scalar>(end.lse);
      }
    }
    for (int v = 0; v < panel_vectors(p); ++v) {
      const std::int64_t row = panel_row(p) + v * lanes;
      const Vector factor = S::load(factors + v * lanes) * S::set(kept_scale);
      unpack_transposed<S, In>(output_panel(p) + v * lanes, width, factor, args_.out, row,
                               at_most(args_.row_end - row, lanes), args_.value_dim);
    }
    if (args_.weights.data != nullptr) {
      store_weights(p, factors);
    }
  }

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

  // weights(i, j) = P^T(j, i) * 2^(reference then - reference now) / sum, piece by piece; 0 where no piece was.
  HEADWAY_NOINLINE void store_weights(std::int64_t p, const Scalar* factors) {
    for (int v = 0; v < panel_vectors(p); ++v) {
      const Range hull = hull_of_rows(p * width + v * lanes, p * width + (v + 1) * lanes);
      clear_weights(p, v, 0, hull.begin);
      clear_weights(p, v, hull.end, args_.ranges.keys);
    }
    const Vector to_log2 = S::set(static_cast<Scalar>(to_log2_));
    for (std::int64_t k = 0; k < pieces_; ++k) {
      const Piece& piece = at_.pieces[k];
      for (int v = piece.vector; v < piece.vector + piece.vectors; ++v) {
        const Vector now = usable(S::load(at_.references + p * width + v * lanes));
        const Vector then = S::load(at_.piece_references + k * width + v * lanes);
        store_piece(p, v, piece, S::load(factors + v * lanes) * exp2<S>((then - now) * to_log2));
      }
    }
    pieces_ = 0;
  }

  void store_piece(std::int64_t p, int v, const Piece& piece, Vector factor) {
    const std::int64_t row = panel_row(p) + v * lanes;
    const int rows = at_most(args_.row_end - row, lanes);
    const WritableMatrix target{static_cast<In*>(args_.weights.data) + piece.key_begin * args_.weights.column_stride,
                                args_.weights.row_stride, args_.weights.column_stride};
    unpack_transposed<S, In>(scores_at(piece.key_begin, v), width, factor, target, row, rows, piece.keys);
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

  const ForwardArgs& args_;
  ScoreModifier<S> modifier_;
  double to_log2_;  // from the units of the scores to those of the exponential
  std::int64_t panels_;
  Layout at_;
  std::int64_t pieces_ = 0;
  std::int64_t block_begin_ = 0, block_end_ = 0;
  bool block_loaded_ = false;
  bool careful_ = false;  // the block holds values that masked rows must not touch
  Rows<Scalar> keys_{}, values_{};
};

}  // namespace
}  // namespace headway::cpu
