// Spans: their check, and their normal form.
#include "core/spans.h"

#include <algorithm>
#include <vector>

#include "core/checks.h"

namespace headway {
namespace {

// The spans [R,2] of one entry of a [B,H,entries,R,2] view.
template <class Integer>
struct Entry {
  const Integer* data;
  std::int64_t count, stride, end_stride;
  KeyRange operator[](std::int64_t s) const { return {data[s * stride], data[s * stride + end_stride]}; }
};

template <class Integer>
Entry<Integer> entry_of(const ConstTensorView& spans, std::int64_t b, std::int64_t h, std::int64_t entry) {
  return {static_cast<const Integer*>(spans.data()) + row_offset(spans, b, h, entry), spans.size(3), spans.stride(3),
          spans.stride(4)};
}

// body(b, h, entry) for each entry that is stored: axes that repeat are visited once.
template <class Body>
void for_entries(const ConstTensorView& spans, const Body& body) {
  const std::int64_t items = spans.stride(0) == 0 ? std::min<std::int64_t>(spans.size(0), 1) : spans.size(0);
  const std::int64_t heads = spans.stride(1) == 0 ? std::min<std::int64_t>(spans.size(1), 1) : spans.size(1);
  for (std::int64_t b = 0; b < items; ++b) {
    for (std::int64_t h = 0; h < heads; ++h) {
      for (std::int64_t entry = 0; entry < spans.size(2); ++entry) {
        body(b, h, entry);
      }
    }
  }
}

// The number of keys that each entry's spans may count to: its own sequence's when packed.
class Limits {
 public:
  explicit Limits(const Problem& problem) : problem_(problem) {
    for (std::int64_t b = 0; problem.packed() && b < problem.batch; ++b) {
      const Sequence current = sequence(problem, b);
      keys_.insert(keys_.end(), static_cast<std::size_t>(current.query_count), current.key_count);
    }
  }
  std::int64_t of(std::int64_t entry) const {
    return problem_.packed() ? keys_[static_cast<std::size_t>(entry)] : problem_.key_len;
  }

 private:
  const Problem& problem_;
  std::vector<std::int64_t> keys_;  // packed: one an entry
};

// Returns whether the entry is in normal form.
template <class Integer>
bool check_entry(const Problem& problem, const Entry<Integer>& entry, std::int64_t keys, std::int64_t b, std::int64_t h,
                 std::int64_t index) {
  bool normal = true;
  std::int64_t previous = -1;  // end of the span before; past all keys after an empty one
  for (std::int64_t s = 0; s < entry.count; ++s) {
    const KeyRange span = entry[s];
    if (span.begin < 0 || span.begin > span.end || span.end > keys) {
      invalid(problem, "spans[", b, ", ", h, ", ", index, ", ", s, "] is (", span.begin, ", ", span.end,
              "), expected 0 <= begin <= end <= ", keys);
    }
    normal = normal && (span.begin == span.end || span.begin > previous);
    previous = span.begin == span.end ? keys : span.end;
  }
  return normal;
}

template <class Integer>
void normalise_entry(const Entry<Integer>& entry, std::vector<KeyRange>& sorted, Integer* target) {
  sorted.clear();
  for (std::int64_t s = 0; s < entry.count; ++s) {
    if (const KeyRange span = entry[s]; span.begin < span.end) {
      sorted.push_back(span);
    }
  }
  std::sort(sorted.begin(), sorted.end(), [](const KeyRange& a, const KeyRange& b) { return a.begin < b.begin; });
  std::int64_t count = 0;
  for (const KeyRange& span : sorted) {
    if (count > 0 && span.begin <= target[2 * count - 1]) {
      target[2 * count - 1] = std::max(target[2 * count - 1], static_cast<Integer>(span.end));
    } else {
      target[2 * count] = static_cast<Integer>(span.begin);
      target[2 * count + 1] = static_cast<Integer>(span.end);
      ++count;
    }
  }
  std::fill(target + 2 * count, target + 2 * entry.count, Integer{0});
}

template <class Integer>
void take_spans_of(Problem& problem, const ConstTensorView& spans) {
  const Limits limits(problem);
  bool normal = true;
  for_entries(spans, [&](std::int64_t b, std::int64_t h, std::int64_t entry) {
    normal &= check_entry(problem, entry_of<Integer>(spans, b, h, entry), limits.of(entry), b, h, entry);
  });
  problem.spans = spans;
  if (normal) {
    return;
  }
  const auto stored = [&](int axis) { return spans.stride(axis) == 0 ? 1 : spans.size(axis); };
  const std::shared_ptr<Tensor> copy = std::make_shared<Tensor>(
      Tensor::uninitialized({stored(0), stored(1), spans.size(2), spans.size(3), 2}, dtype_of<Integer>));
  std::vector<KeyRange> sorted;
  Integer* target = copy->as<Integer>();
  for_entries(spans, [&](std::int64_t b, std::int64_t h, std::int64_t entry) {
    normalise_entry(entry_of<Integer>(spans, b, h, entry), sorted, target);
    target += 2 * spans.size(3);
  });
  problem.spans = ConstTensorView(*copy).expand(spans.sizes());
  problem.normalised_spans = copy;
}

}  // namespace

void take_spans(Problem& problem, ConstTensorView spans) {
  spans.dtype() == DType::i32 ? take_spans_of<std::int32_t>(problem, spans)
                              : take_spans_of<std::int64_t>(problem, spans);
}

}  // namespace headway
