// Structured masks: small values that say which keys a query may see, in memory that grows with the tokens.
//
//   attention(q, k, v, {.mask = masks::documents(ids) & masks::causal()});
//
// They combine with & and |. For Sq queries and Sk keys a mask becomes a few spans of keys for each query, or for each
// block of queries; nothing of size Sq x Sk is built unless a dense mask is among its parts. A mask depends on Sq and
// Sk only; lengths and the other options restrict it further, like an &. Queries and keys are aligned at their ends,
// with offset = Sk - Sq: the last query is at the position of the last key. There is no ~, since the complement of
// most kinds takes many spans a row.
#pragma once

#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <iosfwd>
#include <memory>
#include <optional>
#include <ranges>
#include <string>
#include <vector>

#include "headway/cxx20.h"
#include "headway/tensor.h"

#pragma GCC visibility push(default)
namespace headway {

struct MaskNode;  // one part of a mask; private to the library

// A mask for given sizes. Row i of batch item b and head h may see the keys begin <= j < end of the entry i / rows.
struct MaskSpans {
  Tensor spans;  // integers [B|1, H|1, ceil(Sq / rows), R, 2]; in each entry sorted, with gaps, empty ones last
  std::int64_t rows = 1;  // consecutive queries that share an entry
};

// A mask of any kind for given sizes: a pair is allowed if both parts allow it; an absent part allows all pairs.
struct MaskParts {
  std::optional<MaskSpans> spans;  // packed: [1, H|1, total_q, R, 2], counted inside the sequence
  std::optional<Tensor> bools;     // of dense masks: [B|1, H|1, Sq|1, Sk|1]; packed: sizes of the longest sequences
};

// A value: copies share their parts, which never change. A mask caches the spans for the sizes that it was last used
// with, so that the layers of a model share them.
class Mask {
 public:
  explicit Mask(std::shared_ptr<const MaskNode> node) : node_(std::move(node)) {}

  // The mask's own axes: 1 if it is the same for every batch item, or for every head.
  std::int64_t batch() const;
  std::int64_t heads() const;
  // The spans for these sizes. InvalidArgument for sizes that do not fit, and for a mask with a dense part.
  MaskSpans spans(std::int64_t queries, std::int64_t keys) const;
  // The same with the bools of dense parts, and for packed sequences, as attention reads them.
  MaskParts parts(std::int64_t queries, std::int64_t keys) const;
  MaskParts parts(ConstTensorView cu_seqlens_q, ConstTensorView cu_seqlens_k) const;
  // The number of allowed pairs, over the mask's own axes.
  std::int64_t pairs(std::int64_t queries, std::int64_t keys) const;
  // The same as bools [B|1, H|1, Sq, Sk], for tests.
  Tensor to_bool(std::int64_t queries, std::int64_t keys) const;
  // A drawing of the first batch item and head that fits a screen: a title, then a line for each row of cells.
  std::string draw(std::int64_t queries, std::int64_t keys) const;

  const std::shared_ptr<const MaskNode>& node() const { return node_; }

 private:
  std::shared_ptr<const MaskNode> node_;
};

// &: allowed by both; |: allowed by either. InvalidArgument if the numbers of batch items or heads differ.
Mask operator&(const Mask& left, const Mask& right);
Mask operator|(const Mask& left, const Mask& right);

// The mask as it is written: "causal() & documents(8 ids)".
std::string to_string(const Mask& mask);
// A drawing at the sizes of the mask's arrays, or at small sizes that show its shape.
std::ostream& operator<<(std::ostream& stream, const Mask& mask);

// The mask in AttentionOptions: a view of bools or a structured mask.
class MaskOption : public std::optional<ConstTensorView> {
 public:
  using std::optional<ConstTensorView>::optional;
  MaskOption(const std::optional<ConstTensorView>& bools)  // NOLINT(google-explicit-constructor)
      : std::optional<ConstTensorView>(bools) {}
  MaskOption(Mask mask) : structured(std::move(mask)) {}  // NOLINT(google-explicit-constructor)

