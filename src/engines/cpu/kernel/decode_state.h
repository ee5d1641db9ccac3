// What a decode task holds: its rows' queries and key ranges, the block of keys at hand, and the partial softmaxes that
// chunks leave for the merge.
#pragma once

#include <cstdint>
#include <cstring>

#include "engines/cpu/kernel/decode_args.h"
#include "engines/cpu/kernel/exp2.h"
#include "engines/cpu/kernel/key_lanes.h"
#include "engines/cpu/kernel/key_sums.h"
#include "engines/cpu/kernel/operands.h"
#include "engines/cpu/kernel/pack.h"
#include "engines/cpu/kernel/query_factor.h"
#include "engines/cpu/kernel/ranges.h"
#include "engines/cpu/kernel/row_source.h"
#include "engines/cpu/kernel/scratch.h"
#include "engines/cpu/kernel/store_as.h"
#include "engines/cpu/kernel/stored_rows.h"

namespace headway::cpu {
namespace {

constexpr std::int64_t stream_keys = 2048;  // of K, then of V: memory streams well from about 1024 on
constexpr std::int64_t decode_rows = 32;  // that pass over a block together: its scores stay in the second-level cache
constexpr int summed = 16;                // terms, or sums of terms, that are added up before the next step
constexpr std::int64_t packed_keys = 64;  // copied at once where a layout cannot be read in place

// From the units of decode's scores to those of the exponential. Scores that are modified are natural, and so are those
// whose scale has no room for another factor.
HEADWAY_INLINE double decode_units(const ForwardArgs& head) {
  const bool large = !(head.scale < 0x1p1000 && head.scale > -0x1p1000);
  return head.modifiers.any || large ? log2e : 1;
}

// The softmax of some keys of a row, unnormalised: 2^(score - reference), summed, and times V; with what the sums lost.
template <class S>
struct PartialSoftmaxes {
  using Scalar = typename S::Scalar;
  using Vector = typename S::Vector;

  std::int64_t rows, ld;
  Scalar *references, *sums, *outputs, *lost_sums, *lost_outputs;
  std::int64_t bytes;

  PartialSoftmaxes(std::int64_t chunks, std::int64_t row_count, std::int64_t value_dim, void* memory)
      : rows(row_count), ld(padded<S>(value_dim)) {
    Scratch<char> scratch{static_cast<char*>(memory)};
    references = scratch.take<Scalar>(chunks * rows);
    sums = scratch.take<Scalar>(chunks * rows);
    outputs = scratch.take<Scalar>(chunks * rows * ld);
    lost_sums = scratch.take<Scalar>(chunks * rows);
    lost_outputs = scratch.take<Scalar>(chunks * rows * ld);
    bytes = scratch.used;
  }
  explicit PartialSoftmaxes(const DecodeArgs& args)
      : PartialSoftmaxes(args.chunks, args.rows(), args.heads->value_dim, args.partials) {}

  std::int64_t at(std::int64_t chunk, std::int64_t row) const { return chunk * rows + row; }

  void clear(std::int64_t which) const {
    references[which] = -static_cast<Scalar>(__builtin_inff());
    sums[which] = lost_sums[which] = 0;
    for (std::int64_t d = which * ld; d < (which + 1) * ld; d += S::lanes) {
      S::store(outputs + d, S::zero());
      S::store(lost_outputs + d, S::zero());
    }
  }

  // Adds other keys of the same row. `to_log2` turns the references' units into those of exp2.
  HEADWAY_NOINLINE void absorb(std::int64_t which, Scalar reference, Scalar sum, const Scalar* output,
                               double to_log2) const {
    const Vector units = S::set(static_cast<Scalar>(to_log2));
    const Vector old = S::set(references[which]);
    const Vector raised = raised_reference<S>(old, S::set(reference), units);
    const Vector kept = power(old, raised, units);
    const Vector added = power(S::set(reference), raised, units);
    references[which] = first_lane(raised);
    CompensatedSum<S> total{S::set(sums[which]), S::set(lost_sums[which])};
    total.multiply(kept);
    total.add(S::set(sum) * added);
    sums[which] = first_lane(total.sum);
    lost_sums[which] = first_lane(total.lost);
    for (std::int64_t d = 0; d < ld; d += S::lanes) {
      CompensatedSum<S> one{S::load(outputs + which * ld + d), S::load(lost_outputs + which * ld + d)};
      one.multiply(kept);
      one.add(S::load(output + d) * added);
      S::store(outputs + which * ld + d, one.sum);
      S::store(lost_outputs + which * ld + d, one.lost);
    }
  }

