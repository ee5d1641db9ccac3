// The arguments of the decode kernel: the few query rows that share one kv head, and the cut of its keys. A chunk is
// the work of one task; inside it keys are streamed in blocks. The cut depends on the lengths of the row's own problem
// only.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/args.h"

namespace headway::cpu {

// Kv heads whose rows of a token lie side by side may take turns, a few keys of each. No result depends on it.
constexpr int most_heads_in_turn = 32, most_rows_in_turn = 32;  // rows of all heads: their scores stay in a cache

struct DecodeArgs {
  const ForwardArgs* heads = nullptr;  // the query heads that share the kv head
  std::int64_t group = 0;              // how many they are
  std::int64_t queries = 0;            // rows of each of them
  std::int64_t chunk_keys = 0;
  std::int64_t chunks = 0;
  Storage query_storage = Storage::f32;  // beside 8-bit rows; other rows have the queries' type
  void* partials = nullptr;              // what each chunk leaves of each row, for the merge
  const void* next_key = nullptr;        // the first of the unit that this thread does next; null: not known
  bool (*wanted)(const ForwardArgs& head, std::int64_t query) = nullptr;  // the rows to do now; null: all

  std::int64_t rows() const { return group * queries; }
};

}  // namespace headway::cpu
