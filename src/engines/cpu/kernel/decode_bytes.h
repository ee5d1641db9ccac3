// Decode's products beside 8-bit rows where pairs of bf16 are multiplied: bf16 holds every 8-bit number, so that bytes
// are converted by two look-ups for 64 of them, once for all rows, and a dot product takes 32. Scales stay apart, those
// of keys for the scores and those of values for the weights.
//
// Scores are as exact as in float. Weights are rounded to bf16, once, which costs no more than rounding the result to
// the type of its queries; their sums are of 256 keys in a row, neighbours in pairs that are counted from the block's
// first key. Weights that are too small or too large for that go through float instead: a row's own weights alone
// decide.
#pragma once

#include <cstdint>
#include <cstring>

#include "engines/cpu/kernel/decode_block.h"
#include "engines/cpu/kernel/decode_task.h"
#include "engines/cpu/kernel/decode_values.h"
#include "engines/cpu/kernel/lane_sums.h"
#include "engines/cpu/kernel/pack.h"
#include "engines/cpu/kernel/stored_rows.h"

namespace headway::cpu {
namespace {

// The addresses of up to `summed` rows, in task.at.rows_at: in place, or where columns lie apart those of copies.
template <class S, class Byte>
HEADWAY_INLINE void list_bytes(const DecodeTask<S>& task, const RowSource& source, std::int64_t begin,
                               std::int64_t count, std::int64_t dim, const void** list) {
  each_run<Byte>(source, begin, count, [&](const Matrix& run, std::int64_t done, std::int64_t rows) HEADWAY_LAMBDA {
    for (std::int64_t r = 0; r < rows; ++r) {
      const Byte* row = static_cast<const Byte*>(run.data) + r * run.row_stride;
      if (run.column_stride != 1) {
        Byte* copy = static_cast<Byte*>(task.at.copy) + (done + r) * dim;
        for (std::int64_t d = 0; d < dim; ++d) {
          copy[d] = row[d * run.column_stride];
        }
        row = copy;
      }
      list[done + r] = row;
    }
  });
}

// The scales of rows [begin, end), from those of the block's first key on.
HEADWAY_INLINE void list_scales(const RowSource& source, std::int64_t block_begin, const Range& rows, float* scales) {
  each_run<std::uint8_t>(source, rows.begin, rows.end - rows.begin,
                         [&](const Matrix&, std::int64_t done, std::int64_t count) HEADWAY_LAMBDA {
                           const Slot at = slot_of(source, rows.begin + done);
                           const float* first =
                               source.scales + at.page * source.scale_page_stride + at.slot * source.scale_stride;
                           for (std::int64_t r = 0; r < count; ++r) {
                             scales[rows.begin + done + r - block_begin] = first[r * source.scale_stride];
                           }
                         });
}

// Where rows that will be read soon lie, fetched a line at a time beside those of a list: as many bytes of each as are
// converted at once. Without such rows it names one that is there already.
struct LinesAhead {
  const char* first;
  std::int64_t row_bytes;

  LinesAhead(const Ahead& rows, const void* there)
      : first(rows.rows < summed ? static_cast<const char*>(there) : rows.first),
        row_bytes(rows.rows < summed ? 0 : rows.row_bytes) {}
  HEADWAY_INLINE void fetch(int k, std::int64_t d) const { __builtin_prefetch(first + k * row_bytes + d, 0, 2); }
};

// The same for rows that lie anywhere.
struct ListedAhead {
  const char* const* rows;

  HEADWAY_INLINE void fetch(int k, std::int64_t d) const { __builtin_prefetch(rows[k] + d, 0, 2); }
};

template <class S, class Byte>
class ByteScores {
  using Vector = typename S::Vector;
  using Operand = Operands<S>;
  using Bytes = typename Operand::template Bytes<Byte>;
  static constexpr int lanes = S::lanes;

 public:
  ByteScores(const DecodeTask<S>& task, const DecodeBlock<S>& block)
      : task_(task), block_(block), at_(task.at), scaling_(task.product_scaling), head_(task.head) {}

