// Causal, window, valid_lens, query_lens and packed sequences all come down to one range of keys per query row; spans.h
// has the parts of it that spans leave.
#pragma once

#include <cstdint>

#include "core/problem.h"
#include "core/range_rule.h"
#include "core/shown.h"

namespace headway {

// What a Problem's options say about ranges, for every sequence alike.
HEADWAY_SHOWN RangeRule range_rule(const Problem& problem);

// Lengths that lie on a device are not read: the sequence then has the longest that they allow.
Sequence sequence(const Problem& problem, std::int64_t batch_index);

// The keys that row i may attend to, before spans and masks: [begin, end), begin <= end, counted inside the sequence.
KeyRange key_range(const Problem& problem, const Sequence& sequence, std::int64_t batch_index, std::int64_t i);

// The (query, key) pairs inside all key ranges and spans, over all heads.
double visited_pairs(const Problem& problem);

// The offset of element (b, h, row, 0) of a [B,H,S,...] view.
template <class View>
std::int64_t row_offset(const View& view, std::int64_t b, std::int64_t h, std::int64_t row) {
  return b * view.stride(0) + h * view.stride(1) + row * view.stride(2);
}

}  // namespace headway
