// From a Problem to the plain data that kernels take.
#pragma once

#include "core/key_range.h"
#include "core/problem.h"
#include "engines/cpu/kernel/args.h"
#include "engines/cpu/kernel/backward_args.h"

namespace headway::cpu {

Storage storage_of(DType dtype);
ScaledAs scaled_as(DType dtype);

// The properties of keys or values without their addresses: their strides, and whether they are in pages.
RowSource source_layout(const Problem& problem, const ConstTensorView& rows);

// The ranges of a sequence's rows, and the spans of one of its heads.
RangeRule range_rule(const Problem& problem, const Sequence& sequence, std::int64_t b);
SpanLists span_lists(const Problem& problem, const Sequence& sequence, std::int64_t b, std::int64_t h);

// The address of row `row` of head h of batch item b in a view of elements of `bytes` each. Small heads take a
// microsecond, so the caller looks the size up once for many.
inline const void* row_address(const ConstTensorView& view, std::int64_t bytes, std::int64_t b, std::int64_t h,
                               std::int64_t row) {
  const auto* data = static_cast<const char*>(view.data());
  return data == nullptr ? nullptr : data + row_offset(view, b, h, row) * bytes;
}

// The [rows, columns] matrix at (b, h) of a [B,H,rows,columns] view.
WritableMatrix writable_matrix(const TensorView& view, std::int64_t b, std::int64_t h);

// A sequence, without its heads and chunks; one of its kv heads; and a query head, without the addresses of prepared
// data. A dbias that is summed over axes is not written per head.
BackwardArgs backward_args(const BackwardProblem& problem, const Sequence& sequence, std::int64_t b);
void set_kv_head(const BackwardProblem& problem, const Sequence& sequence, std::int64_t b, std::int64_t g,
                 BackwardArgs& args);
void set_head(const BackwardProblem& problem, const Sequence& sequence, std::int64_t b, std::int64_t h,
              bool bias_is_summed, BackwardHead& head);

// A sequence, without its head and the rows to do; and one of its heads.
ForwardArgs forward_args(const ForwardProblem& problem, const Sequence& sequence, std::int64_t b);
void set_head(const ForwardProblem& problem, const Sequence& sequence, std::int64_t b, std::int64_t h,
              ForwardArgs& args);

}  // namespace headway::cpu
