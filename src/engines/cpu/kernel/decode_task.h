// The state of a decode task: its arguments, the units of its scores, the rows that share its keys, with their queries
// and key ranges, and its scratch layout.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/decode_args.h"
#include "engines/cpu/kernel/decode_partials.h"
#include "engines/cpu/kernel/operands.h"
#include "engines/cpu/kernel/pack.h"
#include "engines/cpu/kernel/query_factor.h"
#include "engines/cpu/kernel/ranges.h"
#include "engines/cpu/kernel/score_factor.h"
#include "engines/cpu/kernel/scratch.h"
#include "engines/cpu/kernel/store_as.h"
#include "engines/cpu/kernel/stored_rows.h"

namespace headway::cpu {
namespace {

constexpr std::int64_t stream_keys = 2048;  // of K, then of V: memory streams well from about 1024 on
constexpr std::int64_t decode_rows = 32;  // that pass over a block together: its scores stay in the second-level cache
constexpr int summed = 16;                // terms, or sums of terms, that are added up before the next step
constexpr std::int64_t packed_keys = 64;  // copied at once where a layout cannot be read in place

// What rows of K and V hold: 8-bit rows have scales.
struct StoredType {
  std::int64_t size;
  bool scaled;
};
template <class In>
constexpr StoredType stored_type{sizeof(In), is_scaled<In>};

// Whether 8-bit rows become pairs, which decode_bytes.h multiplies.
template <class S>
constexpr bool pairs_bytes = Operands<S>::fold == 2;
constexpr std::int64_t pair_bytes = 64;  // of a row that are converted at once

// Constant while a task runs: parts whose inner loops read it hold a copy, which costs one load less than a reference.
template <class S>
struct DecodeLayout {
  using Scalar = typename S::Scalar;
  using Operand = typename Operands<S>::Scalar;
  static constexpr int tile = S::lanes * S::panel_vectors;  // keys that one word of allowed pairs covers

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
  void* copy;                      // of keys or values that cannot be read in place
  float* scale_copy;               // and of their scales
  // Where bytes become pairs:
  const void** rows_at;         // where the rows of a few keys lie
  char* zeros;                  // a row
  std::uint16_t* weight_pairs;  // [rows][keys of the block]: weights times scales, as bf16
  float* scales;                // of the block's rows
  bool* suits;                  // whether the row's weights are that precise

  DecodeLayout(const DecodeArgs& args, const StoredType& stored, void* memory) {
    const ForwardArgs& head = args.heads[0];
    const std::int64_t rows = smaller(args.rows(), decode_rows);
    const std::int64_t tiles = (smaller(args.chunk_keys, stream_keys) + tile - 1) / tile;
    Scratch<char> scratch{static_cast<char*>(memory)};
    const bool bytes_in_pairs = stored.scaled && pairs_bytes<S>;
    const auto in_bytes = [&](std::int64_t dim) {
      return bytes_in_pairs ? (dim + pair_bytes - 1) / pair_bytes * pair_bytes : dim;
    };
    query_ld = padded<S>(folded<S>(in_bytes(head.head_dim)));
    score_ld = (tiles + 1) * tile;  // whole vectors of scores may be stored past the last key
    word_ld = tiles;
    output_ld = padded<S>(in_bytes(head.value_dim));
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
    copy = scratch.take<char>(packed_keys * larger(head.head_dim, head.value_dim) * stored.size);
    scale_copy = scratch.take<float>(stored.scaled ? packed_keys : 0);
    rows_at = scratch.take<const void*>(bytes_in_pairs ? summed : 0);
    zeros = scratch.take<char>(bytes_in_pairs ? larger(in_bytes(head.head_dim), in_bytes(head.value_dim)) : 0);
    weight_pairs = scratch.take<std::uint16_t>(bytes_in_pairs ? rows * score_ld : 0);
    scales = scratch.take<float>(bytes_in_pairs ? score_ld : 0);
    suits = scratch.take<bool>(bytes_in_pairs ? rows : 0);
    bytes = scratch.used;
  }

  // Of row r, from the block's first key on.
  Scalar* scores_of(int r) const { return scores + r * score_ld; }
  std::uint64_t* allowed_of(int r) const { return allowed + r * word_ld; }
};

template <class S>
struct DecodeTask {
  using Scalar = typename S::Scalar;
  using Vector = typename S::Vector;
  using Operand = typename Operands<S>::Scalar;
  static constexpr int lanes = S::lanes, fold = Operands<S>::fold;