  std::optional<Mask> structured = {};
};

namespace masks {

// The integers of a mask, copied from a number, a range, a list or a view. A view on a device is waited for.
class Integers {
 public:
  Integers(ConstTensorView view);                              // NOLINT(google-explicit-constructor)
  Integers(const Tensor& tensor) : Integers(tensor.view()) {}  // NOLINT(google-explicit-constructor)
  template <std::integral T>
  Integers(T number)  // NOLINT(google-explicit-constructor)
      : Integers(std::vector<std::int64_t>{Dims::Number(number).value}, Dims{}) {}
  Integers(std::initializer_list<std::int64_t> numbers)  // NOLINT(google-explicit-constructor)
      : Integers(std::vector<std::int64_t>(numbers), Dims{numbers.size()}) {}
  template <std::ranges::input_range Range>
  requires std::integral<std::ranges::range_value_t<Range>> Integers(
      const Range& range)  // NOLINT(google-explicit-constructor)
      : Integers(widened(range)) {}

  const Dims& sizes() const { return sizes_; }
  const std::vector<std::int64_t>& numbers() const { return numbers_; }

 private:
  Integers(std::vector<std::int64_t> numbers, Dims sizes) : numbers_(std::move(numbers)), sizes_(sizes) {}
  template <class Range>
  static Integers widened(const Range& range) {
    std::vector<std::int64_t> wide;
    for (const auto number : range) {
      wide.push_back(Dims::Number(number).value);
    }
    const Dims sizes{wide.size()};
    return {std::move(wide), sizes};
  }

  std::vector<std::int64_t> numbers_;
  Dims sizes_;
};

// j <= i + offset: the last query sees every key.
Mask causal();

// i + offset - left <= j <= i + offset + right; a side without a number is unlimited.
Mask window(std::optional<std::int64_t> left, std::optional<std::int64_t> right);

// The first keys: j < n, cut to Sk. n is a number, or one for each batch item.
Mask first(const Integers& n);

// first(n) | causal(): every query sees the first n keys, its own, and those before it.
Mask prefix(const Integers& n);

// Tokens with the same id see each other, wherever in the sequence they are; a token with a negative id sees nothing
// and is not seen. ids is [Sq] or [B,Sq]; if keys are not the queries' own tokens, key_ids is [Sk] or [B,Sk].
Mask documents(const Integers& ids, const std::optional<Integers>& key_ids = {});

// Consecutive documents of these lengths: [documents], or [B, documents] padded with 0. Tokens after the last document
// see nothing and are not seen.
Mask documents_of(const Integers& lengths);

// Blocks of queries see blocks of keys: bools [Nq,Nk], [H,Nq,Nk] or [B,H,Nq,Nk], in blocks of `size` queries by `size`
// keys, or of two sizes. The last blocks may be cut. The mask is stored as a list for each block of queries.
Mask blocks(ConstTensorView keep, std::int64_t size);
Mask blocks(ConstTensorView keep, std::int64_t query_size, std::int64_t key_size);

// The last Sq keys are tokens of a tree: a token sees itself, its ancestors, and every key before the tree. parents is
// [Sq] or [B,Sq], each smaller than its own index, or -1 for a root.
Mask tree(const Integers& parents);

// Spans [N,R,2], [H,N,R,2] or [B,H,N,R,2]: begin <= j < end. Each entry applies to `rows` consecutive queries.
Mask spans(const Integers& spans, std::int64_t rows = 1);

// Bools [Sq,Sk], [H,Sq,Sk] or [B,H,Sq,Sk], copied; true = attend. dense(x) & y keeps the bools and the spans of y side
// by side; dense(x) | y converts both to bools.
Mask dense(ConstTensorView bools);

// The same bools as spans if these take less memory, else as dense.
Mask from_bool(ConstTensorView bools);

}  // namespace masks

}  // namespace headway
#pragma GCC visibility pop
