// How a sequence's queries and keys are cut for the backward pass: blocks of queries with the keys that they reach, and
// chunks of keys that share the work evenly.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/backward_args.h"
#include "engines/cpu/kernel/ranges.h"

namespace headway::cpu {
namespace {

constexpr int query_block = 128;

struct RowBlock {
  std::int64_t begin;
  int count;
  Range hull;  // holds the ranges of all its rows
  Range core;  // is held by the ranges of all its rows
};

HEADWAY_INLINE bool overlap(const Range& a, const Range& b) { return larger(a.begin, b.begin) < smaller(a.end, b.end); }

HEADWAY_INLINE std::int64_t block_count(const BackwardArgs& args) {
  return (args.queries + query_block - 1) / query_block;
}

HEADWAY_NOINLINE RowBlock row_block(const BackwardArgs& args, std::int64_t block) {
  RowBlock result{block * query_block, static_cast<int>(smaller(args.queries - block * query_block, query_block)),
                  {args.ranges.keys, 0}, {0, args.ranges.keys}};
  for (std::int64_t i = result.begin; i < result.begin + result.count; ++i) {
    const Range range = range_of_row(args.ranges, i);
    if (range.begin < range.end) {
      result.hull = {smaller(result.hull.begin, range.begin), larger(result.hull.end, range.end)};
    }
    result.core = {larger(result.core.begin, range.begin), smaller(result.core.end, range.end)};
  }
  return result;
}

// The pairs whose key is before `key`, counted on one row of each `step`.
inline double sampled_pairs(const BackwardArgs& args, std::int64_t key, std::int64_t step) {
  double pairs = 0;
  for (std::int64_t i = 0; i < args.queries; i += step) {
    const Range range = range_of_row(args.ranges, i);
    pairs += static_cast<double>(larger(smaller(range.end, key) - range.begin, 0));
  }
  return pairs;
}

// Cuts the keys, at multiples of `group_keys`, into up to most_key_chunks chunks with about the same number of pairs.
inline void key_chunks(BackwardArgs& args, std::int64_t group_keys) {
  constexpr std::int64_t least_groups = 2;
  constexpr std::int64_t step = 16;
  const std::int64_t groups = (args.ranges.keys + group_keys - 1) / group_keys;
  args.chunks = static_cast<int>(larger(1, smaller(groups / least_groups, most_key_chunks)));
  args.chunk_begin[0] = 0;
  args.chunk_begin[args.chunks] = args.ranges.keys;
  const double all = args.chunks > 1 ? sampled_pairs(args, args.ranges.keys, step) : 0;
  for (int c = 1; c < args.chunks; ++c) {
    const double share = all * c / args.chunks;
    std::int64_t low = args.chunk_begin[c - 1] / group_keys;
    std::int64_t high = groups;
    while (low < high) {  // the first group whose middle has the share before it: the border nearest to it
      const std::int64_t middle = (low + high) / 2;
      const bool enough = sampled_pairs(args, middle * group_keys + group_keys / 2, step) >= share;
      (enough ? high : low) = enough ? middle : middle + 1;
    }
    args.chunk_begin[c] = smaller(low * group_keys, args.ranges.keys);
  }
}

}  // namespace
}  // namespace headway::cpu
