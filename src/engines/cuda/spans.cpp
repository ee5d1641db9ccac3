// Spans of a call in device memory.
#include "engines/cuda/spans.h"

#include <vector>

#include "core/ceil_div.h"
#include "core/spans.h"
#include "engines/cuda/kernels/span_kernels.h"
#include "engines/cuda/upload.h"

namespace headway::cuda {
namespace {

constexpr std::int64_t tile = 64, word_tiles = 64;  // see spans.cuh

bool on_host(const Problem& problem) { return problem.spans->device() == Device{}; }

std::int64_t stored(const ConstTensorView& view, int axis) { return view.stride(axis) == 0 ? 1 : view.size(axis); }

// Sizes of what lies in the workspace.
struct Layout {
  std::int64_t items, heads, entries, count;  // of spans; a pack has one item
  std::int64_t row_lines, row_words;          // of an item and head
  std::int64_t key_lines, key_words;

  explicit Layout(const Problem& problem) {
    const ConstTensorView& spans = *problem.spans;
    items = problem.packed() ? 1 : stored(spans, 0);
    heads = stored(spans, 1);
    entries = spans.size(2);
    count = spans.size(3);
    row_lines = problem.packed() ? problem.query.size(2) / tile + problem.batch : ceil_div(problem.query_len, tile);
    key_lines = problem.packed() ? problem.key.size(2) / tile + problem.batch : ceil_div(problem.key_len, tile);
    row_words = ceil_div(problem.key_len, tile * word_tiles);
    key_words = ceil_div(problem.query_len, tile * word_tiles);
  }

  std::size_t span_count() const { return static_cast<std::size_t>(items * heads * entries * count); }
  std::size_t row_bits() const { return static_cast<std::size_t>(items * heads * row_lines * row_words); }
  std::size_t key_bits() const { return static_cast<std::size_t>(items * heads * key_lines * key_words); }
};

// Each span is one number: its end in the upper half.
std::vector<std::int64_t> values_of(const ConstTensorView& spans, const Layout& layout) {
  std::vector<std::int64_t> values;
  values.reserve(layout.span_count());
  for (std::int64_t b = 0; b < layout.items; ++b) {
    for (std::int64_t h = 0; h < layout.heads; ++h) {
      for (std::int64_t entry = 0; entry < layout.entries; ++entry) {
        const std::int64_t first = row_offset(spans, b, h, entry);
        for (std::int64_t s = 0; s < layout.count; ++s) {
          const std::int64_t at = first + s * spans.stride(3);
          values.push_back(load_integer(spans, at) | load_integer(spans, at + spans.stride(4)) << 32);
        }
      }
    }
  }
  return values;
}

void place_bits(const Problem& problem, const Layout& layout, Workspace& workspace, Spans& spans) {
  const bool packed = problem.packed();
  const auto bits = [&](std::int64_t lines, std::int64_t words, std::size_t size) {
    return TileBits{workspace.take_as<std::uint64_t>(size),
                    packed             ? 1
                    : layout.items > 1 ? layout.heads * lines
                                       : 0,
                    layout.heads > 1 ? lines : 0, words};
  };
  spans.seen = bits(layout.row_lines, layout.row_words, layout.row_bits());
  spans.whole = bits(layout.row_lines, layout.row_words, layout.row_bits());
  spans.seen_by_key = bits(layout.key_lines, layout.key_words, layout.key_bits());
}

}  // namespace

std::size_t spans_bytes(const Problem& problem) {
  if (!problem.spans) {
    return 0;
  }
  const Layout layout(problem);
  return Workspace::rounded(layout.span_count() * sizeof(Span)) +
         2 * Workspace::rounded(layout.row_bits() * sizeof(std::uint64_t)) +
         Workspace::rounded(layout.key_bits() * sizeof(std::uint64_t));
}

void place_spans(const Problem& problem, Arguments& arguments, Workspace& workspace, cudaStream_t stream) {
  if (!problem.spans) {
    return;
  }
  const ConstTensorView& given = *problem.spans;
  const Layout layout(problem);
  Spans& spans = arguments.spans;
  spans.given = true;
  spans.data = workspace.take_as<Span>(layout.span_count());
  spans.batch = layout.items > 1 ? layout.heads * layout.entries : 0;
  spans.head = layout.heads > 1 ? layout.entries : 0;
  spans.count = layout.count;
  spans.rows = problem.span_rows;
  place_bits(problem, layout, workspace, spans);
  const SpanMaps maps{problem.packed() ? problem.batch : layout.items, layout.heads};
  if (maps.items * maps.heads * problem.query_len * problem.key_len == 0) {
    return;
  }
  if (layout.count > 0 && on_host(problem)) {
    const std::vector<std::int64_t> values = values_of(given, layout);
    check(upload(values.data(), values.size(), reinterpret_cast<std::int64_t*>(spans.data), stream), problem.operation,
          "sending the spans");
  } else if (layout.count > 0) {
    const GivenSpans source{given.data(),
                            given.stride(0),
                            given.stride(1),
                            given.stride(2),
                            given.stride(3),
                            given.stride(4),
                            given.dtype() == DType::i64};
    check(launch_normal_spans(arguments, source, maps, stream), problem.operation, "sorting the spans");
  }
  check(launch_span_tiles(arguments, maps, stream), problem.operation, "finding the tiles that spans allow");
}

}  // namespace headway::cuda
