// How a sequence's queries and keys are cut for the backward pass: blocks of queries with the keys that they reach, and
// chunks of keys that share the work evenly.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/backward_args.h"
#include "engines/cpu/kernel/ranges.h"

namespace headway::cpu {
namespace {

constexpr int query_block = 128;

// Panels of keys that are packed together, so that queries and dQ pass by once for all of them: 256 keys, twice as many
// where they are packed in pairs (fold 2), or half of that where the group's five matrices would leave the second-level
// cache.
template <class S, int fold = 1>
constexpr int most_panels = fold * 256 / (S::lanes * S::panel_vectors);

template <class S, int fold = 1>
HEADWAY_INLINE int group_panels(const BackwardArgs& args) {
  return args.head_dim + args.value_dim <= 256 ? most_panels<S, fold> : most_panels<S, fold> / 2;
}

template <class S, int fold = 1>
HEADWAY_INLINE std::int64_t group_keys(const BackwardArgs& args) {
  return static_cast<std::int64_t>(group_panels<S, fold>(args)) * S::lanes * S::panel_vectors;
}

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

HEADWAY_INLINE void find_row_block(const BackwardArgs& args, std::int64_t block, RowBlock& result) {
  result.begin = block * query_block;
  result.count = static_cast<int>(smaller(args.queries - result.begin, query_block));
  if (rows_share_range(args.ranges, result.begin, result.begin + result.count)) {
    result.hull = range_of_row(args.ranges, result.begin);
    result.core = range_of_row(args.ranges, result.begin);
    return;
  }
  result.hull = {args.ranges.keys, 0};
  result.core = {0, args.ranges.keys};
  for (std::int64_t i = result.begin; i < result.begin + result.count; ++i) {
    const Range range = range_of_row(args.ranges, i);
    if (range.begin < range.end) {
      result.hull = {smaller(result.hull.begin, range.begin), larger(result.hull.end, range.end)};
    }
    result.core = {larger(result.core.begin, range.begin), smaller(result.core.end, range.end)};
  }
}

HEADWAY_NOINLINE RowBlock row_block(const BackwardArgs& args, std::int64_t block) {
  RowBlock result;
  find_row_block(args, block, result);
  return result;
}

// The pairs whose key is before `key`, counted on every 16th row.
inline double sampled_pairs(const BackwardArgs& args, std::int64_t key) {
  double pairs = 0;
  for (std::int64_t i = 0; i < args.queries; i += 16) {
    const Range range = range_of_row(args.ranges, i);
    pairs += static_cast<double>(larger(smaller(range.end, key) - range.begin, 0));
  }
  return pairs;
}

template <class S>
constexpr std::int64_t chunk_step = most_panels<S> / 2 * S::lanes* S::panel_vectors;

template <class S>
int chunk_count(std::int64_t keys) {
  return static_cast<int>(larger(1, smaller((keys + chunk_step<S> - 1) / chunk_step<S> / 2, most_key_chunks)));
}

// Cuts the keys, at multiples of 128, into up to most_key_chunks chunks with about the same number of pairs.
template <class S>
HEADWAY_NOINLINE KeyChunks key_chunks(const BackwardArgs& args) {
  constexpr std::int64_t step = chunk_step<S>;
  const std::int64_t steps = (args.ranges.keys + step - 1) / step;
  KeyChunks chunks;
  chunks.count = chunk_count<S>(args.ranges.keys);
  chunks.begin[chunks.count] = args.ranges.keys;
  const double all = chunks.count > 1 ? sampled_pairs(args, args.ranges.keys) : 0;
  double before = 0;
  for (int c = 1; c < chunks.count; ++c) {
    std::int64_t low = chunks.begin[c - 1] / step;
    std::int64_t high = steps;
    while (low < high) {  // the first step whose middle has the share before it: its border is the nearest
      const std::int64_t middle = (low + high) / 2;
      const bool enough = sampled_pairs(args, middle * step + step / 2) * chunks.count >= all * c;
      (enough ? high : low) = enough ? middle : middle + 1;
    }
    chunks.begin[c] = smaller(low * step, args.ranges.keys);
    const double pairs = sampled_pairs(args, chunks.begin[c]);
    chunks.pairs[c - 1] = pairs - before;
    before = pairs;
  }
  chunks.pairs[chunks.count - 1] = all - before;
  return chunks;
}

}  // namespace
}  // namespace headway::cpu
