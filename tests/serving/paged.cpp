#include "serving/paged.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace headway::test {
namespace {

std::int64_t pages_of(std::int64_t length, std::int64_t page_size) { return (length + page_size - 1) / page_size; }

// NaN wherever the type has one, the largest number elsewhere.
void poison(TensorView view) {
  const double value = view.dtype() == DType::i8 ? 127 : std::numeric_limits<double>::quiet_NaN();
  each_index(view.sizes(), [&](const Dims& index) { set(view, index, value); });
}

}  // namespace

PagedInputs::PagedInputs(const PagedShape& wanted) : shape(wanted) {
  const auto batch = static_cast<std::int64_t>(shape.lengths.size());
  std::int64_t longest = 0, used = 0;
  for (const std::int64_t length : shape.lengths) {
    longest = std::max(longest, length);
    used += pages_of(length, shape.page_size);
  }
  const std::int64_t pages = 2 * used + 1, most = pages_of(longest, shape.page_size) + 1;
  key_pages = Strided({pages, shape.page_size, shape.kv_heads, shape.head_dim}, shape.type, shape.layout);
  value_pages = Strided({pages, shape.page_size, shape.kv_heads, shape.value_dim}, shape.type, shape.layout);
  key_scales = Tensor({pages, shape.page_size, shape.kv_heads});
  value_scales = Tensor({pages, shape.page_size, shape.kv_heads});
  for (TensorView view : {key_pages.view(), value_pages.view(), TensorView(key_scales), TensorView(value_scales)})
    poison(view);

  Random random(shape.seed);
  std::vector<std::int64_t> order(static_cast<std::size_t>(pages));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  table = Tensor({batch, most}, shape.table_type);
  lengths = Tensor({batch}, shape.table_type);
  const std::int64_t shared = shape.shared_prefix && batch > 0
                                  ? *std::min_element(shape.lengths.begin(), shape.lengths.end()) / shape.page_size
                                  : 0;
  std::size_t next = 0;
  const DType gathered = is_8bit(shape.type) ? DType::f32 : shape.type;
  for (std::int64_t b = 0; b < batch; ++b) {
    const std::int64_t length = shape.lengths[static_cast<std::size_t>(b)];
    set(lengths, {b}, static_cast<double>(length));
    gathered_keys.emplace_back(Dims{1, shape.kv_heads, length, shape.head_dim}, gathered);
    gathered_values.emplace_back(Dims{1, shape.kv_heads, length, shape.value_dim}, gathered);
    for (std::int64_t n = 0; n < most; ++n) {
      double page = n % 2 == 0 ? -1 : std::numeric_limits<std::int32_t>::max();
      if (n < pages_of(length, shape.page_size))
        page = b > 0 && n < shared ? get(table, {0, n}) : static_cast<double>(order[next++]);
      set(table, {b, n}, page);
    }
    for (std::int64_t j = 0; j < length; ++j)
      fill(b, j, static_cast<std::int64_t>(get(table, {b, j / shape.page_size})), random);
  }
  // A shared page may have been written again by a later sequence: all read what came last.
  for (std::int64_t b = 0; b + 1 < batch; ++b)
    for (std::int64_t j = 0; j < shared * shape.page_size; ++j)
      for (std::int64_t g = 0; g < shape.kv_heads; ++g) {
        const auto same = [&](std::vector<Tensor>& rows, std::int64_t width) {
          for (std::int64_t d = 0; d < width; ++d)
            set(rows[static_cast<std::size_t>(b)], {0, g, j, d}, get(rows.back(), {0, g, j, d}));
        };
        same(gathered_keys, shape.head_dim);
        same(gathered_values, shape.value_dim);
      }
}

void PagedInputs::fill(std::int64_t sequence, std::int64_t token, std::int64_t page, Random& random) {
  std::normal_distribution<double> normal(0, 1);
  const std::int64_t slot = token % shape.page_size;
  const auto row = [&](TensorView pages, TensorView scales, TensorView gathered, std::int64_t g) {
    const auto scale = static_cast<float>(is_8bit(shape.type) ? 0.01 * std::exp(normal(random)) : 1.0);
    set(scales, {page, slot, g}, scale);
    for (std::int64_t d = 0; d < pages.size(3); ++d) {
      const double drawn = normal(random);
      const double stored = shape.type == DType::i8       ? std::clamp(std::round(drawn * 50), -128.0, 127.0)
                            : shape.type == DType::f8e4m3 ? drawn * 40
                                                          : drawn;
      set(pages, {page, slot, g, d}, stored);
      const auto element = static_cast<float>(get(pages, {page, slot, g, d}));
      set(gathered, {0, g, token, d}, is_8bit(shape.type) ? scale * element : get(pages, {page, slot, g, d}));
    }
  };
  for (std::int64_t g = 0; g < shape.kv_heads; ++g) {
    row(key_pages.view(), key_scales, gathered_keys[static_cast<std::size_t>(sequence)], g);
    row(value_pages.view(), value_scales, gathered_values[static_cast<std::size_t>(sequence)], g);
  }
}

PagedKeys PagedInputs::keys() const {
  PagedKeys keys{
      .key_pages = key_pages.view(), .value_pages = value_pages.view(), .block_table = table, .lengths = lengths};
  if (is_8bit(shape.type)) {
    keys.key_scales = key_scales;
    keys.value_scales = value_scales;
  }
  return keys;
}

Call gathered_call(const PagedInputs& inputs, std::int64_t b, ConstTensorView query, const AttentionOptions& options) {
  const auto at = static_cast<std::size_t>(b);
  return {query, inputs.gathered_keys[at], inputs.gathered_values[at], options, {}};
}

}  // namespace headway::test