  HEADWAY_NOINLINE void score_rows(const Range& hull, const Ahead& then) {
    RowsAhead<Byte> ahead(head_.key, head_.head_dim, hull, then);
    score_keys(hull,
               [&](std::int64_t key) HEADWAY_LAMBDA { return LinesAhead(ahead.beside(key, lanes), at_.rows_at[0]); });
  }

  // The same for a few keys, up to `lanes`.
  HEADWAY_NOINLINE void score_turn(const Range& keys, const char* const* ahead) {
    score_keys(keys, [&](std::int64_t) HEADWAY_LAMBDA { return ListedAhead{ahead}; });
  }

 private:
  template <class RowsNext>
  HEADWAY_INLINE void score_keys(const Range& hull, const RowsNext& rows_next) {
    list_scales(head_.key, block_.begin, hull, at_.scales);
    for (std::int64_t key = hull.begin; key < hull.end; key += lanes) {
      const int count = at_most(hull.end - key, lanes);
      if (!block_.reaches(key, key + count)) {
        continue;  // modify() forbids them, whatever their scores are
      }
      list_bytes<S, Byte>(task_, head_.key, key, count, head_.head_dim, at_.rows_at);
      for (int k = count; k < lanes; ++k) {
        at_.rows_at[k] = at_.rows_at[count - 1];
      }
      const auto next = rows_next(key);
      int r = 0;
      for (; r + 4 <= task_.rows; r += 4) {
        score_group<4>(r, key, next);
      }
      if (r + 2 <= task_.rows) {
        score_group<2>(r, key, next);
        r += 2;
      }
      if (r < task_.rows) {
        score_group<1>(r, key, next);
      }
    }
    for (int r = 0; r < task_.rows; ++r) {
      float* scores = at_.scores_of(r);
      for (std::int64_t key = hull.begin - block_.begin; key < hull.end - block_.begin; key += lanes) {
        S::store(scores + key, S::load(scores + key) * S::load(at_.scales + key));
      }
    }
  }

  // `lanes` keys for NR rows, `together` keys at a time.
  template <int NR, class Next>
  HEADWAY_NOINLINE void score_group(int first, std::int64_t key, const Next& ahead) {
    constexpr int NK = lanes / NR, together = NR == 4 ? 2 : 4;
    const Bytes bytes;
    const Next next = ahead;  // in registers
    for (int part = 0; part < NR; ++part) {
      Vector products[lanes];
      HEADWAY_UNROLL
      for (int k = 0; k < NK; k += together) {
        Vector acc[NR][together];
        multiply<NR, together>(bytes, first, part * NK + k, next, acc);
        HEADWAY_UNROLL
        for (int r = 0; r < NR; ++r) {
          HEADWAY_UNROLL
          for (int n = 0; n < together; ++n) {
            products[r * NK + k + n] = acc[r][n];
          }
        }
      }
      alignas(64) float sums[lanes];
      S::store(sums, scaling_(lane_sums<S>(products)));
      HEADWAY_UNROLL
      for (int r = 0; r < NR; ++r) {
        std::memcpy(at_.scores_of(first + r) + (key - block_.begin) + part * NK, sums + r * NK, NK * sizeof(float));
      }
    }
  }

