// Spans that came from device memory in normal form, and the tiles of pairs that spans leave something of. What is read
// is the spans, once or twice, and what is written 3 bits for 64 x 64 pairs: a thousandth of what attention reads.
#include "engines/cuda/kernels/launch.cuh"
#include "engines/cuda/kernels/span_kernels.h"
#include "engines/cuda/spans.cuh"

namespace headway::cuda {
namespace {

constexpr int threads = 128, warps = threads / 32;

// One of the maps' tasks: `each` of them for a stored item and head.
struct Task {
  std::int64_t b, h, index;
  __device__ Task(std::int64_t task, std::int64_t each, const SpanMaps& maps)
      : b(task / each / maps.heads), h(task / each % maps.heads), index(task % each) {}
};

// A span as it came, cut to [0, keys).
__device__ Span given_span(const GivenSpans& given, std::int64_t at, std::int64_t keys) {
  const auto value = [&](std::int64_t place) {
    const std::int64_t one = given.wide ? static_cast<const std::int64_t*>(given.data)[place]
                                        : static_cast<const std::int32_t*>(given.data)[place];
    return static_cast<std::int32_t>(smaller(larger(one, 0), keys));
  };
  return {value(at), value(at + given.end)};
}

// A thread for each entry. Spans that come in order are only appended; others are inserted one by one.
__global__ void __launch_bounds__(threads)
    normal_spans(const __grid_constant__ Arguments args, const __grid_constant__ GivenSpans given, SpanMaps maps,
                 std::int64_t entries, std::int64_t tasks) {
  for (std::int64_t number = std::int64_t{blockIdx.x} * threads + threadIdx.x; number < tasks;
       number += std::int64_t{gridDim.x} * threads) {
    const Task task(number, entries, maps);
    const Sequence sequence = sequence_of(args, task.b);
    if (task.index * args.spans.rows >= sequence.query_count) {
      continue;
    }
    const std::int64_t entry = sequence.query_begin + task.index;  // of a pack's; its entries have one row
    const std::int64_t first = task.b * given.batch + task.h * given.head + entry * given.entry;
    const std::int64_t all = args.spans.count;
    Span* list = args.spans.data + (task.b * args.spans.batch + task.h * args.spans.head + entry) * all;
    std::int64_t filled = 0;
    for (std::int64_t s = 0; s < all; ++s) {
      const Span span = given_span(given, first + s * given.span, sequence.key_count);
      if (span.begin < span.end) {
        std::int64_t at = filled++;
        for (; at > 0 && list[at - 1].begin > span.begin; --at) {
          list[at] = list[at - 1];
        }
        list[at] = span;
      }
    }
    std::int64_t count = 0;
    for (std::int64_t s = 0; s < filled; ++s) {
      const Span span = list[s];
      if (count > 0 && span.begin <= list[count - 1].end) {
        list[count - 1].end = max(list[count - 1].end, span.end);
      } else {
        list[count++] = span;
      }
    }
    for (; count < all; ++count) {
      list[count] = {};
    }
  }
}

__device__ std::uint64_t warp_or(std::uint64_t word) {
  const std::uint32_t low = __reduce_or_sync(~0u, static_cast<std::uint32_t>(word));
  const std::uint32_t high = __reduce_or_sync(~0u, static_cast<std::uint32_t>(word >> 32));
  return std::uint64_t{high} << 32 | low;
}

// What one row leaves of 64 tiles of keys at a time, from the first on.
class RowTiles {
 public:
  __device__ RowTiles(const RowSpans& spans, std::int64_t keys) : spans_(spans), keys_(keys) {}

  __device__ void next(std::int64_t first_tile, std::uint64_t& seen, std::uint64_t& whole) {
    seen = whole = 0;
    for (; at_ < spans_.count(); ++at_) {
      const Span span = spans_[at_];
      const std::int64_t begin = span.begin, end = span.end, past = (first_tile + 64) * span_tile;
      if (begin >= end || begin >= past) {
        return;
      }
      seen |= bits_between(begin / span_tile - first_tile, (end - 1) / span_tile + 1 - first_tile);
      // The last tile may have fewer keys.
      const std::int64_t whole_end = end >= keys_ ? (end - 1) / span_tile + 1 : end / span_tile;
      whole |= bits_between((begin + span_tile - 1) / span_tile - first_tile, whole_end - first_tile);
      if (end > past) {
        return;  // and goes on
      }
    }
  }

