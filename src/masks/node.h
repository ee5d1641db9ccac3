// The parts of a structured mask, and their spans. A kind of mask is one function that computes the spans of a row: see
// span_mask below, and kinds.cpp.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "headway/masks.h"

namespace headway {

struct Span {
  std::int64_t begin, end;
};

struct MaskSizes {
  std::int64_t queries = 0;
  std::int64_t keys = 0;
  std::int64_t offset() const { return keys - queries; }
};

// Consecutive lists of spans. The spans of a list must be added in ascending order of their begins; those that overlap
// or touch are joined.
class SpanLists {
 public:
  explicit SpanLists(std::int64_t keys) : keys_(keys) {}

  // Reserves memory for this many lists of about one span.
  void reserve(std::int64_t lists) {
    spans_.reserve(static_cast<std::size_t>(lists));
    ends_.reserve(static_cast<std::size_t>(lists));
  }

  // Adds to the current list; the span is cut to the keys.
  void add(std::int64_t begin, std::int64_t end) {
    begin = std::max<std::int64_t>(begin, 0);
    end = std::min(end, keys_);
    if (begin >= end) {
      return;
    }
    if (spans_.size() > open_ && spans_.back().end >= begin) {
      spans_.back().end = std::max(spans_.back().end, end);
    } else {
      spans_.push_back({begin, end});
    }
  }
  void close() {
    ends_.push_back(spans_.size());
    longest_ = std::max(longest_, spans_.size() - open_);
    open_ = spans_.size();
  }

  std::size_t size() const { return ends_.size(); }
  std::size_t longest() const { return longest_; }  // of its lists, in spans
  std::span<const Span> operator[](std::size_t list) const {
    const std::size_t begin = list == 0 ? 0 : ends_[list - 1];
    return {spans_.data() + begin, ends_[list] - begin};
  }

 private:
  std::int64_t keys_;
  std::vector<Span> spans_;
  std::vector<std::size_t> ends_;
  std::size_t open_ = 0, longest_ = 0;
};

// Consecutive entries of one batch item and head. An entry is a block of `rows` queries that share their spans.
struct MaskEntries {
  MaskSizes sizes;
  std::int64_t batch_item = 0, head = 0;
  std::int64_t begin = 0, end = 0;
  std::int64_t rows = 1;
};

// The data on which the spans of one row depend.
struct MaskRow {
  MaskSizes sizes;
  std::int64_t batch_item = 0, head = 0;  // 0 where the mask has one for all
  std::int64_t query = 0;
  std::int64_t place() const { return query + sizes.offset(); }  // the key at which the query stands
};

// The properties of a mask.
struct MaskTraits {
  std::string text;        // as it is written: "window(4, 0)"
  std::int64_t batch = 1;  // of the mask's own axes
  std::int64_t heads = 1;
  std::int64_t rows = 1;   // consecutive queries that have the same spans; 0 for all of them
  MaskSizes drawn = {};    // sizes that it has, or 0
  std::int64_t reach = 0;  // how many keys a drawing should show at least half of
};

struct ResolvedMask;

struct MaskNode {
  explicit MaskNode(MaskTraits described) : traits(std::move(described)) {}
  virtual ~MaskNode() = default;

  // InvalidArgument, whose text begins with `operation`, for sizes that do not fit.
  virtual void check(std::string_view operation, MaskSizes sizes) const = 0;
  // Appends a list for each entry. entries.rows divides traits.rows.
  virtual void append(const MaskEntries& entries, SpanLists& lists) const = 0;
  virtual bool has_dense() const { return false; }

  const MaskTraits traits;

  // The result of the last resolution (resolve.cpp).
  struct Cache {
    std::mutex mutex;
    std::vector<std::int64_t> sizes;
    std::shared_ptr<const ResolvedMask> resolved;
  };
  mutable Cache cache;
};

// Two masks combined by & or |.
struct MaskPair final : MaskNode {
  enum class Join : std::uint8_t { both, either };
  MaskPair(Join joined_by, Mask first, Mask second);
  void check(std::string_view operation, MaskSizes sizes) const override;
  void append(const MaskEntries& entries, SpanLists& lists) const override;
  bool has_dense() const override { return left.node()->has_dense() || right.node()->has_dense(); }

  const Join join;
  const Mask left, right;
};

// Bools [B|1, H|1, Sq|1, Sk|1].
struct DenseMask final : MaskNode {
  DenseMask(MaskTraits described, Tensor values) : MaskNode(std::move(described)), bools(std::move(values)) {}
  void check(std::string_view operation, MaskSizes sizes) const override;
  void append(const MaskEntries& entries, SpanLists& lists) const override;
  bool has_dense() const override { return true; }

  const Tensor bools;  // 0 and 1
};

// Accepts any sizes.
struct FitsAll {
  void operator()(std::string_view, MaskSizes) const {}
};

template <class Fill, class Fits>
struct SpanMask final : MaskNode {
  SpanMask(MaskTraits described, Fill filled_by, Fits checked_by)
      : MaskNode(std::move(described)), fill(std::move(filled_by)), fits(std::move(checked_by)) {}

  void check(std::string_view operation, MaskSizes sizes) const override { fits(operation, sizes); }
  void append(const MaskEntries& entries, SpanLists& lists) const override {
    MaskRow row{.sizes = entries.sizes,
                .batch_item = traits.batch == 1 ? 0 : entries.batch_item,
                .head = traits.heads == 1 ? 0 : entries.head};
    for (std::int64_t entry = entries.begin; entry < entries.end; ++entry) {
      row.query = entry * entries.rows;
      fill(row, lists);
      lists.close();
    }
  }

  const Fill fill;
  const Fits fits;
};

// A new kind of mask: fill(row, spans) adds the spans of one row by spans.add(begin, end), in ascending order of their
// begins; fits(operation, sizes) throws for sizes that do not fit.
template <class Fill, class Fits = FitsAll>
Mask span_mask(MaskTraits traits, Fill fill, Fits fits = {}) {
  return Mask(std::make_shared<SpanMask<Fill, Fits>>(std::move(traits), std::move(fill), std::move(fits)));
}

}  // namespace headway
