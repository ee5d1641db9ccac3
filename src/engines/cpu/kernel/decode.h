// Attention for few queries against many keys ("decode"): keys in a row, features in lanes.
//
// A task is one chunk of the keys of one kv head, for all query rows that share them: the query heads of its group,
// times their queries. In blocks of up to 2048 keys
//   s [rows][keys] = Q K^T      p = 2^(s - reference)      o [rows][Dv] = p V
// K streams by, then V: each of their bytes comes from memory once for all rows, and that bounds it as long as rows are
// few (one multiply-add per row and element, against 7 cycles that a cache line takes to come). Scores and sums stay in
// the second-level cache. What a chunk leaves of a row is a partial softmax; decode_finish.h merges those of all
// chunks.
//
// Sums over keys are taken in steps, 16 keys, 16 such, then the block, so that long rows keep their accuracy: plain
// sums of thousands of equal terms would drift beyond the contract's bound.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/decode_state.h"
#include "engines/cpu/kernel/decode_tiles.h"
#include "engines/cpu/kernel/strips.h"

namespace headway::cpu {
namespace {

template <class S, class In>
class Decode : protected DecodeState<S, In> {
 protected:
  using Base = DecodeState<S, In>;
  using Base::allowed_of;
  using Base::args_;
  using Base::at_;
  using Base::block_;
  using Base::head_;
  using Base::head_of;
  using Base::hull_;
  using Base::infinity;
  using Base::lanes;
  using Base::query_of;
  using Base::rows_;
  using Base::scores_of;
  using Base::tile;
  using Base::to_log2_;
  using typename Base::Scalar;
  using typename Base::Vector;

 public:
  using Base::scratch_bytes;

  Decode(const DecodeArgs& args, void* scratch) : Base(args, scratch) {}

  // Leaves the chunk's partial softmax of every row.
  HEADWAY_NOINLINE void run(std::int64_t chunk) {
    const PartialSoftmaxes<S> partials(args_);
    each_block(chunk, [&](bool first) {
      for (int r = 0; first && r < rows_; ++r) {
        partials.clear(partials.at(chunk, at_.numbers[r]));
      }
      const Range hull = this->enter_block();
      if (hull.begin >= hull.end) {
        return;
      }
      score_rows(hull);
      for (int r = 0; r < rows_; ++r) {
        modify(r, hull);
        soften(r, hull);
      }
      add_values(0, rows_, hull, nullptr);
      for (int r = 0; r < rows_; ++r) {
        if (at_.forbids[r] && !output_is_finite(r)) {  // what a forbidden key holds shows through its weight of 0
          add_values(r, r + 1, hull, allowed_of(r));
        }
        partials.absorb(partials.at(chunk, at_.numbers[r]), at_.references[r], at_.sums[r],
                        at_.outputs + r * at_.output_ld, to_log2_);
      }
    });
  }

  // Writes the chunk's columns of the weights: the scores again, against the merged softmax, whose factors lie where
  // the first chunk's sums were.
  HEADWAY_NOINLINE void run_weights(std::int64_t chunk) {
    const PartialSoftmaxes<S> partials(args_);
    each_block(chunk, [&](bool) {
      const Range hull = this->enter_block();
      if (hull.begin < hull.end) {
        score_rows(hull);
      }
      for (int r = 0; r < rows_; ++r) {
        if (hull.begin < hull.end) {
          modify(r, hull);
        }
        const std::int64_t merged = partials.at(0, at_.numbers[r]);
        store_weights(r, hull, partials.references[merged], partials.sums[merged]);
      }
    });
  }

 private:
  // body(whether these rows begin) for each block of the chunk and each set of rows that passes over it together.
  template <class Body>
  HEADWAY_INLINE void each_block(std::int64_t chunk, const Body& body) {
    const std::int64_t begin = chunk * args_.chunk_keys;
    const std::int64_t end = smaller(begin + args_.chunk_keys, head_.ranges.keys);
    for (std::int64_t row = 0; row < args_.rows();) {
      row = this->start_rows(row);
      for (block_.begin = begin; block_.begin < end; block_.begin = block_.end) {
        block_.end = smaller(block_.begin + stream_keys, end);
        body(block_.begin == begin);
      }
    }
  }

