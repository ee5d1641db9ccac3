// The same call over keys and values in pages, as they are and in 8 bits: the bits of the call on rows that lie one
// behind the other.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <span>

#include "fuzz/check.h"
#include "headway/serving.h"

namespace headway::test::fuzz {
namespace {

ConstTensorView with_rank_4(ConstTensorView view) {
  if (view.rank() == 4) return view;
  return view.rank() == 3 ? view.unsqueeze(1) : view.unsqueeze(0).unsqueeze(0);
}

// The rows of sequence b of keys or values: [Hkv,length,D].
ConstTensorView rows_of(const Call& call, ConstTensorView rows, std::int64_t b) {
  if (!call.packing) return with_rank_4(rows).select(0, b);
  const auto at = static_cast<std::size_t>(b);
  return rows.slice(0, call.packing->starts_k[at], call.packing->starts_k[at + 1]).transpose(0, 1);
}

// [B,Hkv,S,D], or one sequence of it, put into pages of its own; slots that no token has are NaN, and table entries
// behind a sequence's pages are out of range.
class Pager {
 public:
  Pager(std::int64_t page_size, const std::vector<std::int64_t>& keys, Random& random)
      : page_size_(page_size), layout_(static_cast<Layout>(random() % 5)) {
    std::int64_t most = 0;
    for (const std::int64_t length : keys) {
      first_.push_back(pages_);
      pages_ += pages_of(length);
      most = std::max(most, pages_of(length));
    }
    order_.resize(static_cast<std::size_t>(pages_));
    std::iota(order_.begin(), order_.end(), 0);
    std::shuffle(order_.begin(), order_.end(), random);
    const auto batch = static_cast<std::int64_t>(keys.size());
    const DType table_type = random() % 2 == 0 ? DType::i32 : DType::i64;
    const double beyond = random() % 2 == 0 ? -1 : std::numeric_limits<std::int32_t>::max();
    table = filled({batch, most + static_cast<std::int64_t>(random() % 3)}, table_type, beyond);
    lengths = Tensor({batch}, random() % 2 == 0 ? DType::i32 : DType::i64);
    for (std::int64_t b = 0; b < batch; ++b) {
      const std::int64_t length = keys[static_cast<std::size_t>(b)];
      set(lengths, {b}, static_cast<double>(length));
      for (std::int64_t n = 0; n < pages_of(length); ++n) set(table, {b, n}, static_cast<double>(page(b, n)));
    }
  }

  // The keys or values of the call.
  Strided paged(const Call& call, ConstTensorView rows) const {
    const std::int64_t heads = call.packing || rows.rank() == 4 ? rows.size(1) : 1;
    const Dims sizes{pages_, page_size_, heads, rows.sizes().back()};
    Strided pages(sizes, rows.dtype(), layout_);
    each_index(sizes, [&](const Dims& index) { set(pages.view(), index, rows.dtype() == DType::i8 ? 127 : NAN); });
    for (std::int64_t b = 0; b < table.size(0); ++b) {
      const ConstTensorView sequence = rows_of(call, rows, b);
      for (std::int64_t j = 0; j < sequence.size(1); ++j)
        copy(sequence.select(1, j), pages.view().select(0, page(b, j / page_size_)).select(0, j % page_size_));
    }
    return pages;
  }

  Tensor table, lengths;

 private:
  std::int64_t pages_of(std::int64_t length) const { return (length + page_size_ - 1) / page_size_; }
  std::int64_t page(std::int64_t b, std::int64_t n) const {
    return order_[static_cast<std::size_t>(first_[static_cast<std::size_t>(b)] + n)];
  }

  std::int64_t page_size_, pages_ = 0;
  Layout layout_;
  std::vector<std::int64_t> first_;  // of each sequence, among all pages
  std::vector<std::int64_t> order_;
};

// out and lse of the call over pages.
Results over_pages(const Call& call, const PagedKeys& keys) {
  Results results{filled(call.out_sizes(), call.q.dtype(), NAN), filled(call.lse_sizes(), call.lse_type(), NAN), {}};
  if (call.packing) {
    const Tensor bounds =
        Tensor::of<std::int64_t>({static_cast<std::int64_t>(call.packing->starts_q.size())}, call.packing->starts_q);
    attention_paged(call.q, bounds, keys, results.out, call.options, {.lse = results.lse});
    return results;
  }
  const auto with_heads = [&](Tensor& tensor) {
    const TensorView view = tensor;
    return call.q.rank() == 4 ? view : call.q.rank() == 3 ? view.unsqueeze(1) : view.unsqueeze(0).unsqueeze(0);
  };
  AttentionOptions options = call.options;
  if (call.q.rank() == 3 && options.spans && options.spans->rank() == 4)  // [B,Sq,R,2]
    options.spans = options.spans->unsqueeze(1);
  attention_paged(with_rank_4(call.q), keys, with_heads(results.out), options, {.lse = with_heads(results.lse)});
  return results;
}

std::optional<Failure> compare(const std::string& check_name, const Results& found, const Results& expected) {
  if (const auto text = differing(found.out, expected.out)) return Failure{check_name + ", out", *text};
  if (const auto text = differing(found.lse, expected.lse)) return Failure{check_name + ", lse", *text};
  return std::nullopt;
}

// Keys or values as 8-bit numbers with a scale for each row: what a cache would store, and NaN as the scale of rows
// that are not finite.
struct Quantised {
  Quantised(ConstTensorView rows, DType type) : elements(rows.sizes(), type), floats(rows.sizes()) {
    const int last = rows.rank() - 1;
    const std::int64_t width = rows.size(last);
    Dims row_sizes = rows.sizes();
    row_sizes[last] = 1;
    scales = Tensor(row_sizes);
    const double steps = type == DType::i8 ? 127 : 448;
    each_index(row_sizes, [&](const Dims& row) {
      const auto element = [&](std::int64_t d) {
        Dims index = row;
        index[last] = d;
        return index;
      };
      double largest = 0;
      for (std::int64_t d = 0; d < width; ++d) largest = std::max(largest, std::abs(get(rows, element(d))));
      bool finite = largest <= largest_finite(DType::f32);
      for (std::int64_t d = 0; d < width; ++d) finite = finite && std::isfinite(get(rows, element(d)));
      const float scale = finite ? static_cast<float>(std::max(largest / steps, 0x1p-126)) : NAN;
      set(scales, row, scale);
      for (std::int64_t d = 0; d < width; ++d) {
        const double wanted = finite ? get(rows, element(d)) / static_cast<double>(scale) : 1;
        set(elements, element(d), std::clamp(type == DType::i8 ? std::nearbyint(wanted) : wanted, -steps, steps));
        set(floats, element(d), scale * static_cast<float>(get(elements, element(d))));
      }
    });
  }

