// From the views and options of a call to the oracle's plain numbers.
#include <algorithm>
#include <cmath>

#include "support/oracle.h"

namespace headway::test {
namespace {

std::optional<Array> read(const std::optional<ConstTensorView>& view) {
  return view ? std::optional(headway::test::read(*view)) : std::nullopt;
}

// One head per item: [B,S,D] is [B,1,S,D], [S,D] is [1,1,S,D]; a mask of the call's rank gains the same axes.
Dims with_rank_4(const Dims& sizes, int call_rank) {
  if (call_rank == 3 && sizes.size() == 3) return {sizes[0], 1, sizes[1], sizes[2]};
  Dims result{1, 1, 1, 1};
  for (int axis = 0; axis < sizes.size(); ++axis) result[4 - sizes.size() + axis] = sizes[axis];
  return result;
}

std::optional<Array> broadcastable(const std::optional<ConstTensorView>& view, int call_rank) {
  if (!view) return std::nullopt;
  return headway::test::read(*view).reshaped(with_rank_4(view->sizes(), call_rank));
}

// [B|1,H|1,entries,R,2] from what a call of this rank takes.
std::optional<Array> spans_of(const std::optional<ConstTensorView>& view, int call_rank) {
  if (!view) return std::nullopt;
  const Dims& sizes = view->sizes();
  Dims wide{1, 1, 1, 1, 1};
  for (int axis = 0; axis < sizes.size(); ++axis) wide[5 - sizes.size() + axis] = sizes[axis];
  if (call_rank == 3 && sizes.size() == 4) wide = {sizes[0], 1, sizes[1], sizes[2], sizes[3]};
  return headway::test::read(*view).reshaped(wide);
}

// Everything but q, k, v, rows and keys.
Spec options_only(const AttentionOptions& options, int call_rank, ConstTensorView q) {
  const std::int64_t head_dim = q.size(q.rank() - 1);
  Spec spec;
  spec.type = q.dtype();
  spec.mask = broadcastable(options.mask, call_rank);
  spec.bias = broadcastable(options.bias, call_rank);
  spec.valid_lens = read(options.valid_lens);
  spec.query_lens = read(options.query_lens);
  spec.spans = spans_of(options.spans, call_rank);
  spec.span_rows = options.span_rows;
  spec.alibi_slopes = read(options.alibi_slopes);
  spec.sinks = read(options.sinks);
  spec.causal = options.causal;
  spec.window = options.window.value_or(Window{});
  spec.scale = head_dim == 0 ? 0 : 1 / std::sqrt(static_cast<Real>(head_dim));
  if (options.scale) spec.scale = *options.scale;
  spec.softcap = options.softcap;
  spec.dropout = options.dropout;
  spec.seed = options.seed.value_or(0);
  return spec;
}

std::int64_t longest(const std::vector<std::int64_t>& starts) {
  std::int64_t result = 0;
  for (std::size_t b = 0; b + 1 < starts.size(); ++b) result = std::max(result, starts[b + 1] - starts[b]);
  return result;
}

// Calls visit(b, row inside the sequence, row in the pack).
template <class Visit>
void each_packed_row(const std::vector<std::int64_t>& starts, Visit visit) {
  for (std::size_t b = 0; b + 1 < starts.size(); ++b)
    for (std::int64_t row = starts[b]; row < starts[b + 1]; ++row)
      visit(static_cast<std::int64_t>(b), row - starts[b], row);
}

std::vector<std::int64_t> lengths(const std::vector<std::int64_t>& starts) {
  std::vector<std::int64_t> result;
  for (std::size_t b = 0; b + 1 < starts.size(); ++b) result.push_back(starts[b + 1] - starts[b]);
  return result;
}

}  // namespace

std::int64_t Packing::longest_q() const { return longest(starts_q); }
std::int64_t Packing::longest_k() const { return longest(starts_k); }

Spec spec_of(ConstTensorView q, ConstTensorView k, ConstTensorView v, const AttentionOptions& options) {
  const int rank = q.rank();
  Spec spec = options_only(options, rank, q);
  spec.q = headway::test::read(q).reshaped(with_rank_4(q.sizes(), rank));
  spec.k = headway::test::read(k).reshaped(with_rank_4(k.sizes(), rank));
  spec.v = headway::test::read(v).reshaped(with_rank_4(v.sizes(), rank));
  spec.rows.assign(static_cast<std::size_t>(spec.batch()), spec.q.size(2));
  spec.keys.assign(static_cast<std::size_t>(spec.batch()), spec.k.size(2));
  return spec;
}

Spec spec_of(ConstTensorView q, ConstTensorView k, ConstTensorView v, const Packing& packing,
             const AttentionOptions& options) {
  Spec spec = options_only(options, 4, q);
  spec.q = padded(headway::test::read(q), packing.starts_q);
  spec.k = padded(headway::test::read(k), packing.starts_k);
  spec.v = padded(headway::test::read(v), packing.starts_k);
  spec.rows = lengths(packing.starts_q);
  spec.keys = lengths(packing.starts_k);
  spec.span_begins = packing.starts_q;
  return spec;
}

Array padded(const Array& packed, const std::vector<std::int64_t>& starts) {
  const std::int64_t heads = packed.size(1), width = packed.size(2);
  Array result({static_cast<std::int64_t>(starts.size()) - 1, heads, longest(starts), width});
  each_packed_row(starts, [&](std::int64_t b, std::int64_t i, std::int64_t row) {
    for (std::int64_t h = 0; h < heads; ++h)
      for (std::int64_t d = 0; d < width; ++d) result(b, h, i, d) = packed(row, h, d);
  });
  return result;
}

Array packed(const Array& padded, const std::vector<std::int64_t>& starts) {
  const std::int64_t heads = padded.size(1), width = padded.size(3);
  Array result({starts.back(), heads, width});
  each_packed_row(starts, [&](std::int64_t b, std::int64_t i, std::int64_t row) {
    for (std::int64_t h = 0; h < heads; ++h)
      for (std::int64_t d = 0; d < width; ++d) result(row, h, d) = padded(b, h, i, d);
  });
  return result;
}

Array packed_lse(const Array& lse, const std::vector<std::int64_t>& starts) {
  Array result({lse.size(1), starts.back()});
  each_packed_row(starts, [&](std::int64_t b, std::int64_t i, std::int64_t row) {
    for (std::int64_t h = 0; h < lse.size(1); ++h) result(h, row) = lse(b, h, i);
  });
  return result;
}

}  // namespace headway::test
