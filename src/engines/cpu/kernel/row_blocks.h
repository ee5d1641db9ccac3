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
  Range core;  // is held by the ranges of all its rows, without holes
};

// What the rows of a block see where there are spans: a bit for each panel of keys, counted from the first key.
struct BlockPanels {
  std::uint64_t* reached = nullptr;  // null: no spans, the block's ranges say all
  std::uint64_t* whole = nullptr;    // that every row sees as a whole

  static std::int64_t words(const RangeRule& rule, std::int64_t width) { return rule.keys / (width * 64) + 1; }
};

HEADWAY_INLINE std::int64_t block_count(const BackwardArgs& args) {
  return (args.queries + query_block - 1) / query_block;
}

// A block of a head's rows.
HEADWAY_INLINE void find_row_block(const BackwardArgs& args, const RangeRule& rule, std::int64_t block,
                                   RowBlock& result) {
  result.begin = block * query_block;
  result.count = static_cast<int>(smaller(args.queries - result.begin, query_block));
  if (rows_share_range(rule, result.begin, result.begin + result.count)) {
    result.hull = range_of_row(rule, result.begin);
    result.core = range_of_row(rule, result.begin);
    return;
  }
  result.hull = {rule.keys, 0};
  result.core = {0, rule.keys};
  for (std::int64_t i = result.begin; i < result.begin + result.count; ++i) {
    const Range range = range_of_row(rule, i);
    if (range.begin < range.end) {
      result.hull = {smaller(result.hull.begin, range.begin), larger(result.hull.end, range.end)};
    }
    const Range whole = is_whole(rule, range, i) ? range : Range{0, 0};
    result.core = {larger(result.core.begin, whole.begin), smaller(result.core.end, whole.end)};
  }
}

HEADWAY_NOINLINE RowBlock row_block(const BackwardArgs& args, const RangeRule& rule, std::int64_t block) {
  RowBlock result;
  find_row_block(args, rule, block, result);
  return result;
}

// Whether some row of a block sees one of these keys.
HEADWAY_NOINLINE bool block_sees_any(const RangeRule& rule, const RowBlock& block, const Range& keys) {
  bool any = overlap(block.hull, keys);
  if (rule.spans.data == nullptr || !any) {
    return any;
  }
  any = false;
  for (std::int64_t i = block.begin; !any && i < block.begin + block.count; ++i) {
    any = sees_any(rule, range_of_row(rule, i), i, keys);
  }
  return any;
}

// Fills in what the rows of a block see; `spare` has room for as many words.
HEADWAY_NOINLINE void find_block_panels(const RangeRule& rule, const RowBlock& block, std::int64_t width,
                                        const BlockPanels& found, std::uint64_t* spare) {
  const std::int64_t words = BlockPanels::words(rule, width);
  for (std::int64_t at = 0; at < words; ++at) {
    found.reached[at] = 0;
    found.whole[at] = ~std::uint64_t{0};
  }
  Range previous{-1, -1};
  for (std::int64_t i = block.begin; i < block.begin + block.count; ++i) {
    const RowSpans spans(rule.spans, i);
    const Range range = unspanned_range(rule, i);
    const bool repeats = i > block.begin && spans.first == RowSpans(rule.spans, i - 1).first &&
                         range.begin == previous.begin && range.end == previous.end;
    previous = range;
    if (repeats) {
      continue;
    }
    for (std::int64_t at = 0; at < words; ++at) {
      spare[at] = 0;
    }
    spans.for_parts(range, [&](const Range& part) HEADWAY_LAMBDA {
      set_bits(found.reached, part.begin / width, (part.end - 1) / width + 1);
      // The last panel may have fewer keys than the others.
      const std::int64_t end = part.end == rule.keys ? (part.end + width - 1) / width : part.end / width;
      set_bits(spare, (part.begin + width - 1) / width, end);
    });
    for (std::int64_t at = 0; at < words; ++at) {
      found.whole[at] &= spare[at];
    }
  }
}

// The pairs whose key is before `key`, estimated from every 16th row.
inline double sampled_pairs(const BackwardArgs& args, std::int64_t key) {
  constexpr std::int64_t step = 16;
  double pairs = 0;
  for (std::int64_t i = 0; i < args.queries; i += step) {
    const Range range = unspanned_range(args.ranges, i);
    const Range before{range.begin, larger(smaller(range.end, key), range.begin)};
    if (args.ranges.spans.data == nullptr) {
      pairs += static_cast<double>(before.end - before.begin);
    } else {
      RowSpans(args.ranges.spans, i).for_parts(before, [&](const Range& part) HEADWAY_LAMBDA {
        pairs += static_cast<double>(part.end - part.begin);
      });
    }
  }
  return step * pairs;
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