  Tensor elements, scales, floats;  // scales [...,1]
};

Results over_8_bit_pages(const Call& call, const Pager& pager, const Quantised& keys, const Quantised& values) {
  const Strided key_pages = pager.paged(call, keys.elements), value_pages = pager.paged(call, values.elements);
  const Strided key_scales = pager.paged(call, keys.scales), value_scales = pager.paged(call, values.scales);
  return over_pages(call, {key_pages.view(), value_pages.view(), pager.table, pager.lengths,
                           key_scales.view().select(3, 0), value_scales.view().select(3, 0)});
}

// As lse is stored: a finite one stays finite.
Tensor stored_lse(Tensor lse, DType type) {
  constexpr double highest = std::numeric_limits<float>::max();
  if (type == DType::f32 && lse.dtype() == DType::f64) {
    for (double& value : std::span(lse.as<double>(), static_cast<std::size_t>(lse.elements())))
      if (std::isfinite(value)) value = std::clamp(value, -highest, highest);
  }
  return convert(lse, type);
}

// A query counts as float32, and the output is rounded once to its type: the reference engine's from float64, in which
// it computes.
std::optional<Failure> check_8_bit_pages(const Call& call, const Pager& pager, const Pager& other,
                                         const std::string& where, DType type) {
  const Quantised keys(call.k, type), values(call.v, type);
  const Results found = over_8_bit_pages(call, pager, keys, values);
  if (call.q.dtype() == DType::bf16 && call.options.engine != Engine::reference) {
    // Weights may be rounded to bf16: other pages give the same bits, floats need not.
    return compare(where + " and others of " + name(type), found, over_8_bit_pages(call, other, keys, values));
  }
  Call gathered = call;
  const DType computed = call.options.engine == Engine::reference ? DType::f64 : DType::f32;
  const Tensor query = convert(call.q, computed), key = convert(keys.floats, computed),
               value = convert(values.floats, computed);
  gathered.q = query;
  gathered.k = key;
  gathered.v = value;
  Results expected = gathered.run();
  expected.out = convert(expected.out, call.q.dtype());
  expected.lse = stored_lse(std::move(expected.lse), call.lse_type());
  return compare(where + " of " + name(type), found, expected);
}

}  // namespace

std::optional<Failure> check_paged(const Prepared& prepared, const Call& call, const Results& base) {
  const AttentionOptions& options = call.options;
  if (options.mask || options.bias || options.dropout > 0 || (call.q.rank() == 2 && options.valid_lens))
    return std::nullopt;
  Random random = stream(prepared.materials.what, 32);
  constexpr std::int64_t sizes[] = {1, 2, 3, 16, 24, 64, 256};
  const std::int64_t page_size = sizes[random() % std::size(sizes)];
  const Pager pager(page_size, prepared.spec.keys, random);
  const std::string where = "in pages of " + std::to_string(page_size);
  const Strided key_pages = pager.paged(call, call.k);
  Strided value_pages;
  ConstTensorView values;
  if (prepared.materials.what.sharing == Sharing::columns) {
    values = key_pages.view().slice(3, 0, call.v.sizes().back());
  } else {
    value_pages = pager.paged(call, call.v);
    values = static_cast<const Strided&>(value_pages).view();
  }
  const Results found = over_pages(call, {key_pages.view(), values, pager.table, pager.lengths});
  if (auto failure = compare(where, found, base)) return failure;
  if (call.q.dtype() == DType::f64 || random() % 3 != 0) return std::nullopt;
  const DType type = random() % 2 == 0 ? DType::i8 : DType::f8e4m3;
  const Pager other(page_size == 7 ? 32 : 7, prepared.spec.keys, random);
  return check_8_bit_pages(call, pager, other, where, type);
}

}  // namespace headway::test::fuzz