  // Leaves what was summed in `sums` and `outputs`, as numbers of their type.
  void round(std::int64_t which) const {
    sums[which] = first_lane(CompensatedSum<S>{S::set(sums[which]), S::set(lost_sums[which])}.value());
    for (std::int64_t d = which * ld; d < (which + 1) * ld; d += S::lanes) {
      S::store(outputs + d, CompensatedSum<S>{S::load(outputs + d), S::load(lost_outputs + d)}.value());
    }
  }

 private:
  // 2^(from - to), 1 between equal ones; `to` is -inf only where `from` is.
  static HEADWAY_INLINE Vector power(Vector from, Vector to, Vector units) {
    const Vector lowest = S::set(-static_cast<Scalar>(__builtin_inff()));
    const Vector subtract = S::select(S::equal(to, lowest), S::zero(), to);
    return S::select(S::equal(from, to), S::set(1), exp2<S>((from - subtract) * units));
  }
  static HEADWAY_INLINE Scalar first_lane(Vector x) {
    alignas(64) Scalar elements[S::lanes];
    S::store(elements, x);
    return elements[0];
  }
};

// In is what rows of K and V hold; queries hold the same, except beside 8-bit rows.
template <class S, class In>
class DecodeState {
 public:
  using Scalar = typename S::Scalar;
  using Vector = typename S::Vector;
  using Operand = typename Operands<S>::Scalar;
  static constexpr int lanes = S::lanes;
  static constexpr int fold = Operands<S>::fold;
  static constexpr int tile = S::lanes * S::panel_vectors;  // keys that one word of allowed pairs covers

  static std::int64_t scratch_bytes(const DecodeArgs& args) { return Layout(args, nullptr).bytes; }

 protected:
  DecodeState(const DecodeArgs& args, void* scratch)
      : args_(args), head_(args.heads[0]), to_log2_(decode_units(head_)), at_(args, scratch) {
    const double factor = head_.scale * (log2e / to_log2_);
    query_factor_ = query_power<Scalar>(factor);
    product_scaling_ = Scaling<S>(query_factor_ == 0 ? 1 : factor / query_factor_);
  }

  struct Layout {
    std::int64_t bytes, query_ld, score_ld, word_ld, output_ld;
    Operand* queries;                // [rows][D], zeros up to a whole vector
    Scalar* scores;                  // then weights: [rows][keys of the block]
    Scalar *outputs, *part_outputs;  // [rows][Dv] of the block, and of a part of it
    Scalar *references, *sums;       // of the block
    std::uint64_t* allowed;          // [rows][tiles of the block]
    std::int64_t* numbers;           // of the rows, among all that share the kv head
    Range* ranges;                   // of the rows
    std::uint64_t* reached;          // bit n: whether some row sees a key of the block's n-th few; where there are spans
    bool* forbids;                   // whether the row may not attend to some of the block's hull
    In* copy;                        // of keys or values that cannot be read in place
    float* scale_copy;               // and of their scales