  // ---- Scores ----

  // Lane groups start at the hull's first key: a score's bits do not depend on its lane.
  HEADWAY_NOINLINE void score_rows(const Range& hull) {
    const RowsAhead<In> ahead(head_.key, head_.head_dim, hull.end);
    for (std::int64_t key = hull.begin, count = 0; key < hull.end; key += count) {
      count = this->keys_together(head_.key, key, smaller(hull.end - key, packed_keys));
      if (!this->reaches(key, key + count)) {
        continue;  // modify() forbids them, whatever their scores are
      }
      const StoredRows<In> keys = this->stored_rows(head_.key, key, count, head_.head_dim);
      for (std::int64_t k = 0; k < count; k += lanes) {
        const StoredRows<In> group = keys.from(k);
        int first = 0;  // the row that is left to begin with
        if (ahead.any()) {
          first = score_fetching(key + k, group, count - 1 - k, ahead.beside(key + k, smaller(count - k, lanes)));
        }
        if (head_.head_dim > longest_dot_chain<S, In>) {
          score_rows_of<true>(first, key + k, group, count - 1 - k);
        } else {
          score_rows_of<false>(first, key + k, group, count - 1 - k);
        }
      }
    }
  }

  template <bool in_chains>
  HEADWAY_INLINE void score_rows_of(int r, std::int64_t key, const StoredRows<In>& keys, std::int64_t last) {
    r = score_group<4, in_chains>(r, key, keys, last);
    r = score_group<2, in_chains>(r, key, keys, last);
    score_group<1, in_chains>(r, key, keys, last);
  }

  // As many rows from r on as come in sets of NR; gives the first that is left. Each kind is a function of its own: two
  // loops in one cost the common one registers.
  template <int NR, bool in_chains>
  HEADWAY_NOINLINE int score_group(int r, std::int64_t key, const StoredRows<In>& keys, std::int64_t last) {
    if constexpr (NR == 1 || lanes % NR == 0) {
      for (; r + NR <= rows_; r += NR) {
        score_tile<NR, in_chains>(r, key, keys, last, FetchNothing{});
      }
    }
    return r;
  }

  // The first few rows, which wait for memory, with rows ahead fetched beside them; gives how many.
  HEADWAY_NOINLINE int score_fetching(std::int64_t key, const StoredRows<In>& keys, std::int64_t last,
                                      const Ahead& ahead) {
    const bool in_chains = head_.head_dim > longest_dot_chain<S, In>;
    const auto score = [&]<int NR>(Strip<NR>) {
      in_chains ? score_tile<NR, true>(0, key, keys, last, FetchRows{ahead})
                : score_tile<NR, false>(0, key, keys, last, FetchRows{ahead});
      return NR;
    };
    if constexpr (lanes % 4 == 0) {
      if (rows_ >= 4) {
        return score(Strip<4>{});
      }
    }
    return score(Strip<1>{});
  }

  template <int NR, bool in_chains, class Fetch>
  HEADWAY_INLINE void score_tile(int r, std::int64_t key, const StoredRows<In>& keys, std::int64_t last,
                                 const Fetch& fetch) {
    dot_tile<S, In, NR, in_chains>(at_.queries + r * at_.query_ld, at_.query_ld, keys, last, head_.head_dim,
                                   this->product_scaling_, scores_of(r) + (key - block_.begin), at_.score_ld, fetch);
  }