 private:
  RowSpans spans_;
  std::int64_t keys_, at_ = 0;
};

// A warp for each tile of 64 rows, two of them a lane.
__global__ void __launch_bounds__(threads)
    row_tiles(const __grid_constant__ Arguments args, SpanMaps maps, std::int64_t tiles, std::int64_t tasks) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (std::int64_t number = std::int64_t{blockIdx.x} * warps + threadIdx.x / 32; number < tasks;
       number += std::int64_t{gridDim.x} * warps) {
    const Task task(number, tiles, maps);
    const Sequence sequence = sequence_of(args, task.b);
    const std::int64_t first = task.index * span_tile, own[2] = {first + lane, first + lane + 32};
    if (first >= sequence.query_count) {
      continue;
    }
    // Lanes past the last row repeat it.
    const std::int64_t last = sequence.query_count - 1;
    RowTiles rows[2] = {{spans_of_row(args, sequence, task.b, task.h, smaller(own[0], last)), sequence.key_count},
                        {spans_of_row(args, sequence, task.b, task.h, smaller(own[1], last)), sequence.key_count}};
    const std::int64_t line = row_lines(args, sequence, task.b, task.h, first, span_tile).first * args.spans.seen.words;
    for (std::int64_t word = 0; word < args.spans.seen.words; ++word) {
      std::uint64_t seen[2], whole[2];
      rows[0].next(word * 64, seen[0], whole[0]);
      rows[1].next(word * 64, seen[1], whole[1]);
      const std::uint64_t any = warp_or(seen[0] | seen[1]), not_all = warp_or(~(whole[0] & whole[1]));
      if (lane == 0) {
        args.spans.seen.lines[line + word] = any;
        args.spans.whole.lines[line + word] = ~not_all;
      }
    }
  }
}

// The transpose: a warp takes a word of 32 lines, a lane each, and has the halves of 64 words.
__global__ void __launch_bounds__(threads)
    key_tiles(const __grid_constant__ Arguments args, SpanMaps maps, std::int64_t halves, std::int64_t tasks) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const TileBits &rows = args.spans.seen, &keys = args.spans.seen_by_key;
  for (std::int64_t number = std::int64_t{blockIdx.x} * warps + threadIdx.x / 32; number < tasks;
       number += std::int64_t{gridDim.x} * warps) {
    const Task task(number, halves * rows.words, maps);
    const std::int64_t half = task.index / rows.words, word = task.index % rows.words;
    const Sequence sequence = sequence_of(args, task.b);
    const std::int64_t row = (half * 32 + lane) * span_tile;
    const std::uint64_t own =
        row < sequence.query_count
            ? rows.lines[row_lines(args, sequence, task.b, task.h, row, span_tile).first * rows.words + word]
            : 0;
    std::uint32_t bits[2] = {};
    for (int tile = 0; tile < 64; ++tile) {
      const std::uint32_t all = __ballot_sync(~0u, (own >> tile & 1) != 0);
      bits[0] = tile == lane ? all : bits[0];
      bits[1] = tile == lane + 32 ? all : bits[1];
    }
    for (int x = 0; x < 2; ++x) {
      const std::int64_t key = (word * 64 + lane + x * 32) * span_tile;
      if (key < sequence.key_count) {
        const std::int64_t line = key_lines(args, sequence, task.b, task.h, key, span_tile).first;
        reinterpret_cast<std::uint32_t*>(keys.lines + line * keys.words)[half] = bits[x];
      }
    }
  }
}

}  // namespace

cudaError_t launch_normal_spans(const Arguments& arguments, const GivenSpans& given, const SpanMaps& maps,
                                cudaStream_t stream) {
  const std::int64_t entries = blocks(arguments.query_len, arguments.spans.rows);
  const std::int64_t tasks = maps.items * maps.heads * entries;
  return start(normal_spans, grid(blocks(tasks, threads)), threads, stream, arguments, given, maps, entries, tasks);
}

cudaError_t launch_span_tiles(const Arguments& arguments, const SpanMaps& maps, cudaStream_t stream) {
  const std::int64_t tiles = blocks(arguments.query_len, span_tile), heads = maps.items * maps.heads;
  const std::int64_t row_tasks = heads * tiles;
  if (const cudaError_t result =
          start(row_tiles, grid(blocks(row_tasks, warps)), threads, stream, arguments, maps, tiles, row_tasks)) {
    return result;
  }
  const std::int64_t halves = 2 * arguments.spans.seen_by_key.words;
  const std::int64_t key_tasks = heads * halves * arguments.spans.seen.words;
  return start(key_tiles, grid(blocks(key_tasks, warps)), threads, stream, arguments, maps, halves, key_tasks);
}

}  // namespace headway::cuda