  // acc[r][n]: the products of query first + r and the list's key k + n, still to be summed over lanes.
  template <int NR, int together, class Next>
  HEADWAY_INLINE void multiply(const Bytes& bytes, int first, int k, const Next& next,
                               Vector (&acc)[NR][together]) const {
    HEADWAY_UNROLL
    for (int r = 0; r < NR; ++r) {
      HEADWAY_UNROLL
      for (int n = 0; n < together; ++n) {
        acc[r][n] = S::zero();
      }
    }
    const std::int64_t dim = head_.head_dim;
    const auto strip = [&](std::int64_t d, const auto& load) HEADWAY_LAMBDA {
      HEADWAY_UNROLL
      for (int n = 0; n < together; ++n) {
        next.fetch(k + n, d);
        typename Operand::Vector front, back;
        bytes.convert(load(static_cast<const Byte*>(at_.rows_at[k + n]) + d), front, back);
        HEADWAY_UNROLL
        for (int r = 0; r < NR; ++r) {
          const auto* query = at_.queries + (first + r) * at_.query_ld + d / Operand::fold;
          acc[r][n] = Operand::multiply_add(Operand::load(query), front, acc[r][n]);
          acc[r][n] = Operand::multiply_add(Operand::load(query + lanes), back, acc[r][n]);
        }
      }
    };
    std::int64_t d = 0;
    const auto whole = [](const Byte* p) HEADWAY_LAMBDA { return Bytes::load(p); };
    for (; d + 2 * Bytes::count <= dim; d += 2 * Bytes::count) {
      strip(d, whole);
      strip(d + Bytes::count, whole);
    }
    if (d + Bytes::count <= dim) {
      strip(d, whole);
      d += Bytes::count;
    }
    if (d < dim) {
      const auto left = static_cast<int>(dim - d);
      strip(d, [left](const Byte* p) HEADWAY_LAMBDA { return Bytes::load_first(p, left); });
    }
  }

  const DecodeTask<S>& task_;
  const DecodeBlock<S>& block_;
  const DecodeLayout<S> at_;
  const Scaling<S> scaling_;
  const ForwardArgs& head_;
};

template <class S, class Byte>
class ByteValues {
  using Vector = typename S::Vector;
  using Operand = Operands<S>;
  using Bytes = typename Operand::template Bytes<Byte>;
  static constexpr int lanes = S::lanes, tile = DecodeLayout<S>::tile, strip_vectors = 4;

 public:
  ByteValues(const DecodeTask<S>& task, const DecodeBlock<S>& block)
      : task_(task), block_(block), at_(task.at), head_(task.head), in_float_(task, block) {
    std::memset(at_.zeros, 0, static_cast<std::size_t>(head_.value_dim));
  }

  // As DecodeValues does it.
  HEADWAY_NOINLINE void add(int row_begin, int row_end, const Range& hull, const std::uint64_t* allowed,
                            const Ahead& then) {
    if (start(row_begin, row_end, hull)) {
      RowsAhead<Byte> ahead(head_.value, head_.value_dim, hull, then);
      PartSums sums;
      add_pairs(row_begin, row_end, hull, hull, allowed, sums, [&](std::int64_t key, const void* there) HEADWAY_LAMBDA {
        return LinesAhead(ahead.beside(key, summed), there);
      });
    }
    add_others(row_begin, row_end, hull, allowed);
  }

  // The same for all rows in turns: first start_turns(), then add_turn() with the hull's keys in ascending order, cut
  // at multiples of `summed` from the block's begin, then end_turns().
  void start_turns(const Range& hull) {
    turn_sums_ = {};
    some_suit_ = start(0, task_.rows, hull);
  }
  HEADWAY_NOINLINE void add_turn(const Range& hull, const Range& keys, const char* const* ahead) {
    if (some_suit_) {
      add_pairs(0, task_.rows, hull, keys, nullptr, turn_sums_,
                [&](std::int64_t, const void*) HEADWAY_LAMBDA { return ListedAhead{ahead}; });
    }
  }
  void end_turns(const Range& hull) { add_others(0, task_.rows, hull, nullptr); }

  bool output_is_finite(int r) const { return in_float_.output_is_finite(r); }

 private:
  // Weights whose products with 8-bit numbers, and sums of those, are normal numbers.
  static constexpr float least_weight = 0x1p-100f, most_weight = 0x1p100f;

  // How far the sums of a block are.
  struct PartSums {
    bool starts = true;      // nothing is in the part's sums
    bool first_part = true;  // nor in the block's
  };

  // Makes weights pairs; gives whether some row's suit. The others' are garbage.
  bool start(int row_begin, int row_end, const Range& hull) const {
    list_scales(head_.value, block_.begin, hull, at_.scales);
    bool some_suit = false;
    for (int r = row_begin; r < row_end; ++r) {
      at_.suits[r] = make_pairs(r, hull);
      some_suit |= at_.suits[r];
    }
    return some_suit;
  }

