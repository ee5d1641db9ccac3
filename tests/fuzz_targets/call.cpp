#include "call.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace headway::fuzz {
namespace {

constexpr std::int64_t largest = std::numeric_limits<std::int64_t>::max();

std::int64_t draw_size(Input& input) {
  constexpr std::int64_t odd[] = {0, -1, 1000, std::int64_t{1} << 31, std::int64_t{1} << 62, largest, -largest - 1};
  const auto drawn = input.take<std::uint8_t>();
  return drawn < 0xf0 ? drawn % 6 : odd[drawn % std::size(odd)];
}

DType draw_type(Input& input) {
  constexpr DType types[] = {DType::f32, DType::f64, DType::bf16, DType::f16,
                             DType::f32, DType::b8,  DType::i32,  DType::i64};
  return types[input.below(std::size(types))];
}

template <class T>
std::optional<T> maybe(Input& input) {
  return input.below(4) == 0 ? std::optional(input.take<T>()) : std::nullopt;
}

}  // namespace

Dims draw_sizes(Input& input, int rank) {
  Dims sizes;
  for (int axis = 0; axis < rank; ++axis) {
    sizes.push_back(draw_size(input));
  }
  return sizes;
}

// Contiguous where the memory is enough, otherwise one element that repeats.
ConstTensorView Call::view(Input& input, DType dtype, const Dims& sizes) const {
  double bytes = static_cast<double>(size_of(dtype));
  Dims repeated = sizes;
  for (int axis = 0; axis < sizes.size(); ++axis) {
    bytes *= static_cast<double>(sizes[axis]);
    repeated[axis] = 0;
  }
  const unsigned char* start = memory_.data() + input.below(64);  // often not aligned
  const bool fits = bytes + 64 <= static_cast<double>(memory_.size());
  return fits ? ConstTensorView(start, dtype, sizes) : ConstTensorView(start, dtype, sizes, repeated);
}

Call::Call(Input& input) {
  const std::string_view content = input.take_bytes(input.below(128));
  for (std::size_t n = 0; n < memory_.size() && !content.empty(); ++n) {
    memory_[n] = static_cast<unsigned char>(content[n % content.size()]);
  }
  const DType dtype = draw_type(input);
  const int rank = static_cast<int>(input.below(6));
  query = view(input, dtype, draw_sizes(input, rank));
  if (input.coin()) {  // sizes that fit
    key = input.coin() ? query : view(input, dtype, query.sizes());
    value = key;
  } else {
    key = view(input, dtype, draw_sizes(input, rank));
    value = view(input, dtype, draw_sizes(input, static_cast<int>(input.below(6))));
  }
  draw_options(input, dtype);
}

void Call::draw_options(Input& input, DType dtype) {
  options.causal = static_cast<Causal>(input.below(4));
  if (input.below(3) == 0) {
    options.window = Window{maybe<std::int64_t>(input), maybe<std::int64_t>(input)};
  }
  options.scale = maybe<double>(input);
  options.softcap = maybe<double>(input);
  options.dropout = maybe<double>(input).value_or(0.0);
  options.seed = maybe<std::uint64_t>(input);
  options.engine = static_cast<Engine>(input.below(4));
  const auto draw = [&](std::optional<ConstTensorView>& target, DType type) {
    if (input.below(6) == 0) {
      target = view(input, input.below(8) == 0 ? draw_type(input) : type,
                    draw_sizes(input, static_cast<int>(input.below(6))));
    }
  };
  draw(options.mask, DType::b8);
  draw(options.bias, dtype);
  draw(options.valid_lens, DType::i64);
  draw(options.query_lens, DType::i32);
  draw(options.alibi_slopes, DType::f32);
  draw(options.sinks, DType::f64);
  draw(options.spans, DType::i64);
  if (options.spans) {
    options.span_rows = maybe<std::int64_t>(input).value_or(1);
  }
}

std::vector<std::string> draw_texts(Input& input, std::int64_t expected) {
  const std::size_t kind = input.below(4);
  const std::int64_t count = kind == 0 ? 0 : kind == 1 ? static_cast<std::int64_t>(input.below(4)) : expected;
  std::vector<std::string> texts;
  for (std::int64_t n = 0; n < std::min<std::int64_t>(count, 16); ++n) {
    texts.push_back(input.text());
  }
  return texts;
}

double work_of(const Call& call) {
  double work = 1;
  for (const ConstTensorView* view : {&call.query, &call.key}) {
    const int axes = view == &call.key ? view->rank() - 1 : view->rank();  // a product has one width
    for (int axis = 0; axis < axes; ++axis) {
      work *= static_cast<double>(std::max<std::int64_t>(view->size(axis), 1));
    }
  }
  return work;
}

}  // namespace headway::fuzz
