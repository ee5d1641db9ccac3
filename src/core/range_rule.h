// The rule that gives each query row its range of keys, on plain numbers: the one copy that the host, the CPU kernels
// and the CUDA kernels share. key_range.h applies it to a Problem.
#pragma once

#include <cstdint>

#include "core/host_device.h"

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
  HEADWAY_HOST_DEVICE std::int64_t count() const { return end - begin; }
};

// What decides a sequence's offset.
enum class Alignment : std::uint8_t {
  all_ends,   // the last query stands at the last key, padding included: without causal
  starts,     // query 0 at key 0: top_left
  real_ends,  // the last real query at the last valid key: bottom_right
  given,      // the rule's own offset
};

struct RangeRule {
  // Wider than any axis, and small enough that a few of them add up inside 64 bits.
  static constexpr std::int64_t unlimited = std::int64_t{1} << 61;

  Alignment alignment = Alignment::all_ends;
  std::int64_t left = unlimited;   // keys before a query's own position that it sees
  std::int64_t right = unlimited;  // and after it: 0 when causal
  std::int64_t offset = 0;
};

HEADWAY_HOST_DEVICE inline std::int64_t alignment_offset(const RangeRule& rule, const Sequence& sequence,
                                                         std::int64_t real_keys) {
  if (rule.alignment == Alignment::given) {
    return rule.offset;
  }
  if (rule.alignment == Alignment::starts) {
    return 0;
  }
  return rule.alignment == Alignment::all_ends ? sequence.key_count - sequence.query_count
                                               : real_keys - sequence.real_queries;
}

// The rule for one sequence, with its lengths: position = i + offset sees keys [position - left, position + right].
struct RowRule {
  std::int64_t keys = 0;
  std::int64_t real_queries = 0;  // rows from here on are padding
  std::int64_t offset = 0;
  std::int64_t left = RangeRule::unlimited;
  std::int64_t right = RangeRule::unlimited;
};

// The keys that row i may attend to, before spans and masks: [begin, end), begin <= end, counted inside the sequence.
// `valid_len` is the row's entry of valid_lens, or the sequence's number of keys.
HEADWAY_SHARED_INLINE KeyRange key_range(const RowRule& rule, std::int64_t i, std::int64_t valid_len) {
  if (i >= rule.real_queries) {
    return {0, 0};
  }
  const std::int64_t position = i + rule.offset;
  std::int64_t begin = position - rule.left;
  std::int64_t end = position + rule.right + 1;
  begin = begin > 0 ? begin : 0;
  end = end < rule.keys ? end : rule.keys;
  end = end < valid_len ? end : valid_len;
  return begin < end ? KeyRange{begin, end} : KeyRange{0, 0};
}

HEADWAY_SHARED_INLINE KeyRange key_range(const RangeRule& rule, const Sequence& sequence, std::int64_t i,
                                         std::int64_t valid_len) {
  return key_range(RowRule{sequence.key_count, sequence.real_queries, sequence.offset, rule.left, rule.right}, i,
                   valid_len);
}

// What two ranges have in common; empty ranges are {0, 0}.
HEADWAY_SHARED_INLINE KeyRange common_keys(const KeyRange& a, const KeyRange& b) {
  const std::int64_t begin = a.begin > b.begin ? a.begin : b.begin;
  const std::int64_t end = a.end < b.end ? a.end : b.end;
  return begin < end ? KeyRange{begin, end} : KeyRange{0, 0};
}

}  // namespace headway