    Layout(const DecodeArgs& args, void* memory) {
      const ForwardArgs& head = args.heads[0];
      const std::int64_t rows = smaller(args.rows(), decode_rows);
      const std::int64_t tiles = (smaller(args.chunk_keys, stream_keys) + tile - 1) / tile;
      Scratch<char> scratch{static_cast<char*>(memory)};
      query_ld = padded<S>(folded<S>(head.head_dim));
      score_ld = (tiles + 1) * tile;  // whole vectors of scores may be stored past the last key
      word_ld = tiles;
      output_ld = padded<S>(head.value_dim);
      queries = scratch.take<Operand>(rows * query_ld);
      scores = scratch.take<Scalar>(rows * padded<S>(score_ld));
      outputs = scratch.take<Scalar>(rows * output_ld);
      part_outputs = scratch.take<Scalar>(rows * output_ld);
      references = scratch.take<Scalar>(rows);
      sums = scratch.take<Scalar>(rows);
      allowed = scratch.take<std::uint64_t>(rows * word_ld);
      numbers = scratch.take<std::int64_t>(rows);
      ranges = scratch.take<Range>(rows);
      reached = scratch.take<std::uint64_t>(stream_keys / summed / 64);
      forbids = scratch.take<bool>(rows);
      copy = scratch.take<In>(packed_keys * larger(head.head_dim, head.value_dim));
      scale_copy = scratch.take<float>(is_scaled<In> ? packed_keys : 0);
      bytes = scratch.used;
    }
  };

  static constexpr Scalar infinity = __builtin_inff();

  // ---- Rows: those of one query head after the other ----

  const ForwardArgs& head_of(int r) const { return args_.heads[at_.numbers[r] / args_.queries]; }
  std::int64_t query_of(int r) const { return at_.numbers[r] % args_.queries; }

  // The next rows that pass over the keys together, from number `next` on; gives the first number that is left.
  std::int64_t start_rows(std::int64_t next) {
    rows_ = 0;
    for (; rows_ < decode_rows && next < args_.rows(); ++next) {
      at_.numbers[rows_] = next;
      if (args_.wanted == nullptr || args_.wanted(head_of(rows_), query_of(rows_))) {
        ++rows_;
      }
    }
    hull_ = {0, 0};
    for (int r = 0; r < rows_; ++r) {
      pack_query(head_of(r).query, query_of(r), at_.queries + r * at_.query_ld);
      at_.ranges[r] = range_of_row(head_of(r).ranges, query_of(r));
      const Range& range = at_.ranges[r];
      if (range.begin < range.end) {
        hull_ =
            hull_.begin < hull_.end ? Range{smaller(hull_.begin, range.begin), larger(hull_.end, range.end)} : range;
      }
    }
    return next;
  }

  void pack_query(const Matrix& query, std::int64_t i, Operand* packed) const {
    if constexpr (is_scaled<In>) {
      with_storage(args_.query_storage, [&]<class Query>(Query*) { pack_scalars<Query>(query, i, packed); });
    } else if constexpr (fold == 1) {
      pack_scalars<In>(query, i, packed);
    } else {
      const In* row = static_cast<const In*>(query.data) + i * query.row_stride;
      auto* halves = reinterpret_cast<In*>(packed);
      for (std::int64_t d = 0; d < fold * at_.query_ld; ++d) {
        halves[d] = d < head_.head_dim ? row[d * query.column_stride] : In{};
      }
      for (std::int64_t d = 0; d < at_.query_ld; d += lanes) {
        Operands<S>::store(packed + d, Operands<S>::times_power(Operands<S>::load(packed + d), query_factor_));
      }
    }
  }

  template <class Query>
  void pack_scalars(const Matrix& query, std::int64_t i, Scalar* packed) const {
    const Query* row = static_cast<const Query*>(query.data) + i * query.row_stride;
    const auto factor = static_cast<Scalar>(query_factor_);
    for (std::int64_t d = 0; d < head_.head_dim; d += lanes) {
      const Vector x = load_row<S>(row, query.column_stride, d, at_most(head_.head_dim - d, lanes));
      S::store(packed + d, scales_far_down(factor) ? scaled_down<S>(x, factor) : x * S::set(factor));
    }
  }

  // ---- The block of keys at hand ----

  // How many of `count` keys from `key` on go together: those of one run, which are read in place, unless runs are so
  // short that gathering several costs less than lanes without a key.
  static HEADWAY_INLINE std::int64_t keys_together(const RowSource& source, std::int64_t key, std::int64_t count) {
    return source.page_size >= lanes ? run_length(source, key, count) : count;
  }