  // The rows whose weights do not suit, whose outputs are garbage so far.
  void add_others(int row_begin, int row_end, const Range& hull, const std::uint64_t* allowed) {
    for (int r = row_begin; r < row_end; ++r) {
      if (!at_.suits[r]) {
        in_float_.add(r, r + 1, hull, allowed, {});
      }
    }
  }

  // weight * scale as bf16 for the keys of the hull that the row sees, 0 for the others of its tiles; gives whether
  // all are 0 or of a size that suits.
  HEADWAY_NOINLINE bool make_pairs(int r, const Range& hull) const {
    const float* weights = at_.scores_of(r);
    auto* pairs = reinterpret_cast<bfloat16*>(at_.weight_pairs) + r * at_.score_ld;
    bool all_suit = true;
    for (std::int64_t t = block_.first_tile(hull); t < block_.end_tile(hull); ++t) {
      const std::uint64_t allowed = at_.allowed_of(r)[t];
      for (int v = 0; v < S::panel_vectors; ++v) {
        const std::int64_t at = t * tile + v * lanes;
        const Vector product = S::select(S::mask_from_bits(allowed >> (v * lanes)),
                                         S::load(weights + at) * S::load(at_.scales + at), S::zero());
        const Vector size = S::abs(product);
        // An unsuitable one is NaN, or neither 0 nor between the limits.
        const Vector reaches = S::select(S::equal(size, S::zero()), S::set(1), size);
        all_suit &= !S::any(S::not_less_equal(S::set(least_weight), reaches)) &&
                    !S::any(S::not_less_equal(reaches, S::set(most_weight)));
        S::store_first(pairs + at, lanes, product);
      }
    }
    return all_suit;
  }

  // part_outputs and outputs (+)= p V of some of the hull's keys.
  template <class RowsNext>
  HEADWAY_INLINE void add_pairs(int row_begin, int row_end, const Range& hull, const Range& some,
                                const std::uint64_t* allowed, PartSums& sums, const RowsNext& rows_next) {
    constexpr std::int64_t part_keys = summed * summed;
    for (std::int64_t part = block_.begin + (some.begin - block_.begin) / summed * summed; part < some.end;) {
      const std::int64_t whole = block_.begin + ((part - block_.begin) / part_keys + 1) * part_keys;
      const std::int64_t part_end = smaller(some.end, whole);
      for (std::int64_t key = part; key < part_end; key += summed) {
        const Range keys{larger(key, some.begin), smaller(key + summed, part_end)};
        if (!block_.reaches(keys.begin, keys.end)) {
          continue;
        }
        list_rows(key, keys, allowed);
        const auto next = rows_next(key, at_.rows_at[keys.begin - key]);
        add_keys(row_begin, row_end, key, static_cast<int>((keys.end - key + 1) / 2), sums.starts, next);
        sums.starts = false;
      }
      if (part_end == whole || part_end == hull.end) {
        for (int r = row_begin; r < row_end; ++r) {
          add_part(r, sums.starts, sums.first_part);
        }
        sums = {true, false};
      }
      part = part_end;
    }
  }

  // A few keys from `key` on, of which [keys.begin, keys.end) count; rows that are not read are zeros.
  void list_rows(std::int64_t key, const Range& keys, const std::uint64_t* allowed) const {
    for (int k = 0; keys.end - keys.begin < summed && k < summed; ++k) {
      at_.rows_at[k] = at_.zeros;
    }
    list_bytes<S, Byte>(task_, head_.value, keys.begin, keys.end - keys.begin, head_.value_dim,
                        at_.rows_at + (keys.begin - key));
    for (std::int64_t k = keys.begin - block_.begin; allowed != nullptr && k < keys.end - block_.begin; ++k) {
      if ((allowed[k / tile] >> (k % tile) & 1) == 0) {
        at_.rows_at[k + block_.begin - key] = at_.zeros;
      }
    }
  }