  // Modifies the scores of the hull's tiles, and makes those that are not allowed -inf.
  HEADWAY_NOINLINE void modify(int r, const Range& hull) {
    const ForwardArgs& head = head_of(r);
    const std::int64_t i = query_of(r);
    Modifiers after_cap = head.modifiers;
    after_cap.softcap = 0;
    const KeyLaneModifier<S> modifier(after_cap, head.ranges);
    at_.forbids[r] = false;
    for (std::int64_t t = first_tile(hull); t < end_tile(hull); ++t) {
      const std::int64_t key = block_.begin + t * tile;
      const int keys = at_most(block_.end - key, tile);
      std::uint64_t allowed = row_word(head.ranges, at_.ranges[r], i, key, keys);
      if (head.modifiers.mask.data != nullptr) {
        const Matrix& mask = head.modifiers.mask;
        allowed &=
            mask_word<S>(static_cast<const std::uint8_t*>(mask.data) + i * mask.row_stride + key * mask.column_stride,
                         mask.column_stride, keys);
      }
      if (head.modifiers.softcap != 0) {
        cap(scores_of(r) + t * tile, head.modifiers.softcap);
      }
      if (head.modifiers.any) {
        modifier.apply({i, 1, key, keys}, {0, 1, 0, (keys + lanes - 1) / lanes}, scores_of(r) + t * tile, nullptr,
                       &allowed);
      }
      if (allowed != low_bits(tile)) {
        forbid(scores_of(r) + t * tile, allowed);
        at_.forbids[r] |= allowed != range_word(inside_panel(hull, key, keys));
      }
      allowed_of(r)[t] = allowed;
    }
  }

  static void cap(Scalar* scores, double softcap) {
    const SoftCap<S> soft_cap(softcap);
    for (int v = 0; v < S::panel_vectors; ++v) {
      S::store(scores + v * lanes, soft_cap(S::load(scores + v * lanes)));
    }
  }

  static HEADWAY_INLINE void forbid(Scalar* scores, std::uint64_t allowed) {
    for (int v = 0; v < S::panel_vectors; ++v) {
      const auto mask = S::mask_from_bits(allowed >> (v * lanes));
      S::store(scores + v * lanes, S::select(mask, S::load(scores + v * lanes), S::set(-infinity)));
    }
  }

  std::int64_t first_tile(const Range& hull) const { return (hull.begin - block_.begin) / tile; }
  std::int64_t end_tile(const Range& hull) const { return (hull.end - block_.begin + tile - 1) / tile; }

  // ---- Softmax ----

  // p = 2^(s - reference) in place, and the sum; then dropout.
  HEADWAY_NOINLINE void soften(int r, const Range& hull) {
    const std::int64_t begin = first_tile(hull) * S::panel_vectors;
    const std::int64_t end = end_tile(hull) * S::panel_vectors;
    Scalar* scores = scores_of(r);
    Vector highest = S::set(-infinity);
    for (std::int64_t v = begin; v < end; ++v) {
      highest = S::max(S::load(scores + v * lanes), highest);
    }
    const Scalar reference = highest_lane<S>(highest);
    const Vector subtract = S::set(reference == -infinity ? Scalar{0} : reference);
    const Vector to_log2 = S::set(static_cast<Scalar>(to_log2_));
    Vector sum = S::zero(), part = S::zero();
    for (std::int64_t v = begin; v < end;) {
      const std::int64_t stop = smaller(end, (v / summed + 1) * summed);
      Vector few = S::zero();
      for (; v < stop; ++v) {
        const Vector weight = exp2<S>((S::load(scores + v * lanes) - subtract) * to_log2);
        few = few + weight;
        S::store(scores + v * lanes, weight);
      }
      part = part + few;
      if (v % (summed * summed) == 0) {
        sum = sum + part;
        part = S::zero();
      }
    }
    at_.references[r] = reference;
    at_.sums[r] = lane_total(sum + part);
    if (head_.dropout.active) {
      drop_weights(r, hull);
    }
  }

  static HEADWAY_INLINE Scalar lane_total(Vector x) {
    alignas(64) Scalar elements[lanes];
    S::store(elements, x);
    for (int half = lanes / 2; half > 0; half /= 2) {
      for (int l = 0; l < half; ++l) {
        elements[l] += elements[l + half];
      }
    }
    return elements[0];
  }

