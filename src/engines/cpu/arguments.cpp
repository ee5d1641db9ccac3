// Filling in kernel arguments.
#include "engines/cpu/arguments.h"

#include <algorithm>
#include <bit>

#include "core/elements.h"

namespace headway::cpu {
namespace {

std::int64_t bytes_of(DType dtype) { return static_cast<std::int64_t>(size_of(dtype)); }

// The [rows, columns] matrix of head h of batch item b, from row `begin` on, with elements of `bytes` each.
template <class MatrixType, class View>
MatrixType matrix_of(const View& view, std::int64_t bytes, std::int64_t b, std::int64_t h, std::int64_t begin) {
  using Byte = std::conditional_t<std::is_same_v<MatrixType, Matrix>, const char, char>;
  auto* data = static_cast<Byte*>(view.data());
  return {data == nullptr ? nullptr : data + row_offset(view, b, h, begin) * bytes, view.stride(2), view.stride(3)};
}

template <class MatrixType, class View>
MatrixType matrix_of(const View& view, std::int64_t b, std::int64_t h, std::int64_t begin) {
  return matrix_of<MatrixType>(view, bytes_of(view.dtype()), b, h, begin);
}

// Rows of kv head g of sequence b, in pages.
RowSource paged_source(const Problem& problem, const ConstTensorView& rows,
                       const std::optional<ConstTensorView>& scales, std::int64_t b, std::int64_t g) {
  const ConstTensorView& table = problem.pages->table;
  RowSource source = source_layout(problem, rows);
  source.rows = matrix_of<Matrix>(rows, 0, g, 0);
  source.table = static_cast<const char*>(table.data()) + b * table.stride(0) * bytes_of(table.dtype());
  if (scales) {
    source.scales = static_cast<const float*>(scales->data()) + g * scales->stride(1);
    source.scale_page_stride = scales->stride(0);
    source.scale_stride = scales->stride(2);
  }
  return source;
}

Modifiers modifiers_of(const Problem& problem, std::int64_t b, std::int64_t h) {
  Modifiers result;
  result.softcap = problem.softcap.value_or(0);
  if (problem.bias) {
    result.bias = matrix_of<Matrix>(*problem.bias, b, h, 0);
    result.bias_storage = storage_of(problem.bias->dtype());
  }
  if (problem.mask) {
    result.mask = matrix_of<Matrix>(*problem.mask, b, h, 0);
  }
  if (problem.alibi_slopes) {
    result.alibi_slope = load_float(*problem.alibi_slopes, h * problem.alibi_slopes->stride(0));
    result.has_alibi = true;
  }
  result.any = problem.softcap || problem.bias || problem.mask || problem.alibi_slopes;
  return result;
}

DropoutRule dropout_of(const Problem& problem, std::int64_t b, std::int64_t h) {
  DropoutRule rule;
  rule.seed = problem.dropout.seed;
  rule.threshold = problem.dropout.threshold;
  rule.kept_scale = problem.dropout.kept_scale;
  rule.batch = static_cast<std::uint32_t>(problem.origin.batch + b);
  rule.head = static_cast<std::uint32_t>(problem.origin.head + h);
  rule.first_row = problem.origin.query;
  rule.first_key = problem.origin.key;
  rule.active = problem.dropout.active();
  return rule;
}

// The modifiers of a head's scores and weights; those that the problem lacks stay unset.
template <class Args>
void set_options(const Problem& problem, std::int64_t b, std::int64_t h, Args& args) {
  if (problem.softcap || problem.bias || problem.mask || problem.alibi_slopes) {
    args.modifiers = modifiers_of(problem, b, h);
  }
  if (problem.dropout.active()) {
    args.dropout = dropout_of(problem, b, h);
  }
  if (problem.sinks) {
    args.has_sink = true;
    args.sink = load_float(*problem.sinks, h * problem.sinks->stride(0));
  }
}

}  // namespace

Storage storage_of(DType dtype) {
  switch (dtype) {
    case DType::f64: return Storage::f64;
    case DType::bf16: return Storage::bf16;
    case DType::f16: return Storage::f16;
    default: return Storage::f32;
  }
}

ScaledAs scaled_as(DType dtype) {
  return dtype == DType::i8 ? ScaledAs::int8 : dtype == DType::f8e4m3 ? ScaledAs::float8 : ScaledAs::nothing;
}

RowSource source_layout(const Problem& problem, const ConstTensorView& rows) {
  RowSource source;
  source.rows = {nullptr, rows.stride(2), rows.stride(3)};
  source.scaled = scaled_as(rows.dtype());
  if (problem.pages) {
    const Pages& pages = *problem.pages;
    source.table = &pages;  // only asked whether it is there, until set_head says where
    source.table_stride = pages.table.stride(1);
    source.table_is_i64 = pages.table.dtype() == DType::i64;
    source.page_size = pages.size;
    source.page_stride = rows.stride(0);
    const auto size = static_cast<std::uint64_t>(pages.size);
    source.page_shift = std::has_single_bit(size) ? std::countr_zero(size) : -1;
  }
  return source;
}

RangeRule range_rule(const Problem& problem, const Sequence& sequence, std::int64_t b) {
  const headway::RangeRule options = headway::range_rule(problem);
  RangeRule rule;
  rule.keys = sequence.key_count;
  rule.real_queries = sequence.real_queries;
  rule.offset = sequence.offset;
  rule.left = options.left;
  rule.right = options.right;
  if (problem.valid_lens) {
    const ConstTensorView& lens = *problem.valid_lens;
    rule.valid_lens = static_cast<const char*>(lens.data()) + b * lens.stride(0) * bytes_of(lens.dtype());
    rule.valid_lens_stride = lens.stride(1);
    rule.valid_lens_are_i64 = lens.dtype() == DType::i64;
  }
  return rule;
}

SpanLists span_lists(const Problem& problem, const Sequence& sequence, std::int64_t b, std::int64_t h) {
  static constexpr std::int64_t nothing = 0;  // what lists without a span point to
  SpanLists lists;
  if (!problem.spans) {
    return lists;
  }
  const ConstTensorView& spans = *problem.spans;
  lists.data = &nothing;
  if (spans.data() != nullptr) {
    const std::int64_t first = row_offset(spans, b, h, problem.packed() ? sequence.query_begin : 0);
    lists.data = static_cast<const char*>(spans.data()) + first * bytes_of(spans.dtype());
  }
  lists.entry_stride = spans.stride(2);
  lists.span_stride = spans.stride(3);
  lists.end_stride = spans.stride(4);
  lists.count = spans.size(3);
  lists.rows = problem.span_rows;
  lists.are_i64 = spans.dtype() == DType::i64;
  return lists;
}

WritableMatrix writable_matrix(const TensorView& view, std::int64_t b, std::int64_t h) {
  return matrix_of<WritableMatrix>(view, b, h, 0);
}

BackwardArgs backward_args(const BackwardProblem& problem, const Sequence& sequence, std::int64_t b) {
  BackwardArgs args;
  args.queries = sequence.query_count;
  args.head_dim = problem.head_dim;
  args.value_dim = problem.value_dim;
  args.ranges = range_rule(problem, sequence, b);
  if (problem.spans) {
    const std::int64_t group = problem.kv_heads > 0 ? problem.heads / problem.kv_heads : 0;
    args.span_planes = problem.spans->stride(1) == 0 ? 1 : group;
  }
  args.scale = problem.scale;
  args.of_longer_rows = problem.of_longer_rows;
  return args;
}

void set_kv_head(const BackwardProblem& problem, const Sequence& sequence, std::int64_t b, std::int64_t g,
                 BackwardArgs& args) {
  const std::int64_t bytes = bytes_of(problem.dtype());
  args.key = matrix_of<Matrix>(problem.key, bytes, b, g, sequence.key_begin);
  args.value = matrix_of<Matrix>(problem.value, bytes, b, g, sequence.key_begin);
  if (problem.dk) {
    args.dk = matrix_of<WritableMatrix>(*problem.dk, bytes, b, g, sequence.key_begin);
  }
  if (problem.dv) {
    args.dv = matrix_of<WritableMatrix>(*problem.dv, bytes, b, g, sequence.key_begin);
  }
}

void set_head(const BackwardProblem& problem, const Sequence& sequence, std::int64_t b, std::int64_t h,
              bool bias_is_summed, BackwardHead& head) {
  const std::int64_t bytes = bytes_of(problem.dtype());
  head.query = matrix_of<Matrix>(problem.query, bytes, b, h, sequence.query_begin);
  head.grad_out = matrix_of<Matrix>(problem.grad_out, bytes, b, h, sequence.query_begin);
  head.out = matrix_of<Matrix>(problem.out, bytes, b, h, sequence.query_begin);
  head.lse = static_cast<const char*>(problem.lse.data()) +
             row_offset(problem.lse, b, h, sequence.query_begin) * bytes_of(problem.lse.dtype());
  head.lse_stride = problem.lse.stride(2);
  head.ranges = range_rule(problem, sequence, b);
  head.ranges.spans = span_lists(problem, sequence, b, h);
  if (problem.dq) {
    head.dq = matrix_of<WritableMatrix>(*problem.dq, bytes, b, h, sequence.query_begin);
  }
  set_options(problem, b, h, head);
  if (problem.softcap) {
    // The compute type must represent the cap. The kernels divide by it in double and store the quotient as two
    // factors. A smaller cap acts like the smallest one, since any score but 0 is far above both.
    const bool wide = problem.dtype() == DType::f64;
    head.modifiers.softcap = std::clamp(*problem.softcap, wide ? 0x1p-1022 : 0x1p-500, wide ? 0x1p1022 : 0x1p126);
  }
  if (problem.dbias && !bias_is_summed) {
    head.dbias = writable_matrix(*problem.dbias, b, h);
    head.dbias_storage = storage_of(problem.dbias->dtype());
  }
}

ForwardArgs forward_args(const ForwardProblem& problem, const Sequence& sequence, std::int64_t b) {
  ForwardArgs args;
  args.head_dim = problem.head_dim;
  args.value_dim = problem.value_dim;
  args.ranges = range_rule(problem, sequence, b);
  args.scale = problem.scale;
  return args;
}

void set_head(const ForwardProblem& problem, const Sequence& sequence, std::int64_t b, std::int64_t h,
              ForwardArgs& args) {
  const std::int64_t g = problem.kv_head(h);
  const std::int64_t bytes = bytes_of(problem.dtype());
  args.query = matrix_of<Matrix>(problem.query, bytes, b, h, sequence.query_begin);
  if (problem.pages) {
    args.key = paged_source(problem, problem.key, problem.pages->key_scales, b, g);
    args.value = paged_source(problem, problem.value, problem.pages->value_scales, b, g);
  } else {
    args.key.rows = matrix_of<Matrix>(problem.key, bytes, b, g, sequence.key_begin);
    args.value.rows = matrix_of<Matrix>(problem.value, bytes, b, g, sequence.key_begin);
  }
  args.out = matrix_of<WritableMatrix>(problem.out, bytes, b, h, sequence.query_begin);
  if (problem.lse) {
    const TensorView& lse = *problem.lse;
    args.lse = static_cast<char*>(lse.data()) + row_offset(lse, b, h, sequence.query_begin) * bytes_of(lse.dtype());
    args.lse_stride = lse.stride(2);
  }
  if (problem.weights) {
    args.weights = matrix_of<WritableMatrix>(*problem.weights, b, h, 0);
  }
  if (problem.spans) {
    args.ranges.spans = span_lists(problem, sequence, b, h);
  }
  set_options(problem, b, h, args);
}

}  // namespace headway::cpu
