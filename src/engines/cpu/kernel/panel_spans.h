// The keys of a panel of rows whose spans leave holes: what some row sees, in tiles of 64 keys, so that a tile without
// a key of any row costs a bit; and what every row sees, exactly, which needs no mask.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/ranges.h"

namespace headway::cpu {
namespace {

constexpr std::int64_t span_tile = 64;    // keys of a bit
constexpr std::int64_t least_whole = 32;  // keys that every row sees in a row, to be worth a piece of their own

struct PanelSpans {
  std::uint64_t* reached;  // bit t: whether some row sees a key of tile t
  Range* whole;            // what every row sees: ascending, apart, of at least least_whole keys
  std::int64_t whole_count;

  static std::int64_t words(const RangeRule& rule) { return rule.keys / (span_tile * 64) + 1; }
  // Parts have gaps between them, and so do intersections of them.
  static std::int64_t most_whole(const RangeRule& rule, std::int64_t rows) {
    return smaller(rule.keys / (least_whole + 1) + 1, rows * rule.spans.count);
  }

  // Whether some row sees a key of these keys' tiles.
  bool reaches_any(const Range& keys) const {
    return any_bit(reached, keys.begin / span_tile, (keys.end + span_tile - 1) / span_tile);
  }
  // The first of `whole` that ends after the key.
  std::int64_t first_whole(std::int64_t key) const {
    std::int64_t low = 0, high = whole_count;
    while (low < high) {
      const std::int64_t middle = (low + high) / 2;
      (whole[middle].end <= key ? low : high) = whole[middle].end <= key ? middle + 1 : middle;
    }
    return low;
  }
};

// body(piece) for what every row sees of a block of keys.
template <class Body>
HEADWAY_INLINE void for_whole_pieces(const PanelSpans& spans, const Range& block, const Body& body) {
  if (!spans.reaches_any(block)) {
    return;
  }
  for (std::int64_t n = spans.first_whole(block.begin); n < spans.whole_count; ++n) {
    if (spans.whole[n].begin >= block.end) {
      return;
    }
    body(Range{larger(spans.whole[n].begin, block.begin), smaller(spans.whole[n].end, block.end)});
  }
}

// body(piece) for the other keys of a block, in parts of one tile each; tiles that no row reaches are left out.
template <class Body>
HEADWAY_INLINE void for_partial_pieces(const PanelSpans& spans, const Range& block, const Body& body) {
  if (!spans.reaches_any(block)) {
    return;
  }
  std::int64_t n = spans.first_whole(block.begin);
  for (std::int64_t key = block.begin; key < block.end;) {
    if (n < spans.whole_count && spans.whole[n].begin <= key) {
      key = spans.whole[n++].end;
      continue;
    }
    std::int64_t end = smaller((key / span_tile + 1) * span_tile, block.end);
    end = n < spans.whole_count ? smaller(end, spans.whole[n].begin) : end;
    if (spans.reaches_any({key, end})) {
      body(Range{key, end});
    }
    key = end;
  }
}

struct PanelSearch {
  bool holes = false;    // whether some row's range has one
  bool outside = false;  // whether every row sees a key outside of `whole`
};

// Finds both for rows [row, row + rows), and the range that holds all keys of each. Pieces of `whole` start and end at
// multiples of key_step; `spare` has room for as many.
HEADWAY_NOINLINE PanelSearch find_panel_spans(const RangeRule& rule, std::int64_t row, int rows, std::int64_t key_step,
                                              PanelSpans& found, Range* ranges, Range* spare) {
  for (std::int64_t at = 0; at < PanelSpans::words(rule); ++at) {
    found.reached[at] = 0;
  }
  PanelSearch result;
  std::int64_t fewest_keys = rule.keys;
  Range* whole = found.whole;
  std::int64_t count = 0;
  std::int64_t previous_entry = -1;
  Range previous{-1, -1};
  for (int r = 0; r < rows; ++r) {
    const RowSpans spans(rule.spans, row + r);
    const Range range = unspanned_range(rule, row + r);
    if (r > 0 && spans.first == previous_entry && range.begin == previous.begin && range.end == previous.end) {
      ranges[r] = ranges[r - 1];
      continue;
    }
    previous_entry = spans.first;
    previous = range;
    Range hull{0, 0};
    std::int64_t keys = 0, kept = 0, from = 0;
    const auto keep = [&](const Range& part) HEADWAY_LAMBDA {
      if (part.end - part.begin >= least_whole) {
        spare[kept++] = part;
      }
    };
    spans.for_parts(range, [&](const Range& part) HEADWAY_LAMBDA {
      hull = {keys == 0 ? part.begin : hull.begin, part.end};
      keys += part.end - part.begin;
      set_bits(found.reached, part.begin / span_tile, (part.end - 1) / span_tile + 1);
      if (r == 0) {
        keep(part);
        return;
      }
      while (from < count && whole[from].end <= part.begin) {
        ++from;
      }
      for (std::int64_t n = from; n < count && whole[n].begin < part.end; ++n) {
        keep({larger(whole[n].begin, part.begin), smaller(whole[n].end, part.end)});
      }
    });
    ranges[r] = hull;
    result.holes |= keys != hull.end - hull.begin;
    fewest_keys = smaller(fewest_keys, keys);
    count = kept;
    Range* const kept_parts = spare;
    spare = whole;
    whole = kept_parts;
  }
  std::int64_t whole_keys = 0;
  found.whole_count = 0;
  for (std::int64_t n = 0; n < count; ++n) {
    const Range piece{(whole[n].begin + key_step - 1) / key_step * key_step, whole[n].end / key_step * key_step};
    if (piece.begin < piece.end) {
      found.whole[found.whole_count++] = piece;
      whole_keys += piece.end - piece.begin;
    }
  }
  result.outside = fewest_keys > whole_keys;
  return result;
}

}  // namespace
}  // namespace headway::cpu
