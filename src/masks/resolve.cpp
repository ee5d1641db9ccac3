#include "masks/resolve.h"

#include <cstring>

#include "core/elements.h"
#include "core/text.h"
#include "headway/error.h"
#include "masks/lists.h"

namespace headway {
namespace {

// A mask with dense parts as bools & spans, either of which may be absent.
struct Split {
  std::shared_ptr<const MaskNode> spans;
  std::optional<ConstTensorView> bools;  // a dense mask's own, or
  Tensor own_bools;
};

std::shared_ptr<const MaskNode> joined(MaskPair::Join join, const Split& left, const Split& right) {
  return std::make_shared<MaskPair>(join, Mask(left.spans), Mask(right.spans));
}

Split made_of_bools(const std::shared_ptr<const MaskNode>& spans, Tensor bools) {
  Split split{.spans = spans, .bools = {}, .own_bools = std::move(bools)};
  split.bools = std::as_const(split.own_bools).view();
  return split;
}

// Two sets of bools are combined into one; bools combined by & with a mask of spans stay separate.
Split split_both(MaskSizes sizes, const MaskPair& pair, Split left, Split right) {
  if (left.bools && right.bools) {
    const auto spans = left.spans && right.spans ? joined(MaskPair::Join::both, left, right)
                       : left.spans              ? left.spans
                                                 : right.spans;
    return made_of_bools(spans, bools_of(pair, sizes));
  }
  Split& with = left.bools ? left : right;
  const Split& without = left.bools ? right : left;
  with.spans = with.spans ? joined(MaskPair::Join::both, with, without) : without.spans;
  return std::move(with);
}

Split split(const std::shared_ptr<const MaskNode>& node, MaskSizes sizes) {
  if (!node->has_dense()) {
    return {.spans = node, .bools = {}, .own_bools = {}};
  }
  if (const auto* dense = dynamic_cast<const DenseMask*>(node.get())) {
    return {.spans = {}, .bools = dense->bools.view(), .own_bools = {}};
  }
  const auto& pair = dynamic_cast<const MaskPair&>(*node);
  Split left = split(pair.left.node(), sizes), right = split(pair.right.node(), sizes);
  if (pair.join == MaskPair::Join::both) {
    return split_both(sizes, pair, std::move(left), std::move(right));
  }
  // The bools alone are exact; spans that cover both sides let an engine skip tiles outside them.
  const auto spans = left.spans && right.spans ? joined(MaskPair::Join::either, left, right) : nullptr;
  return made_of_bools(spans, bools_of(pair, sizes));
}

// The memory that a call keeps: the result and the mask, since the result may view the mask's bools. The cache keeps
// only the result, since a mask that owned itself would never be freed.
struct Held {
  std::shared_ptr<const MaskNode> mask;
  std::shared_ptr<const ResolvedMask> resolved;
};

std::shared_ptr<const ResolvedMask> held(const Mask& mask, const std::shared_ptr<const ResolvedMask>& resolved) {
  return {std::make_shared<Held>(Held{mask.node(), resolved}), resolved.get()};
}

template <class Make>
std::shared_ptr<const ResolvedMask> cached(const Mask& mask, const std::vector<std::int64_t>& sizes, const Make& make) {
  MaskNode::Cache& cache = mask.node()->cache;
  {
    const std::lock_guard lock(cache.mutex);
    if (cache.resolved && cache.sizes == sizes) {
      return held(mask, cache.resolved);
    }
  }
  const std::shared_ptr<const ResolvedMask> made = make();
  const std::lock_guard lock(cache.mutex);
  cache.sizes = sizes;
  cache.resolved = made;
  return held(mask, made);
}

// The result from the two parts, for both kinds of calls; a mask with only a dense part has no spans.
template <class MakeSpans>
std::shared_ptr<const ResolvedMask> resolved_from(Split&& parts, const MakeSpans& make_spans) {
  auto result = std::make_shared<ResolvedMask>();
  if (parts.spans) {
    make_spans(*parts.spans, *result);
  }
  result->bools = parts.bools;
  result->own_bools = std::move(parts.own_bools);
  return result;
}

std::vector<std::int64_t> integers_of(ConstTensorView view) {
  std::vector<std::int64_t> numbers;
  for (std::int64_t i = 0; i < view.size(0); ++i) {
    numbers.push_back(load_integer(view, i * view.stride(0)));
  }
  return numbers;
}

PackedSizes packed_sizes(const std::vector<std::int64_t>& queries, const std::vector<std::int64_t>& keys) {
  PackedSizes packed;
  for (std::size_t b = 0; b + 1 < queries.size(); ++b) {
    const MaskSizes sizes{queries[b + 1] - queries[b], keys[b + 1] - keys[b]};
    packed.sequences.push_back(sizes);
    packed.longest = {std::max(packed.longest.queries, sizes.queries), std::max(packed.longest.keys, sizes.keys)};
  }
  packed.total_queries = queries.back();
  return packed;
}

// Dense parts have the sizes of the longest sequences, as mask arrays have in packed calls.
Split packed_split(std::string_view operation, const std::shared_ptr<const MaskNode>& node, MaskSizes longest) {
  if (!node->has_dense() || dynamic_cast<const DenseMask*>(node.get()) != nullptr) {
    if (node->has_dense()) {
      node->check(operation, longest);
    }
    return split(node, longest);
  }
  const auto& pair = dynamic_cast<const MaskPair&>(*node);
  Split left = packed_split(operation, pair.left.node(), longest);
  Split right = packed_split(operation, pair.right.node(), longest);
  if (pair.join == MaskPair::Join::either || (left.bools && right.bools)) {
    throw Unsupported(text(operation, ": the mask ", node->traits.text,
                           " joins bools with other masks, expected one dense part, joined by &, in packed sequences"));
  }
  return split_both(longest, pair, std::move(left), std::move(right));
}

void check_sequences(std::string_view operation, const MaskNode& node, const PackedSizes& packed) {
  const auto sequences = static_cast<std::int64_t>(packed.sequences.size());
  if (node.traits.batch != 1 && node.traits.batch != sequences) {
    throw InvalidArgument(text(operation, ": mask has ", node.traits.batch, " batch items, expected the ", sequences,
                               " sequences, or 1"));
  }
  for (std::size_t b = 0; b < packed.sequences.size(); ++b) {
    const MaskSizes& sizes = packed.sequences[b];
    try {
      node.check(operation, sizes);
    } catch (const InvalidArgument&) {
      node.check(text(operation, ": sequence ", b), sizes);
    }
  }
}

}  // namespace

Tensor bools_of(const MaskNode& node, MaskSizes sizes) {
  Tensor bools({node.traits.batch, node.traits.heads, sizes.queries, sizes.keys}, DType::b8);
  const MaskLists made = lists_of(node, sizes);
  auto* row = static_cast<std::uint8_t*>(bools.data());
  for (std::size_t piece = 0; piece < made.pieces.size(); ++piece) {
    const MaskEntries& entries = made.pieces[piece];
    for (std::size_t list = 0; list < made.lists[piece].size(); ++list) {
      const std::int64_t queries = MaskLists::queries(entries, entries.begin + static_cast<std::int64_t>(list));
      for (std::int64_t i = 0; i < queries; ++i, row += sizes.keys) {
        for (const Span& span : made.lists[piece][list]) {
          std::memset(row + span.begin, 1, static_cast<std::size_t>(span.end - span.begin));
        }
      }
    }
  }
  return bools;
}

std::shared_ptr<const ResolvedMask> resolve_mask(std::string_view operation, const Mask& mask, MaskSizes sizes) {
  mask.node()->check(operation, sizes);
  return cached(mask, {sizes.queries, sizes.keys}, [&] {
    return resolved_from(split(mask.node(), sizes), [&](const MaskNode& spans, ResolvedMask& result) {
      const MaskLists made = lists_of(spans, sizes);
      result.rows = made.rows;
      result.spans = tensor_of(made, spans.traits.batch, spans.traits.heads, sizes.keys);
    });
  });
}

std::shared_ptr<const ResolvedMask> resolve_packed_mask(std::string_view operation, const Mask& mask,
                                                        ConstTensorView cu_seqlens_q, ConstTensorView cu_seqlens_k) {
  const std::vector<std::int64_t> queries = integers_of(cu_seqlens_q), keys = integers_of(cu_seqlens_k);
  const PackedSizes packed = packed_sizes(queries, keys);
  std::vector<std::int64_t> bounds{-1};  // no sizes of an ordinary call begin so
  bounds.insert(bounds.end(), queries.begin(), queries.end());
  bounds.insert(bounds.end(), keys.begin(), keys.end());
  return cached(mask, bounds, [&] {
    Split parts = packed_split(operation, mask.node(), packed.longest);
    if (parts.spans) {
      check_sequences(operation, *parts.spans, packed);
    }
    return resolved_from(std::move(parts), [&](const MaskNode& spans, ResolvedMask& result) {
      const MaskLists made = packed_lists_of(spans, packed);
      result.spans = tensor_of(made, 1, spans.traits.heads, packed.longest.keys);
    });
  });
}

}  // namespace headway
