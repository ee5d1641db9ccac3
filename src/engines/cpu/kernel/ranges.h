// Which pairs of queries and keys are allowed before masks, the one place that says so in the kernels: a row's range by
// the rule of core/range_rule.h, and the parts of it that its spans leave. A set of pairs of a row and up to 64 keys is
// a word: bit l is key l.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/args.h"
#include "engines/cpu/simd/common.h"

namespace headway::cpu {
namespace {

using Range = KeyRange;

HEADWAY_INLINE std::int64_t smaller(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
HEADWAY_INLINE std::int64_t larger(std::int64_t a, std::int64_t b) { return a > b ? a : b; }

HEADWAY_INLINE bool overlap(const Range& a, const Range& b) { return larger(a.begin, b.begin) < smaller(a.end, b.end); }

// The smallest range that holds both; an empty one adds nothing.
HEADWAY_INLINE Range joined(const Range& a, const Range& b) {
  if (a.begin >= a.end || b.begin >= b.end) {
    return a.begin >= a.end ? b : a;
  }
  return {smaller(a.begin, b.begin), larger(a.end, b.end)};
}

HEADWAY_INLINE std::uint64_t low_bits(std::int64_t count) {
  return count >= 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << count) - 1;
}

// The part of a range that lies in a panel, counted from the panel's first key.
HEADWAY_INLINE Range inside_panel(const Range& range, std::int64_t key_begin, std::int64_t keys) {
  const std::int64_t end = smaller(larger(range.end - key_begin, 0), keys);
  return {smaller(larger(range.begin - key_begin, 0), end), end};
}

HEADWAY_INLINE std::uint64_t range_word(const Range& inside) { return low_bits(inside.end) & ~low_bits(inside.begin); }

// The keys of a word that is not 0, from the first to the last.
HEADWAY_INLINE Range word_hull(std::uint64_t word) { return {__builtin_ctzll(word), 64 - __builtin_clzll(word)}; }

// Bits [begin, end) of an array of words: set them; whether any of them is set.
HEADWAY_INLINE void set_bits(std::uint64_t* words, std::int64_t begin, std::int64_t end) {
  for (std::int64_t at = begin / 64; at * 64 < end; ++at) {
    words[at] |= range_word(inside_panel({begin, end}, at * 64, 64));
  }
}
HEADWAY_INLINE bool any_bit(const std::uint64_t* words, std::int64_t begin, std::int64_t end) {
  std::uint64_t found = 0;
  for (std::int64_t at = begin / 64; at * 64 < end; ++at) {
    found |= words[at] & range_word(inside_panel({begin, end}, at * 64, 64));
  }
  return found != 0;
}

// ---- Spans ----

HEADWAY_INLINE std::int64_t integer_at(const void* data, bool are_i64, std::int64_t at) {
  return are_i64 ? static_cast<const std::int64_t*>(data)[at] : static_cast<const std::int32_t*>(data)[at];
}

// The spans of one entry: ascending, apart, empty ones last.
struct RowSpans {
  const SpanLists& lists;
  std::int64_t first;  // element

  RowSpans(const SpanLists& all, std::int64_t row)
      : lists(all), first((all.rows == 1 ? row : row / all.rows) * all.entry_stride) {}

  HEADWAY_INLINE Range operator[](std::int64_t s) const {
    const std::int64_t at = first + s * lists.span_stride;
    return {integer_at(lists.data, lists.are_i64, at), integer_at(lists.data, lists.are_i64, at + lists.end_stride)};
  }

  // The number of spans in front for which before(span) holds; what holds for a span holds for those before it. Few are
  // looked at one by one, which is faster.
  template <class Before>
  HEADWAY_INLINE std::int64_t count_while(const Before& before) const {
    constexpr std::int64_t few = 8;
    std::int64_t low = 0, high = lists.count;
    while (low < high) {
      const std::int64_t middle = lists.count <= few ? low : (low + high) / 2;
      const Range span = (*this)[middle];
      const bool is_before = span.begin < span.end && before(span);
      (is_before ? low : high) = is_before ? middle + 1 : middle;
    }
    return low;
  }
  std::int64_t ending_by(std::int64_t key) const {
    return count_while([&](const Range& span) HEADWAY_LAMBDA { return span.end <= key; });
  }

