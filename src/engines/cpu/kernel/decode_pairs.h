// Decode with scores by bf16 dot products, for the rows whose queries they are exact enough for (forward_pairs.h says
// which). The weighted sums of bf16 values are in float either way; those of 8-bit values are dot products too.
#pragma once

#include "engines/cpu/kernel/decode.h"
#include "engines/cpu/kernel/decode_finish.h"
#include "engines/cpu/kernel/forward_pairs.h"
#include "engines/cpu/kernels.h"

namespace headway::cpu {
namespace {

template <class Pairs>
HEADWAY_NOINLINE bool query_suits_pairs(const ForwardArgs& head, std::int64_t query) {
  return query >= head.ranges.real_queries || rows_that_suit_pairs<Pairs>(head, query, query + 1) != 0;
}
template <class Pairs>
bool query_does_not_suit_pairs(const ForwardArgs& head, std::int64_t query) {
  return !query_suits_pairs<Pairs>(head, query);
}

// What the rows of a head that suit pairs are asked for, and the others: `wanted` where only some of them do.
template <class Pairs>
struct SplitRows {
  bool any_pairs, any_plain;
  DecodeArgs pairs, plain;

  explicit SplitRows(const DecodeArgs& args) : pairs(args), plain(args) {
    std::int64_t suiting = 0;
    for (std::int64_t row = 0; row < args.rows(); ++row) {
      suiting += query_suits_pairs<Pairs>(args.heads[row / args.queries], row % args.queries) ? 1 : 0;
    }
    any_pairs = suiting != 0;
    any_plain = suiting != args.rows();
    if (any_pairs && any_plain) {
      pairs.wanted = query_suits_pairs<Pairs>;
      plain.wanted = query_does_not_suit_pairs<Pairs>;
    }
  }
};

template <class Pairs, class Plain, class Row>
void run_decode_pairs(const DecodeArgs* heads, int count, std::int64_t chunk, void* scratch) {
  DecodeArgs pairs[most_heads_together], plain[most_heads_together];
  int pairs_count = 0, plain_count = 0;
  for (int n = 0; n < count; ++n) {
    const SplitRows<Pairs> rows(heads[n]);
    if (rows.any_pairs) {
      pairs[pairs_count++] = rows.pairs;
    }
    if (rows.any_plain) {
      plain[plain_count++] = rows.plain;
    }
  }
  if (pairs_count != 0) {
    decode_heads<Pairs, Row>(pairs, pairs_count, chunk, scratch);
  }
  if (plain_count != 0) {
    decode_heads<Plain, Row>(plain, plain_count, chunk, scratch);
  }
}

template <class Pairs, class Plain>
void run_decode_weights_pairs(const DecodeArgs& args, std::int64_t chunk, void* scratch) {
  const SplitRows<Pairs> rows(args);
  if (rows.any_pairs) {
    Decode<Pairs, bfloat16>(rows.pairs, scratch).run_weights(chunk);
  }
  if (rows.any_plain) {
    Decode<Plain, bfloat16>(rows.plain, scratch).run_weights(chunk);
  }
}

template <class Pairs, class Plain, class Row>
std::int64_t decode_scratch_pairs(const DecodeArgs& args, int heads) {
  return larger(decode_scratch_of<Pairs, Row>(args, heads), decode_scratch_of<Plain, Row>(args, heads));
}

// Row is what rows of K and V hold: bf16, or 8-bit numbers, which bf16 holds exactly; queries are bf16 beside both.
template <class Pairs, class Plain, class Row>
DecodeKernel decode_pairs_kernel(const DecodeKernel& plain) {
  static_assert(Pairs::lanes == Plain::lanes);  // partials of both look alike
  DecodeKernel kernel = plain;
  kernel.run = run_decode_pairs<Pairs, Plain, Row>;
  kernel.run_weights = is_scaled<Row> ? nullptr : run_decode_weights_pairs<Pairs, Plain>;
  kernel.scratch_bytes = decode_scratch_pairs<Pairs, Plain, Row>;
  return kernel;
}

}  // namespace
}  // namespace headway::cpu