  void drop_weights(int r, const Range& hull) {
    const ForwardArgs& head = head_of(r);
    for (std::int64_t t = first_tile(hull); t < end_tile(hull); ++t) {
      const std::uint64_t kept = kept_word<S>(head.dropout, query_of(r), block_.begin + t * tile, tile);
      for (int v = 0; v < S::panel_vectors; ++v) {
        Scalar* at = scores_of(r) + t * tile + v * lanes;
        S::store(at, S::select(S::mask_from_bits(kept >> (v * lanes)), S::load(at), S::zero()));
      }
    }
  }

  // ---- Values ----

  // outputs = p V over the hull for the rows [row_begin, row_end). With a set of allowed pairs the others' values count
  // as 0: their weights are 0, so that only NaN and infinity make a difference.
  HEADWAY_NOINLINE void add_values(int row_begin, int row_end, const Range& hull, const std::uint64_t* allowed) {
    constexpr std::int64_t part_keys = summed * summed;
    const RowsAhead<In> ahead(head_.value, head_.value_dim, hull.end);
    bool first_part = true;
    for (std::int64_t part = hull.begin; part < hull.end;) {
      const std::int64_t part_end = next(part, part_keys, hull.end);
      Sum sum = Sum::starts;
      for (std::int64_t key = part; key < part_end;) {
        const std::int64_t end = next(key, summed, part_end);
        if (!this->reaches(key, end)) {  // their weights are 0
          key = end;
          continue;
        }
        const StoredRows<In> values = this->stored_rows(head_.value, key, end - key, head_.value_dim, allowed);
        if (!one_strip()) {
          touch(values, end - key);
        }
        std::int64_t d = 0;  // the column that is left to begin with
        if (ahead.any()) {
          d = first_strip(row_begin, row_end, key, end - key, values, sum, ahead.beside(key, end - key));
        }
        value_group(row_begin, row_end, key, end - key, values, d, sum);
        sum = Sum::continues;
        key = end;
      }
      part = part_end;
      if (sum == Sum::starts) {
        continue;
      }
      for (int r = row_begin; r < row_end; ++r) {
        add_part(r, first_part);
      }
      first_part = false;
    }
  }

  bool one_strip() const {
    const std::int64_t dim = head_.value_dim;
    return dim <= lanes || dim == 4 * lanes || dim == 8 * lanes;
  }

  // Reads whole rows in order, which memory streams to twice as fast as to one strip of each and then the next.
  void touch(const StoredRows<In>& values, std::int64_t keys) const {
    for (std::int64_t k = 0; k < keys; ++k) {
      for (std::int64_t d = 0; d < head_.value_dim; d += 64 / static_cast<std::int64_t>(sizeof(In))) {
        static_cast<void>(*reinterpret_cast<const volatile char*>(values.data + k * values.ld + d));
      }
    }
  }

  // The end of the step of `size` keys, counted from the block's begin, that `key` is in.
  std::int64_t next(std::int64_t key, std::int64_t size, std::int64_t end) const {
    return smaller(end, block_.begin + ((key - block_.begin) / size + 1) * size);
  }

  void add_part(int r, bool first) {
    for (std::int64_t d = 0; d < at_.output_ld; d += lanes) {
      const Vector part = S::load(at_.part_outputs + r * at_.output_ld + d);
      Scalar* at = at_.outputs + r * at_.output_ld + d;
      S::store(at, first ? part : S::load(at) + part);
    }
  }

  // How many rows go with 8 vectors of d.
  static constexpr bool roomy = S::tile_scalars * S::panel_vectors >= 16;  // 32 registers
  static constexpr int rows_of_8 = !roomy ? 1 : sizeof(In) < 4 ? 2 : 3;

  // A few keys for all rows, in strips of d that the registers hold. The first rows wait for memory, so as many as
  // possible come with them.
  HEADWAY_INLINE void value_group(int row_begin, int row_end, std::int64_t key, std::int64_t keys,
                                  const StoredRows<In>& values, std::int64_t d, Sum sum) {
    const std::int64_t whole = head_.value_dim / lanes * lanes;
    for (; d + 8 * lanes <= whole; d += 8 * lanes) {
      value_strip<rows_of_8, 8>(row_begin, row_end, key, keys, values, d, sum);
    }
    for (; d + 4 * lanes <= whole; d += 4 * lanes) {
      value_strip<2, 4>(row_begin, row_end, key, keys, values, d, sum);
    }
    for (; d < head_.value_dim; d += lanes) {
      value_strip<2, 1>(row_begin, row_end, key, keys, values, d, sum);
    }
  }

