// Causal, window, valid_lens, query_lens and packed sequences all come down to one range of keys per query row.
#pragma once

#include <cstdint>

#include "core/problem.h"

namespace headway {

// One batch item, or one packed sequence: where its rows lie and how its queries align with its keys.
struct Sequence {
  std::int64_t query_begin = 0;  // first row on the S axis: 0 unless packed
  std::int64_t query_count = 0;
  std::int64_t key_begin = 0;
  std::int64_t key_count = 0;
  std::int64_t real_queries = 0;  // rows from here on are padding
  std::int64_t offset = 0;        // query i stands at key position i + offset
};

struct KeyRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t count() const { return end - begin; }
};

Sequence sequence(const Problem& problem, std::int64_t batch_index);

// The keys that row i may attend to, before masks: [begin, end), begin <= end, counted inside the sequence.
KeyRange key_range(const Problem& problem, const Sequence& sequence, std::int64_t batch_index, std::int64_t i);

// The (query, key) pairs inside all key ranges, over all heads.
double visited_pairs(const Problem& problem);

// The offset of element (b, h, row, 0) of a [B,H,S,...] view.
template <class View>
std::int64_t row_offset(const View& view, std::int64_t b, std::int64_t h, std::int64_t row) {
  return b * view.stride(0) + h * view.stride(1) + row * view.stride(2);
}

}  // namespace headway
