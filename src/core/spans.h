// Spans: the parts of the keys that the rows of an entry may attend to. In a Problem they are in normal form, so that
// no reader distinguishes cases: an entry's spans ascend, neighbours have a gap between them, and empty ones come last.
#pragma once

#include <cstdint>

#include "core/elements.h"
#include "core/key_range.h"
#include "core/problem.h"

namespace headway {

// Checks spans [B,H,entries,R,2] in host memory against the number of keys and brings them into normal form:
// problem.spans becomes the view itself, or one of a copy that the problem owns.
void take_spans(Problem& problem, ConstTensorView spans);

// Which entry of problem.spans row i of a sequence has.
inline std::int64_t span_entry(const Problem& problem, const Sequence& sequence, std::int64_t i) {
  return problem.packed() ? sequence.query_begin + i : i / problem.span_rows;
}

// body(KeyRange) for each span of an entry inside `range`, in ascending order.
template <class Body>
void for_spans_inside(const Problem& problem, std::int64_t b, std::int64_t h, std::int64_t entry, const KeyRange& range,
                      const Body& body) {
  const ConstTensorView& spans = *problem.spans;
  const std::int64_t first = row_offset(spans, b, h, entry);
  for (std::int64_t s = 0; s < spans.size(3); ++s) {
    const std::int64_t at = first + s * spans.stride(3);
    const KeyRange span{load_integer(spans, at), load_integer(spans, at + spans.stride(4))};
    if (span.begin >= span.end || span.begin >= range.end) {
      return;
    }
    const KeyRange part = common_keys(span, range);
    if (part.begin < part.end) {
      body(part);
    }
  }
}

// body(KeyRange) for each part of the keys that row i of head h may attend to, before masks, in ascending order.
template <class Body>
void for_key_parts(const Problem& problem, const Sequence& sequence, std::int64_t b, std::int64_t h, std::int64_t i,
                   const Body& body) {
  const KeyRange range = key_range(problem, sequence, b, i);
  if (problem.spans) {
    for_spans_inside(problem, b, h, span_entry(problem, sequence, i), range, body);
  } else if (range.begin < range.end) {
    body(range);
  }
}

}  // namespace headway
