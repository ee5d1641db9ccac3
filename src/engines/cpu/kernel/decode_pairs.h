// Decode with scores by bf16 dot products, for the rows whose queries they are exact enough for (forward_pairs.h says
// which). The weighted sums of bf16 values are in float either way; those of 8-bit values are dot products too.
#pragma once

#include <new>

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

// pairs(args) for the rows that suit pairs, plain(args) for the others.
template <class Pairs, class RunPairs, class RunPlain>
HEADWAY_INLINE void split_rows(const DecodeArgs& args, const RunPairs& pairs, const RunPlain& plain) {
  std::int64_t suiting = 0;
  for (std::int64_t row = 0; row < args.rows(); ++row) {
    suiting += query_suits_pairs<Pairs>(args.heads[row / args.queries], row % args.queries) ? 1 : 0;
  }
  const bool mixed = suiting != 0 && suiting != args.rows();
  DecodeArgs some = args;
  if (suiting != 0) {
    some.wanted = mixed ? query_suits_pairs<Pairs> : nullptr;
    pairs(some);
  }
  if (suiting != args.rows()) {
    some.wanted = mixed ? query_does_not_suit_pairs<Pairs> : nullptr;
    plain(some);
  }
}

template <class Pairs, class Plain, class Row>
void run_decode_pairs(const DecodeArgs& args, std::int64_t chunk, void* scratch) {
  split_rows<Pairs>(
      args, [&](const DecodeArgs& rows) { Decode<Pairs, Row>(rows, scratch).run(chunk); },
      [&](const DecodeArgs& rows) { Decode<Plain, Row>(rows, scratch).run(chunk); });
}

// What a head that takes turns needs, its state behind its scratch.
template <class Pairs, class Row>
std::int64_t decode_turn_scratch(const DecodeArgs& args) {
  return Decode<Pairs, Row>::scratch_bytes(args) +
         static_cast<std::int64_t>((sizeof(Decode<Pairs, Row>) + 63) / 64 * 64);
}

// Heads take turns if all their rows suit pairs.
template <class Pairs, class Plain, class Row>
void run_decode_turns(const DecodeArgs* heads, int count, std::int64_t chunk, void* scratch) {
  const std::int64_t each = decode_turn_scratch<Pairs, Row>(heads[0]);
  Decode<Pairs, Row>* states[most_heads_in_turn];
  bool all_suit = true;
  for (int h = 0; h < count; ++h) {
    for (std::int64_t row = 0; row < heads[h].rows(); ++row) {
      all_suit &= query_suits_pairs<Pairs>(heads[h].heads[row / heads[h].queries], row % heads[h].queries);
    }
    char* const memory = static_cast<char*>(scratch) + h * each;
    states[h] = new (memory + Decode<Pairs, Row>::scratch_bytes(heads[h])) Decode<Pairs, Row>(heads[h], memory);
  }
  if (all_suit) {
    Decode<Pairs, Row>::run_in_turns(states, count, chunk);
    return;
  }
  for (int h = 0; h < count; ++h) {
    run_decode_pairs<Pairs, Plain, Row>(heads[h], chunk, scratch);
  }
}

template <class Pairs, class Plain>
void run_decode_weights_pairs(const DecodeArgs& args, std::int64_t chunk, void* scratch) {
  split_rows<Pairs>(
      args, [&](const DecodeArgs& rows) { Decode<Pairs, bfloat16>(rows, scratch).run_weights(chunk); },
      [&](const DecodeArgs& rows) { Decode<Plain, bfloat16>(rows, scratch).run_weights(chunk); });
}

template <class Pairs, class Plain, class Row>
std::int64_t decode_scratch_pairs(const DecodeArgs& args) {
  return larger(Decode<Pairs, Row>::scratch_bytes(args), Decode<Plain, Row>::scratch_bytes(args));
}

// Row is what rows of K and V hold: bf16, or 8-bit numbers, which bf16 holds exactly; queries are bf16 beside both.
template <class Pairs, class Plain, class Row>
DecodeKernel decode_pairs_kernel(const DecodeKernel& plain) {
  static_assert(Pairs::lanes == Plain::lanes);  // partials of both look alike
  DecodeKernel kernel = plain;
  kernel.run = run_decode_pairs<Pairs, Plain, Row>;
  kernel.run_weights = is_scaled<Row> ? nullptr : run_decode_weights_pairs<Pairs, Plain>;
  kernel.scratch_bytes = decode_scratch_pairs<Pairs, Plain, Row>;
  if constexpr (is_scaled<Row>) {
    kernel.run_in_turns = run_decode_turns<Pairs, Plain, Row>;
    kernel.turn_scratch_bytes = decode_turn_scratch<Pairs, Row>;
  }
  return kernel;
}

}  // namespace
}  // namespace headway::cpu