  // body(part) for each part of the range that lies in a span, in ascending order.
  template <class Body>
  HEADWAY_INLINE void for_parts(const Range& range, const Body& body) const {
    for (std::int64_t s = ending_by(range.begin); s < lists.count; ++s) {
      const Range span = (*this)[s];
      if (span.begin >= span.end || span.begin >= range.end) {
        return;
      }
      body(Range{larger(span.begin, range.begin), smaller(span.end, range.end)});
    }
  }

  HEADWAY_NOINLINE Range hull(const Range& range) const {
    const std::int64_t begin = ending_by(range.begin);
    const std::int64_t end = count_while([&](const Range& span) HEADWAY_LAMBDA { return span.begin < range.end; });
    if (begin >= end) {
      return {0, 0};
    }
    return {larger((*this)[begin].begin, range.begin), smaller((*this)[end - 1].end, range.end)};
  }

  HEADWAY_NOINLINE std::uint64_t word(std::int64_t key_begin, std::int64_t keys) const {
    std::uint64_t bits = 0;
    for_parts({key_begin, key_begin + keys}, [&](const Range& part) HEADWAY_LAMBDA {
      bits |= range_word({part.begin - key_begin, part.end - key_begin});
    });
    return bits;
  }
};

// ---- Rows ----

// What causal, window and lengths leave of row i's keys, whatever its spans.
HEADWAY_INLINE Range unspanned_range(const RangeRule& rule, std::int64_t i) {
  const std::int64_t valid_len = rule.valid_lens == nullptr
                                     ? rule.keys
                                     : integer_at(rule.valid_lens, rule.valid_lens_are_i64, i * rule.valid_lens_stride);
  return key_range(rule, i, valid_len);
}

// The range that holds all keys of row i, and where there are no spans nothing else.
HEADWAY_INLINE Range range_of_row(const RangeRule& rule, std::int64_t i) {
  const Range range = unspanned_range(rule, i);
  return rule.spans.data == nullptr || range.begin >= range.end ? range : RowSpans(rule.spans, i).hull(range);
}

// The keys of row i, whose range is given, among [key_begin, key_begin + keys), up to 64.
HEADWAY_INLINE std::uint64_t row_word(const RangeRule& rule, const Range& range, std::int64_t i, std::int64_t key_begin,
                                      std::int64_t keys) {
  const std::uint64_t word = range_word(inside_panel(range, key_begin, keys));
  return rule.spans.data == nullptr || word == 0 ? word : word & RowSpans(rule.spans, i).word(key_begin, keys);
}

// Whether a row sees its whole range, without holes.
HEADWAY_INLINE bool is_whole(const RangeRule& rule, const Range& range, std::int64_t i) {
  if (rule.spans.data == nullptr || range.begin >= range.end) {
    return true;
  }
  const RowSpans spans(rule.spans, i);
  return spans[spans.ending_by(range.begin)].end >= range.end;
}

// Whether row i, whose range is given, sees one of these keys.
HEADWAY_INLINE bool sees_any(const RangeRule& rule, const Range& range, std::int64_t i, const Range& keys) {
  const Range inside{larger(range.begin, keys.begin), smaller(range.end, keys.end)};
  if (rule.spans.data == nullptr || inside.begin >= inside.end) {
    return inside.begin < inside.end;
  }
  const RowSpans spans(rule.spans, i);
  const std::int64_t s = spans.ending_by(inside.begin);
  return s < rule.spans.count && spans[s].begin < spans[s].end && spans[s].begin < inside.end;
}

// Whether rows [begin, end), one or more, are seen at a glance to see the same range, without holes. Both ends of a
// range only grow with the row, so what holds for the first and the last row holds between them, unless their ranges
// are empty.
HEADWAY_INLINE bool rows_share_range(const RangeRule& rule, std::int64_t begin, std::int64_t end) {
  if (rule.valid_lens != nullptr ||
      (rule.spans.data != nullptr && begin / rule.spans.rows != (end - 1) / rule.spans.rows)) {
    return false;
  }
  const Range first = range_of_row(rule, begin);
  const Range last = range_of_row(rule, end - 1);
  return first.begin < first.end && first.begin == last.begin && first.end == last.end && is_whole(rule, first, begin);
}

}  // namespace
}  // namespace headway::cpu
