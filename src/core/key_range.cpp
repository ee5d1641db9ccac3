// Sequences, key ranges, and how many pairs they leave.
#include "core/key_range.h"

#include <algorithm>
#include <array>

#include "core/elements.h"
#include "core/spans.h"

namespace headway {
namespace {

std::int64_t entry(const ConstTensorView& lengths, std::int64_t index) {
  return load_integer(lengths, index * lengths.stride(0));
}

bool readable(const std::optional<ConstTensorView>& lengths) { return lengths && lengths->device() == Device{}; }

std::int64_t valid_len(const Problem& problem, const Sequence& sequence, std::int64_t b, std::int64_t i) {
  if (!readable(problem.valid_lens)) {
    return sequence.key_count;
  }
  const ConstTensorView& lens = *problem.valid_lens;
  return load_integer(lens, b * lens.stride(0) + i * lens.stride(1));
}

}  // namespace

RangeRule range_rule(const Problem& problem) {
  RangeRule rule;
  rule.alignment = problem.causal == Causal::none       ? Alignment::all_ends
                   : problem.causal == Causal::top_left ? Alignment::starts
                                                        : Alignment::real_ends;
  if (problem.offset) {
    rule.alignment = Alignment::given;
    rule.offset = *problem.offset;
  }
  rule.left = problem.window_left.value_or(RangeRule::unlimited);
  rule.right = problem.causal != Causal::none ? 0 : problem.window_right.value_or(RangeRule::unlimited);
  return rule;
}

Sequence sequence(const Problem& problem, std::int64_t b) {
  Sequence result;
  result.query_count = problem.query_len;
  result.key_count = problem.key_len;
  const auto packed_rows = [&](const ConstTensorView& bounds, std::int64_t& begin, std::int64_t& count) {
    begin = entry(bounds, b);
    count = entry(bounds, b + 1) - begin;
  };
  if (problem.pages) {
    if (readable(problem.cu_seqlens_q)) {
      packed_rows(*problem.cu_seqlens_q, result.query_begin, result.query_count);
    }
    if (readable(problem.pages->lengths)) {
      result.key_count = entry(problem.pages->lengths, b);
    }
  } else if (readable(problem.cu_seqlens_q) && readable(problem.cu_seqlens_k)) {
    packed_rows(*problem.cu_seqlens_q, result.query_begin, result.query_count);
    packed_rows(*problem.cu_seqlens_k, result.key_begin, result.key_count);
  }
  result.real_queries = readable(problem.query_lens) ? entry(*problem.query_lens, b) : result.query_count;
  const std::int64_t real_keys = problem.valid_lens_per_batch ? valid_len(problem, result, b, 0) : result.key_count;
  result.offset = alignment_offset(range_rule(problem), result, real_keys);
  return result;
}

KeyRange key_range(const Problem& problem, const Sequence& sequence, std::int64_t b, std::int64_t i) {
  return key_range(range_rule(problem), sequence, i, valid_len(problem, sequence, b, i));
}

namespace {

// Sums the range sizes over the rows of one batch item without visiting each row: where a range depends on the row only
// through i + offset, its size is linear in i between a few corners.
double pairs_between_corners(const Problem& problem, const Sequence& sequence, std::int64_t b) {
  const std::int64_t rows = sequence.real_queries;
  const std::int64_t keys = std::min(valid_len(problem, sequence, b, 0), sequence.key_count);
  const std::int64_t left = problem.window_left.value_or(0);
  std::int64_t right = problem.window_right.value_or(0);
  if (problem.causal != Causal::none) {
    right = problem.window_right ? std::min<std::int64_t>(right, 0) : 0;
  }
  // Rows at which begin leaves 0 or reaches the last key, and at which end does.
  std::array<std::int64_t, 6> corners = {0,
                                         left - sequence.offset,
                                         keys + left - sequence.offset,
                                         -right - sequence.offset - 1,
                                         keys - right - sequence.offset - 1,
                                         rows};
  for (std::int64_t& corner : corners) {
    corner = std::clamp<std::int64_t>(corner, 0, rows);
  }
  std::sort(corners.begin(), corners.end());
  double pairs = 0;
  for (std::size_t k = 0; k + 1 < corners.size(); ++k) {
    const std::int64_t first = corners[k];
    const std::int64_t last = corners[k + 1] - 1;
    if (first > last) {
      continue;
    }
    const auto at_first = static_cast<double>(key_range(problem, sequence, b, first).count());
    const auto at_last = static_cast<double>(key_range(problem, sequence, b, last).count());
    pairs += (at_first + at_last) / 2 * static_cast<double>(last - first + 1);
  }
  return pairs;
}

// The pairs of one head of one batch item. Rows that share an entry and a range count once.
double pairs_inside_spans(const Problem& problem, const Sequence& sequence, std::int64_t b, std::int64_t h) {
  const bool by_row = readable(problem.valid_lens) && !problem.valid_lens_per_batch;
  double pairs = 0;
  for (std::int64_t i = 0; i < sequence.query_count;) {
    const std::int64_t entry = span_entry(problem, sequence, i);
    const std::int64_t end = problem.packed() ? i + 1 : std::min((entry + 1) * problem.span_rows, sequence.query_count);
    const KeyRange first = key_range(problem, sequence, b, i);
    const KeyRange last = end - i == 1 ? first : key_range(problem, sequence, b, end - 1);
    // Both ends of a range only grow with the row; empty ones are {0, 0} wherever they are.
    const bool shared = !by_row && first.begin == last.begin && first.end == last.end && first.begin < first.end;
    const std::int64_t rows = shared ? end - i : 1;
    for_spans_inside(problem, b, h, entry, first, [&](const KeyRange& part) {
      pairs += static_cast<double>(part.end - part.begin) * static_cast<double>(rows);
    });
    i += rows;
  }
  return pairs;
}

}  // namespace

double visited_pairs(const Problem& problem) {
  double pairs = 0;
  if (problem.heads == 0 || problem.query_len == 0 || problem.key_len == 0) {
    return pairs;
  }
  // Without lengths or spans of their own, batch items are alike: a call of a thousand would spend longer here than on
  // its attention.
  const bool alike = !readable(problem.valid_lens) && !readable(problem.query_lens) &&
                     !readable(problem.cu_seqlens_q) && !readable(problem.spans) && !problem.pages;
  for (std::int64_t b = 0; b < (alike ? std::min<std::int64_t>(problem.batch, 1) : problem.batch); ++b) {
    const Sequence current = sequence(problem, b);
    if (readable(problem.spans)) {
      const bool repeats = problem.spans->stride(1) == 0;
      for (std::int64_t h = 0; h < (repeats ? 1 : problem.heads); ++h) {
        pairs += pairs_inside_spans(problem, current, b, h) / (repeats ? 1.0 : static_cast<double>(problem.heads));
      }
      continue;
    }
    if (!readable(problem.valid_lens) || problem.valid_lens_per_batch) {
      pairs += pairs_between_corners(problem, current, b);
      continue;
    }
    for (std::int64_t i = 0; i < current.query_count; ++i) {
      pairs += static_cast<double>(key_range(problem, current, b, i).count());
    }
  }
  return pairs * static_cast<double>(problem.heads) * (alike ? static_cast<double>(problem.batch) : 1.0);
}

}  // namespace headway