  DecodeTask(const DecodeArgs& arguments, const StoredType& stored, void* scratch)
      : args(arguments), head(args.heads[0]), to_log2(decode_units(head)), at(args, stored, scratch) {
    const double factor = head.scale * (log2e / to_log2);
    // Beside bytes, which have their scales apart, sums of products must stay normal numbers.
    query_factor = stored.scaled && pairs_bytes<S> ? 1 : query_power<Scalar>(factor);
    product_scaling = Scaling<S>(query_factor == 0 ? 1 : factor / query_factor);
  }

  const DecodeArgs& args;
  const ForwardArgs& head;     // the first; keys, values, ranges but for spans and kinds of modifiers are those of all
  double to_log2;              // from the units of the scores to those of the exponential
  double query_factor;         // what queries are multiplied by: a power of two
  Scaling<S> product_scaling;  // makes scores of products
  DecodeLayout<S> at;
  int rows = 0;      // that pass over the keys together
  Range hull{0, 0};  // the keys that some of them may attend to

  // ---- Rows: those of one query head after the other ----

  const ForwardArgs& head_of(int r) const { return args.heads[at.numbers[r] / args.queries]; }
  std::int64_t query_of(int r) const { return at.numbers[r] % args.queries; }

  // The next rows that pass over the keys together, from number `next` on; gives the first number that is left.
  template <class In>
  std::int64_t start_rows(std::int64_t next) {
    rows = 0;
    for (; rows < decode_rows && next < args.rows(); ++next) {
      at.numbers[rows] = next;
      if (args.wanted == nullptr || args.wanted(head_of(rows), query_of(rows))) {
        ++rows;
      }
    }
    hull = {0, 0};
    for (int r = 0; r < rows; ++r) {
      pack_query<In>(head_of(r).query, query_of(r), at.queries + r * at.query_ld);
      at.ranges[r] = range_of_row(head_of(r).ranges, query_of(r));
      const Range& range = at.ranges[r];
      if (range.begin < range.end) {
        hull = hull.begin < hull.end ? Range{smaller(hull.begin, range.begin), larger(hull.end, range.end)} : range;
      }
    }
    return next;
  }

 private:
  // In is what rows of K and V hold; queries hold the same, except beside 8-bit rows.
  template <class In>
  void pack_query(const Matrix& query, std::int64_t i, Operand* packed) const {
    if constexpr (is_scaled<In> && pairs_bytes<S>) {
      pack_for_bytes<In>(query, i, reinterpret_cast<bfloat16*>(packed));
    } else if constexpr (is_scaled<In>) {
      with_storage(args.query_storage, [&]<class Query>(Query*) { pack_scalars<Query>(query, i, packed); });
    } else if constexpr (fold == 1) {
      pack_scalars<In>(query, i, packed);
    } else {
      const In* row = static_cast<const In*>(query.data) + i * query.row_stride;
      auto* halves = reinterpret_cast<In*>(packed);
      for (std::int64_t d = 0; d < fold * at.query_ld; ++d) {
        halves[d] = d < head.head_dim ? row[d * query.column_stride] : In{};
      }
      for (std::int64_t d = 0; d < at.query_ld; d += lanes) {
        Operands<S>::store(packed + d, Operands<S>::times_power(Operands<S>::load(packed + d), query_factor));
      }
    }
  }

  // A bf16 query in the order that bytes are converted to.
  template <class Byte>
  void pack_for_bytes(const Matrix& query, std::int64_t i, bfloat16* packed) const {
    using Bytes = typename Operands<S>::template Bytes<Byte>;
    const auto* row = static_cast<const bfloat16*>(query.data) + i * query.row_stride;
    const auto element = [&](std::int64_t d) { return d < head.head_dim ? row[d * query.column_stride] : bfloat16{}; };
    constexpr int half = pair_bytes / 2;
    for (std::int64_t d = 0; d < fold * at.query_ld; d += pair_bytes) {
      for (int n = 0; n < half; ++n) {
        packed[d + n] = element(d + Bytes::place(n));
        packed[d + half + n] = element(d + Bytes::place(n) + 8);
      }
    }
  }

  template <class Query>
  void pack_scalars(const Matrix& query, std::int64_t i, Scalar* packed) const {
    const Query* row = static_cast<const Query*>(query.data) + i * query.row_stride;
    const auto factor = static_cast<Scalar>(query_factor);
    for (std::int64_t d = 0; d < head.head_dim; d += lanes) {
      const Vector x = load_row<S>(row, query.column_stride, d, at_most(head.head_dim - d, lanes));
      S::store(packed + d, scales_far_down(factor) ? scaled_down<S>(x, factor) : x * S::set(factor));
    }
  }
};

}  // namespace
}  // namespace headway::cpu
