// Masks as values: combining them, and their member functions for given sizes.
#include <numeric>
#include <ostream>

#include "core/elements.h"
#include "core/out_of_memory.h"
#include "core/text.h"
#include "headway/error.h"
#include "masks/draw.h"
#include "masks/lists.h"
#include "masks/node.h"
#include "masks/resolve.h"

namespace headway {
namespace {

// ---- Combining two lists of spans ----

void add_both(std::span<const Span> left, std::span<const Span> right, SpanLists& lists) {
  for (std::size_t l = 0, r = 0; l < left.size() && r < right.size();) {
    lists.add(std::max(left[l].begin, right[r].begin), std::min(left[l].end, right[r].end));
    if (left[l].end < right[r].end) {
      ++l;
    } else {
      ++r;
    }
  }
}

void add_either(std::span<const Span> left, std::span<const Span> right, SpanLists& lists) {
  for (std::size_t l = 0, r = 0; l < left.size() || r < right.size();) {
    const bool from_left = r == right.size() || (l < left.size() && left[l].begin <= right[r].begin);
    const Span span = from_left ? left[l++] : right[r++];
    lists.add(span.begin, span.end);
  }
}

// ---- Combining two masks ----

std::int64_t joined_axis(const char* axis, std::int64_t left, std::int64_t right) {
  if (left != right && left != 1 && right != 1) {
    throw InvalidArgument(
        text("masks: the left mask has ", left, " ", axis, ", the right one ", right, ": expected as many, or 1"));
  }
  return left == 1 ? right : left;
}

// The text of a part: a | b inside an & needs parentheses.
std::string operand_text(MaskPair::Join join, const MaskNode& node) {
  const auto* pair = dynamic_cast<const MaskPair*>(&node);
  const bool is_weaker = pair != nullptr && join == MaskPair::Join::both && pair->join == MaskPair::Join::either;
  return is_weaker ? "(" + node.traits.text + ")" : node.traits.text;
}

MaskTraits joined(MaskPair::Join join, const MaskNode& left, const MaskNode& right) {
  const MaskTraits &l = left.traits, &r = right.traits;
  return {.text = operand_text(join, left) + (join == MaskPair::Join::both ? " & " : " | ") + operand_text(join, right),
          .batch = joined_axis("batch items", l.batch, r.batch),
          .heads = joined_axis("heads", l.heads, r.heads),
          .rows = std::gcd(l.rows, r.rows),
          .drawn = {std::max(l.drawn.queries, r.drawn.queries), std::max(l.drawn.keys, r.drawn.keys)},
          .reach = std::max(l.reach, r.reach)};
}

// The default sizes of a drawing.
MaskSizes drawn_sizes(const MaskTraits& traits) {
  constexpr std::int64_t small = 8, large = 4096;
  const std::int64_t free = std::clamp(2 * std::min(traits.reach, large), small, large);
  const std::int64_t queries = traits.drawn.queries > 0 ? traits.drawn.queries : free;
  return {queries, traits.drawn.keys > 0 ? traits.drawn.keys : queries};
}

constexpr std::int64_t most_drawn = 1 << 24;

void check_sizes(std::string_view operation, const Mask& mask, MaskSizes sizes) {
  constexpr std::int64_t longest = std::int64_t{1} << 60;
  for (const std::int64_t size : {sizes.queries, sizes.keys}) {
    if (size < 0 || size > longest) {
      throw InvalidArgument(text(operation, ": expected sizes from 0 to 2^60, found ", sizes.queries, " queries and ",
                                 sizes.keys, " keys"));
    }
  }
  mask.node()->check(operation, sizes);
}

void check_bounds(const char* name, ConstTensorView bounds) {
  if (!is_integer(bounds.dtype()) || bounds.device() != Device{} || bounds.rank() != 1 || bounds.size(0) < 1) {
    throw InvalidArgument(text("Mask.parts: ", name, " is ", bounds.dtype(), " of shape ", bounds.sizes(), " on ",
                               bounds.device(), ", expected integers (sequences + 1,) in host memory"));
  }
  std::int64_t previous = 0;
  for (std::int64_t b = 0; b < bounds.size(0); ++b) {
    const std::int64_t current = load_integer(bounds, b * bounds.stride(0));
    if (current < previous || (b == 0 && current != 0)) {
      throw InvalidArgument(
          text("Mask.parts: ", name, "[", b, "] is ", current, ", expected ", previous, b == 0 ? "" : " or more"));
    }
    previous = current;
  }
}

MaskParts copied(const ResolvedMask& resolved) {
  MaskParts parts;
  if (resolved.spans) {
    parts.spans = MaskSpans{resolved.spans->clone(), resolved.rows};
  }
  if (resolved.bools) {
    parts.bools = copied_to(*resolved.bools, Device{});
  }
  return parts;
}

void add_pairs(std::int64_t& sum, std::int64_t queries, std::int64_t keys) {
  std::int64_t product = 0;
  if (__builtin_mul_overflow(queries, keys, &product) || __builtin_add_overflow(sum, product, &sum)) {
    throw InvalidArgument("Mask.pairs: expected fewer than 2^63 pairs");
  }
}

std::int64_t pairs_of(const MaskNode& node, MaskSizes sizes) {
  const MaskLists made = lists_of(node, sizes);
  std::int64_t sum = 0;
  for (std::size_t piece = 0; piece < made.pieces.size(); ++piece) {
    const MaskEntries& entries = made.pieces[piece];
    for (std::size_t list = 0; list < made.lists[piece].size(); ++list) {
      const std::int64_t queries = MaskLists::queries(entries, entries.begin + static_cast<std::int64_t>(list));
      for (const Span& span : made.lists[piece][list]) {
        add_pairs(sum, queries, span.end - span.begin);
      }
    }
  }
  return sum;
}

}  // namespace

MaskPair::MaskPair(Join joined_by, Mask first, Mask second)
    : MaskNode(joined(joined_by, *first.node(), *second.node())),
      join(joined_by),
      left(std::move(first)),
      right(std::move(second)) {}

void MaskPair::check(std::string_view operation, MaskSizes sizes) const {
  left.node()->check(operation, sizes);
  right.node()->check(operation, sizes);
}

void MaskPair::append(const MaskEntries& entries, SpanLists& lists) const {
  SpanLists of_left(entries.sizes.keys), of_right(entries.sizes.keys);
  of_left.reserve(entries.end - entries.begin);
  of_right.reserve(entries.end - entries.begin);
  left.node()->append(entries, of_left);
  right.node()->append(entries, of_right);
  for (std::size_t list = 0; list < of_left.size(); ++list) {
    if (join == Join::both) {
      add_both(of_left[list], of_right[list], lists);
    } else {
      add_either(of_left[list], of_right[list], lists);
    }
    lists.close();
  }
}

Mask operator&(const Mask& left, const Mask& right) {
  return Mask(std::make_shared<MaskPair>(MaskPair::Join::both, left, right));
}

Mask operator|(const Mask& left, const Mask& right) {
  return Mask(std::make_shared<MaskPair>(MaskPair::Join::either, left, right));
}

std::int64_t Mask::batch() const { return node_->traits.batch; }

std::int64_t Mask::heads() const { return node_->traits.heads; }

MaskSpans Mask::spans(std::int64_t queries, std::int64_t keys) const try {
  check_sizes("Mask.spans", *this, {queries, keys});
  if (node_->has_dense()) {
    throw InvalidArgument(text("Mask.spans: ", node_->traits.text,
                               " has a dense part, expected none: from_bool finds the spans of bools"));
  }
  const MaskLists made = lists_of(*node_, {queries, keys});
  return {.spans = tensor_of(made, batch(), heads(), keys), .rows = made.rows};
} catch (...) {
  throw_own_error("Mask.spans");
}

MaskParts Mask::parts(std::int64_t queries, std::int64_t keys) const try {
  check_sizes("Mask.parts", *this, {queries, keys});
  return copied(*resolve_mask("Mask.parts", *this, {queries, keys}));
} catch (...) {
  throw_own_error("Mask.parts");
}

MaskParts Mask::parts(ConstTensorView cu_seqlens_q, ConstTensorView cu_seqlens_k) const try {
  check_bounds("cu_seqlens_q", cu_seqlens_q);
  check_bounds("cu_seqlens_k", cu_seqlens_k);
  if (cu_seqlens_q.size(0) != cu_seqlens_k.size(0)) {
    throw InvalidArgument(text("Mask.parts: cu_seqlens_k has ", cu_seqlens_k.size(0) - 1,
                               " sequences, cu_seqlens_q has ", cu_seqlens_q.size(0) - 1));
  }
  return copied(*resolve_packed_mask("Mask.parts", *this, cu_seqlens_q, cu_seqlens_k));
} catch (...) {
  throw_own_error("Mask.parts");
}

std::int64_t Mask::pairs(std::int64_t queries, std::int64_t keys) const try {
  check_sizes("Mask.pairs", *this, {queries, keys});
  return pairs_of(*node_, {queries, keys});
} catch (...) {
  throw_own_error("Mask.pairs");
}

Tensor Mask::to_bool(std::int64_t queries, std::int64_t keys) const try {
  check_sizes("Mask.to_bool", *this, {queries, keys});
  return bools_of(*node_, {queries, keys});
} catch (...) {
  throw_own_error("Mask.to_bool");
}

std::string Mask::draw(std::int64_t queries, std::int64_t keys) const try {
  check_sizes("Mask.draw", *this, {queries, keys});
  if (queries > most_drawn) {
    throw InvalidArgument(text("Mask.draw: found ", queries, " queries, expected at most ", most_drawn));
  }
  return drawing_of(*node_, {queries, keys});
} catch (...) {
  throw_own_error("Mask.draw");
}

std::string to_string(const Mask& mask) { return mask.node()->traits.text; }

std::ostream& operator<<(std::ostream& stream, const Mask& mask) {
  const MaskSizes sizes = drawn_sizes(mask.node()->traits);
  try {
    return stream << mask.draw(sizes.queries, sizes.keys);
  } catch (const InvalidArgument&) {  // parts of different sizes, or too many queries to look at
    return stream << to_string(mask);
  }
}

}  // namespace headway