  // Rows [begin, begin + count) of K or V, in place where they are one run with consecutive d. With a set of allowed
  // pairs the others' rows become 0.
  HEADWAY_INLINE StoredRows<In> stored_rows(const RowSource& source, std::int64_t begin, std::int64_t count,
                                            std::int64_t dim, const std::uint64_t* allowed = nullptr) const {
    if (source.rows.column_stride == 1 && allowed == nullptr && in_one_run(source, begin, count)) {
      return rows_in_place<In>(source, begin);
    }
    return copied_rows(source, begin, count, dim, allowed);
  }

  HEADWAY_NOINLINE StoredRows<In> copied_rows(const RowSource& source, std::int64_t begin, std::int64_t count,
                                              std::int64_t dim, const std::uint64_t* allowed) const {
    const auto hidden = [&](std::int64_t j) {
      const std::int64_t key = begin + j - block_.begin;
      return allowed != nullptr && (allowed[key / tile] >> (key % tile) & 1) == 0;
    };
    each_run<In>(source, begin, count, [&](const Matrix& run, std::int64_t done, std::int64_t rows) {
      const In* first = static_cast<const In*>(run.data);
      for (std::int64_t r = 0; r < rows; ++r) {
        const bool zero = hidden(done + r);
        In* copy = at_.copy + (done + r) * dim;
        if (run.column_stride == 1 && !zero) {
          std::memcpy(copy, first + r * run.row_stride, static_cast<std::size_t>(dim) * sizeof(In));
        } else {
          for (std::int64_t d = 0; d < dim; ++d) {
            copy[d] = zero ? In{} : first[r * run.row_stride + d * run.column_stride];
          }
        }
        if constexpr (is_scaled<In>) {
          at_.scale_copy[done + r] = zero ? 0 : scale_of(source, begin + done + r);
        }
      }
    });
    if constexpr (is_scaled<In>) {
      return {at_.copy, dim, at_.scale_copy, 1};
    } else {
      return {at_.copy, dim};
    }
  }

  // The block's keys from the first to the last that a row may attend to; with spans also which few of them some row
  // sees.
  Range enter_block() {
    const Range hull{larger(hull_.begin, block_.begin), smaller(hull_.end, block_.end)};
    if (head_.ranges.spans.data == nullptr || hull.begin >= hull.end) {
      return hull;
    }
    return find_reached(hull) ? hull : Range{0, 0};
  }

  // Whether some row sees any of the hull.
  HEADWAY_NOINLINE bool find_reached(const Range& hull) {
    constexpr std::int64_t words = stream_keys / summed / 64;
    for (std::int64_t at = 0; at < words; ++at) {
      at_.reached[at] = 0;
    }
    for (int r = 0; r < rows_; ++r) {
      const Range inside{larger(at_.ranges[r].begin, hull.begin), smaller(at_.ranges[r].end, hull.end)};
      if (inside.begin < inside.end) {
        RowSpans(head_of(r).ranges.spans, query_of(r)).for_parts(inside, [&](const Range& part) HEADWAY_LAMBDA {
          set_bits(at_.reached, (part.begin - block_.begin) / summed, (part.end - 1 - block_.begin) / summed + 1);
        });
      }
    }
    return any_bit(at_.reached, 0, words * 64);
  }

  // Whether some row may see one of these keys of the block.
  HEADWAY_INLINE bool reaches(std::int64_t begin, std::int64_t end) const {
    return head_.ranges.spans.data == nullptr ||
           any_bit(at_.reached, (begin - block_.begin) / summed, (end - 1 - block_.begin) / summed + 1);
  }

  Scalar* scores_of(int r) const { return at_.scores + r * at_.score_ld; }
  std::uint64_t* allowed_of(int r) const { return at_.allowed + r * at_.word_ld; }

  const DecodeArgs& args_;
  const ForwardArgs& head_;     // the first; keys, values, ranges but for spans and kinds of modifiers are those of all
  double to_log2_;              // from the units of the scores to those of the exponential
  double query_factor_;         // what queries are multiplied by: a power of two
  Scaling<S> product_scaling_;  // makes scores of products
  Layout at_;
  int rows_ = 0;
  Range hull_{0, 0};   // the keys that some row may attend to
  Range block_{0, 0};  // begins at a multiple of stream_keys after the chunk's begin
};

}  // namespace
}  // namespace headway::cpu
