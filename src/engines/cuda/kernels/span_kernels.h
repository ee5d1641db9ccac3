// Spans as the kernels of a call need them, made in stream order before those.
#pragma once

#include "engines/cuda/kernels/kernels.h"

namespace headway::cuda {

// Spans [B,H,entries,R,2] in device memory, as they came: strides in elements.
struct GivenSpans {
  const void* data = nullptr;
  std::int64_t batch = 0, head = 0, entry = 0, span = 0, end = 0;
  bool wide = false;  // i64, else i32
};

// The stored items and heads that spans, or the lines of their tile bits, do not repeat.
struct SpanMaps {
  std::int64_t items = 1, heads = 1;
};

// Fills arguments.spans.data: spans are cut to the keys there are, sorted and joined.
cudaError_t launch_normal_spans(const Arguments& arguments, const GivenSpans& given, const SpanMaps& maps,
                                cudaStream_t stream);

// Fills the tile bits.
cudaError_t launch_span_tiles(const Arguments& arguments, const SpanMaps& maps, cudaStream_t stream);

}  // namespace headway::cuda
