// The keys of a panel of rows whose spans leave holes: what some row sees, in tiles of 64 keys, so that a tile without a
// key of any row costs a bit; and what every row sees, exactly, which needs no mask.
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

  bool reaches(std::int64_t key) const { return (reached[key / span_tile / 64] >> (key / span_tile % 64) & 1) != 0; }
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

// Finds both for rows [row, row + rows). Pieces of `whole` start and end at multiples of key_step; `spare` has room for
// as many. Returns whether every row sees a key outside of them.
HEADWAY_NOINLINE bool find_panel_spans(const RangeRule& rule, std::int64_t row, int rows, std::int64_t key_step,
                                       PanelSpans& found, Range* spare) {
  for (std::int64_t at = 0; at < PanelSpans::words(rule); ++at) {
    found.reached[at] = 0;
  }
  std::int64_t fewest_keys = rule.keys;
  Range* whole = found.whole;
  std::int64_t count = 0;
  Range previous{-1, -1};
  for (int r = 0; r < rows; ++r) {
    const RowSpans spans(rule.spans, row + r);
    const Range range = unspanned_range(rule, row + r);
    const bool repeats = r > 0 && spans.first == RowSpans(rule.spans, row + r - 1).first &&
                         range.begin == previous.begin && range.end == previous.end;
    previous = range;
    if (repeats) {
      continue;
    }
    std::int64_t keys = 0, kept = 0, from = 0;
    const auto keep = [&](const Range& part) HEADWAY_LAMBDA {
      if (part.end - part.begin >= least_whole) {
        spare[kept++] = part;
      }
    };
    spans.for_parts(range, [&](const Range& part) HEADWAY_LAMBDA {
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
    fewest_keys = smaller(fewest_keys, keys);
    count = kept;
    Range* const result = spare;
    spare = whole;
    whole = result;
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
  return fewest_keys > whole_keys;
}

}  // namespace
}  // namespace headway::cpu
