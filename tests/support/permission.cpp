#include "support/permission.h"

#include <algorithm>
#include <cmath>

namespace headway::test {
namespace {

std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

std::int64_t integer(Real value) { return static_cast<std::int64_t>(value); }

bool padding(const Spec& spec, std::int64_t b, std::int64_t i) {
  return i >= spec.rows[at(b)] || (spec.query_lens && i >= integer((*spec.query_lens)(b)));
}

// Element [b,h,i,0] of an array that is repeated where its size is 1, and the step to [b,h,i,1].
const Real* row_of(const std::optional<Array>& array, std::int64_t b, std::int64_t h, std::int64_t i,
                   std::int64_t& step) {
  if (!array || array->values.empty()) return nullptr;
  step = array->size(3) == 1 ? 0 : 1;
  return &array->repeated(b, h, i, 0);
}

}  // namespace

std::int64_t offset(const Spec& spec, std::int64_t b) {
  if (spec.causal == Causal::none) return spec.keys[at(b)] - spec.rows[at(b)];
  if (spec.causal != Causal::bottom_right) return 0;
  const bool per_item = spec.valid_lens && spec.valid_lens->sizes().size() == 1;
  const std::int64_t keys = per_item ? integer((*spec.valid_lens)(b)) : spec.keys[at(b)];
  const std::int64_t rows = spec.query_lens ? integer((*spec.query_lens)(b)) : spec.rows[at(b)];
  return keys - rows;
}

RowPermission::RowPermission(const Spec& spec, std::int64_t b, std::int64_t h, std::int64_t i)
    : is_padding_(padding(spec, b, i)) {
  bias_ = row_of(spec.bias, b, h, i, bias_step_);
  if (is_padding_) return;
  const std::int64_t diagonal = i + offset(spec, b);
  end_ = spec.keys[at(b)];
  if (spec.causal != Causal::none) end_ = std::min(end_, diagonal + 1);
  // Written so that windows of up to 2^63 - 1 overflow nothing.
  if (spec.window.left && *spec.window.left < diagonal) begin_ = diagonal - *spec.window.left;
  if (spec.window.right && *spec.window.right < end_ - diagonal) end_ = diagonal + *spec.window.right + 1;
  if (spec.valid_lens) {
    const Array& lens = *spec.valid_lens;
    end_ = std::min(end_, integer(lens.sizes().size() == 1 ? lens(b) : lens(b, i)));
  }
  mask_ = row_of(spec.mask, b, h, i, mask_step_);
  if (!spec.spans) return;
  const Array& spans = *spec.spans;
  span_count_ = spans.size(3);
  if (span_count_ == 0) {
    end_ = begin_;
    return;
  }
  const std::int64_t item = spans.size(0) == 1 ? 0 : b, head = spans.size(1) == 1 ? 0 : h;
  const std::int64_t entry = spec.span_begins.empty() ? i / spec.span_rows : spec.span_begins[at(b)] + i;
  spans_ = &spans.values[at((((item * spans.size(1) + head) * spans.size(2) + entry) * span_count_) * 2)];
}

bool RowPermission::is_in_a_span(std::int64_t j) const {
  for (std::int64_t s = 0; s < span_count_; ++s)
    if (integer(spans_[2 * s]) <= j && j < integer(spans_[2 * s + 1])) return true;
  return false;
}

bool allowed(const Spec& spec, std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) {
  return RowPermission(spec, b, h, i).allows(j);
}

Real kept(const Spec& spec, std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) {
  if (spec.dropout == 0) return 1;
  auto word = [](std::int64_t value) { return static_cast<std::uint32_t>(value); };
  const auto random = philox({word(j >> 2), word(i), word(h), word(b)},
                             {static_cast<std::uint32_t>(spec.seed), static_cast<std::uint32_t>(spec.seed >> 32)});
  const auto threshold = static_cast<std::uint64_t>(std::llround(std::ldexp(spec.dropout, 32)));
  return random[at(j & 3)] >= threshold ? 1 / (1 - static_cast<Real>(spec.dropout)) : 0;
}

std::array<std::uint32_t, 4> philox(std::array<std::uint32_t, 4> counter, std::array<std::uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t a = std::uint64_t{0xD2511F53} * counter[0];
    const std::uint64_t b = std::uint64_t{0xCD9E8D57} * counter[2];
    counter = {static_cast<std::uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<std::uint32_t>(b),
               static_cast<std::uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<std::uint32_t>(a)};
    key = {key[0] + 0x9E3779B9u, key[1] + 0xBB67AE85u};
  }
  return counter;
}

}  // namespace headway::test