  template <int NR, int NV>
  HEADWAY_NOINLINE void value_strip(int row_begin, int row_end, std::int64_t key, std::int64_t keys,
                                    const StoredRows<In>& values, std::int64_t d, Sum sum) {
    int r = row_begin;
    for (; r + NR <= row_end; r += NR) {
      add_rows<NR, NV>(r, key, keys, values, d, sum, FetchNothing{});
    }
    for (; NR > 1 && r < row_end; ++r) {
      add_rows<1, NV>(r, key, keys, values, d, sum, FetchNothing{});
    }
  }

  // The first strip of value_group, with rows ahead fetched beside the first rows; gives its end. Narrow heads are
  // left.
  HEADWAY_NOINLINE std::int64_t first_strip(int row_begin, int row_end, std::int64_t key, std::int64_t keys,
                                            const StoredRows<In>& values, Sum sum, const Ahead& ahead) {
    const auto strip = [&]<int NR, int NV>(Strip<NR>, Strip<NV>) -> std::int64_t {
      int r = row_begin;
      if (r + NR <= row_end) {
        add_rows<NR, NV>(r, key, keys, values, 0, sum, FetchRows{ahead});
        r += NR;
      } else {
        add_rows<1, NV>(r, key, keys, values, 0, sum, FetchRows{ahead});
        ++r;
      }
      value_strip<NR, NV>(r, row_end, key, keys, values, 0, sum);
      return NV * lanes;
    };
    return head_.value_dim >= 8 * lanes   ? strip(Strip<rows_of_8>{}, Strip<8>{})
           : head_.value_dim >= 4 * lanes ? strip(Strip<2>{}, Strip<4>{})
                                          : 0;
  }

  template <int NR, int NV, class Fetch>
  HEADWAY_INLINE void add_rows(int r, std::int64_t key, std::int64_t keys, const StoredRows<In>& values, std::int64_t d,
                               Sum sum, const Fetch& fetch) {
    value_tile<S, In, NR, NV>(scores_of(r) + (key - block_.begin), at_.score_ld, values.from(0, d), keys,
                              at_most(head_.value_dim - d, lanes), at_.part_outputs + r * at_.output_ld + d,
                              at_.output_ld, sum, fetch);
  }

  bool output_is_finite(int r) const {
    return rows_are_finite<S>({at_.outputs + r * at_.output_ld, at_.output_ld}, 0, 1, head_.value_dim);
  }

  // ---- Weights ----

  // The block's columns of a row: 0 for keys that are not allowed, also in a row that is NaN.
  void store_weights(int r, const Range& hull, Scalar reference, Scalar factor) {
    const WritableMatrix& weights = head_of(r).weights;
    In* row = static_cast<In*>(weights.data) + query_of(r) * weights.row_stride;
    const bool some = hull.begin < hull.end;
    const std::int64_t begin = some ? first_tile(hull) : 0;
    const std::int64_t end = some ? end_tile(hull) : 0;
    const Vector subtract = S::set(reference == -infinity ? Scalar{0} : reference);
    const Vector to_log2 = S::set(static_cast<Scalar>(to_log2_));
    for (std::int64_t key = block_.begin; key < block_.end; key += lanes) {
      const std::int64_t at = key - block_.begin;
      const std::int64_t t = at / tile;
      Vector weight = S::zero();
      if (t >= begin && t < end) {
        weight = exp2<S>((S::load(scores_of(r) + at) - subtract) * to_log2) * S::set(factor);
        weight = S::select(S::mask_from_bits(allowed_of(r)[t] >> (at % tile)), weight, S::zero());
      }
      store_row<S>(row, weights.column_stride, key, at_most(block_.end - key, lanes), weight);
    }
  }
};

}  // namespace
}  // namespace headway::cpu
