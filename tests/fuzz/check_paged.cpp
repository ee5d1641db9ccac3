// The same call over keys and values in pages: the bits of the call on rows that lie one behind the other.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "fuzz/check.h"
#include "headway/serving.h"

namespace headway::test::fuzz {
namespace {

// [B,Hkv,S,D], or one sequence of it, put into pages of its own; slots that no token has are NaN.
class Pager {
 public:
  Pager(std::int64_t page_size, const std::vector<std::int64_t>& keys, Random& random) : page_size_(page_size) {
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
    table = filled({batch, most}, DType::i32, -1);
    lengths = Tensor({batch}, DType::i64);
    for (std::int64_t b = 0; b < batch; ++b) {
      const std::int64_t length = keys[static_cast<std::size_t>(b)];
      set(lengths, {b}, static_cast<double>(length));
      for (std::int64_t n = 0; n < pages_of(length); ++n) set(table, {b, n}, static_cast<double>(page(b, n)));
    }
  }

  // rows(b) is [Hkv,length,D].
  template <class Rows>
  Tensor paged(std::int64_t heads, std::int64_t width, DType type, const Rows& rows) const {
    Tensor pages = filled({pages_, page_size_, heads, width}, type, NAN);
    for (std::int64_t b = 0; b < table.size(0); ++b) {
      const ConstTensorView sequence = rows(b);
      for (std::int64_t j = 0; j < sequence.size(1); ++j)
        copy(sequence.select(1, j), TensorView(pages).select(0, page(b, j / page_size_)).select(0, j % page_size_));
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
  std::vector<std::int64_t> first_;  // of each sequence, among all pages
  std::vector<std::int64_t> order_;
};

ConstTensorView with_rank_4(ConstTensorView view) {
  if (view.rank() == 4) return view;
  return view.rank() == 3 ? view.unsqueeze(1) : view.unsqueeze(0).unsqueeze(0);
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
  const auto paged = [&](ConstTensorView rows) {
    if (call.packing) {
      return pager.paged(rows.size(1), rows.size(2), rows.dtype(), [&](std::int64_t b) {
        const auto at = static_cast<std::size_t>(b);
        return rows.slice(0, call.packing->starts_k[at], call.packing->starts_k[at + 1]).transpose(0, 1);
      });
    }
    const ConstTensorView four = with_rank_4(rows);
    return pager.paged(four.size(1), four.size(3), rows.dtype(), [&](std::int64_t b) { return four.select(0, b); });
  };
  const Tensor key_pages = paged(call.k), value_pages = paged(call.v);
  const PagedKeys keys{key_pages, value_pages, pager.table, pager.lengths};
  Tensor out = filled(call.out_sizes(), call.q.dtype(), NAN);
  Tensor lse = filled(call.lse_sizes(), call.lse_type(), NAN);
  if (call.packing) {
    const Tensor bounds =
        Tensor::of<std::int64_t>({static_cast<std::int64_t>(call.packing->starts_q.size())}, call.packing->starts_q);
    attention_paged(call.q, bounds, keys, out, options, {.lse = lse});
  } else {
    const auto with_heads = [&](Tensor& tensor) {
      const TensorView view = tensor;
      return call.q.rank() == 4 ? view : call.q.rank() == 3 ? view.unsqueeze(1) : view.unsqueeze(0).unsqueeze(0);
    };
    AttentionOptions of_heads = options;
    if (call.q.rank() == 3 && options.spans && options.spans->rank() == 4) {  // [B,Sq,R,2]
      of_heads.spans = options.spans->unsqueeze(1);
    }
    attention_paged(with_rank_4(call.q), keys, with_heads(out), of_heads, {.lse = with_heads(lse)});
  }
  const std::string check_name = "in pages of " + std::to_string(page_size);
  if (const auto text = differing(out, base.out)) return Failure{check_name + ", out", *text};
  if (const auto text = differing(lse, base.lse)) return Failure{check_name + ", lse", *text};
  return std::nullopt;
}

}  // namespace headway::test::fuzz
