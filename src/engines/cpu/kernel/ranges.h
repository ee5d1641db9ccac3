// Key ranges inside the kernels: the same rule as core/key_range.h, on plain data.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/args.h"
#include "engines/cpu/simd/common.h"

namespace headway::cpu {
namespace {

struct Range {
  std::int64_t begin, end;
};

HEADWAY_INLINE std::int64_t smaller(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
HEADWAY_INLINE std::int64_t larger(std::int64_t a, std::int64_t b) { return a > b ? a : b; }

HEADWAY_INLINE Range range_of_row(const RangeRule& rule, std::int64_t i) {
  if (i >= rule.real_queries) {
    return {0, 0};
  }
  const std::int64_t position = i + rule.offset;
  Range range{larger(0, position - rule.left), smaller(rule.keys, position + rule.right + 1)};
  if (rule.valid_lens != nullptr) {
    const std::int64_t at = i * rule.valid_lens_stride;
    range.end = smaller(range.end, rule.valid_lens_are_i64 ? static_cast<const std::int64_t*>(rule.valid_lens)[at]
                                                           : static_cast<const std::int32_t*>(rule.valid_lens)[at]);
  }
  return range.begin < range.end ? range : Range{0, 0};
}

// Whether rows [begin, end), one or more, are seen at a glance to have the same range. Both ends of a range only grow
// with the row, so what holds for the first and the last row holds between them, unless their ranges are empty.
HEADWAY_INLINE bool rows_share_range(const RangeRule& rule, std::int64_t begin, std::int64_t end) {
  const Range first = range_of_row(rule, begin);
  const Range last = range_of_row(rule, end - 1);
  return rule.valid_lens == nullptr && first.begin < first.end && first.begin == last.begin && first.end == last.end;
}

}  // namespace
}  // namespace headway::cpu