  // part_outputs (+)= p V for all rows and columns, of the list's first pairs of keys.
  template <class Next>
  void add_keys(int row_begin, int row_end, std::int64_t key, int pairs, bool starts, const Next& next) {
    for (std::int64_t d = 0; d < head_.value_dim; d += pair_bytes) {
      int r = row_begin;
      for (; r + 4 <= row_end; r += 4) {
        add_strip<4>(r, key, pairs, d, starts, next);
      }
      if (r + 2 <= row_end) {
        add_strip<2>(r, key, pairs, d, starts, next);
        r += 2;
      }
      if (r < row_end) {
        add_strip<1>(r, key, pairs, d, starts, next);
      }
    }
  }

  template <int NR, class Next>
  HEADWAY_NOINLINE void add_strip(int first, std::int64_t key, int pairs, std::int64_t d, bool starts,
                                  const Next& next) {
    const std::int64_t left = head_.value_dim - d;
    if (left >= pair_bytes) {
      add_pairs_of<NR>(first, key, pairs, d, starts, next, [](const Byte* p) HEADWAY_LAMBDA { return Bytes::load(p); });
    } else {
      const auto count = static_cast<int>(left);
      add_pairs_of<NR>(first, key, pairs, d, starts, next,
                       [count](const Byte* p) HEADWAY_LAMBDA { return Bytes::load_first(p, count); });
    }
  }

  template <int NR, class Next, class Load>
  HEADWAY_INLINE void add_pairs_of(int first, std::int64_t key, int pairs, std::int64_t d, bool starts,
                                   const Next& ahead, const Load& load) {
    const Bytes bytes;
    const Next next = ahead;  // in registers
    Vector acc[NR][strip_vectors];
    float* const sums = at_.part_outputs + first * at_.output_ld + d;
    HEADWAY_UNROLL
    for (int r = 0; r < NR; ++r) {
      HEADWAY_UNROLL
      for (int v = 0; v < strip_vectors; ++v) {
        acc[r][v] = starts ? S::zero() : S::load(sums + r * at_.output_ld + v * lanes);
      }
    }
    const std::uint16_t* const weights = at_.weight_pairs + first * at_.score_ld + (key - block_.begin);
    for (int pair = 0; pair < pairs; ++pair) {
      next.fetch(2 * pair, d);
      next.fetch(2 * pair + 1, d);
      typename Operand::Vector x[strip_vectors];
      bytes.convert_pairs(load(static_cast<const Byte*>(at_.rows_at[2 * pair]) + d),
                          load(static_cast<const Byte*>(at_.rows_at[2 * pair + 1]) + d), x);
      HEADWAY_UNROLL
      for (int r = 0; r < NR; ++r) {
        const auto p = Operand::broadcast(
            reinterpret_cast<const typename Operand::Scalar*>(weights + r * at_.score_ld + 2 * pair));
        HEADWAY_UNROLL
        for (int v = 0; v < strip_vectors; ++v) {
          acc[r][v] = Operand::multiply_add(p, x[v], acc[r][v]);
        }
      }
    }
    HEADWAY_UNROLL
    for (int r = 0; r < NR; ++r) {
      HEADWAY_UNROLL
      for (int v = 0; v < strip_vectors; ++v) {
        S::store(sums + r * at_.output_ld + v * lanes, acc[r][v]);
      }
    }
  }

  // Adds a part to the row's output, in the order of the columns.
  void add_part(int r, bool empty, bool first) {
    for (std::int64_t d = 0; d < at_.output_ld; d += strip_vectors * lanes) {
      Vector sums[strip_vectors];
      HEADWAY_UNROLL
      for (int v = 0; v < strip_vectors; ++v) {
        sums[v] = empty ? S::zero() : S::load(at_.part_outputs + r * at_.output_ld + d + v * lanes);
      }
      Bytes::sort(sums);
      HEADWAY_UNROLL
      for (int v = 0; v < strip_vectors; ++v) {
        float* at = at_.outputs + r * at_.output_ld + d + v * lanes;
        S::store(at, first ? sums[v] : S::load(at) + sums[v]);
      }
    }
  }

  const DecodeTask<S>& task_;
  const DecodeBlock<S>& block_;
  const DecodeLayout<S> at_;
  const ForwardArgs& head_;
  DecodeValues<S, Byte> in_float_;
  PartSums turn_sums_;
  bool some_suit_ = false;
};

}  // namespace
}  // namespace headway::cpu
