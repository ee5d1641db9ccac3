// Spans on the device, beside key_range.cuh: which keys a row sees, and which tiles of rows and keys hold an allowed
// pair. Kernels walk over `seen` tiles alone, and where one is not `whole` they forbid pairs by words: bit l is key l.
// Calls without spans branch around all of it.
#pragma once

#include "engines/cuda/elements.cuh"
#include "engines/cuda/key_range.cuh"

namespace headway::cuda {

constexpr int span_tile = 64;  // rows and keys of a tile that has bits

// Bits [begin, end) of a word; either may lie outside of it.
__device__ inline std::uint64_t bits_between(std::int64_t begin, std::int64_t end) {
  const auto low = [](std::int64_t count) {
    return count <= 0 ? std::uint64_t{0} : count >= 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << count) - 1;
  };
  return low(end) & ~low(begin);
}

// The spans of one row: ascending, apart, empty ones last.
class RowSpans {
 public:
  __device__ RowSpans(const Spans& spans, std::int64_t b, std::int64_t h, std::int64_t position) : count_(spans.count) {
    const std::int64_t entry = spans.rows == 1 ? position : position / spans.rows;
    list_ = spans.data + (b * spans.batch + h * spans.head + entry) * spans.count;
  }

  __device__ std::int64_t count() const { return count_; }
  __device__ Span operator[](std::int64_t s) const { return list_[s]; }

  // The number of spans in front for which before(span) holds; what holds for one holds for those before it.
  template <class Before>
  __device__ std::int64_t count_while(const Before& before) const {
    constexpr std::int64_t few = 8;
    std::int64_t low = 0, high = count_;
#pragma unroll 1
    while (low < high) {
      const std::int64_t middle = count_ <= few ? low : (low + high) / 2;
      const Span span = list_[middle];
      if (span.begin < span.end && before(span)) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }
  __device__ std::int64_t ending_by(std::int64_t key) const {
    return count_while([&](const Span& span) { return span.end <= key; });
  }

  // The keys [key, key + 64) that the row sees.
  __device__ std::uint64_t word(std::int64_t key) const {
    std::uint64_t bits = 0;
#pragma unroll 1
    for (std::int64_t s = ending_by(key); s < count_; ++s) {
      const Span span = list_[s];
      if (span.begin >= span.end || span.begin >= key + 64) {
        break;
      }
      bits |= bits_between(span.begin - key, span.end - key);
    }
    return bits;
  }

  __device__ bool allows(std::int64_t key) const {
    const std::int64_t s = ending_by(key);
    return s < count_ && list_[s].begin < list_[s].end && list_[s].begin <= key;
  }

  // From the first to the last key of the range that the row sees.
  __device__ KeyRange hull(const KeyRange& range) const {
    const std::int64_t begin = ending_by(range.begin);
    const std::int64_t end = count_while([&](const Span& span) { return span.begin < range.end; });
    return begin < end ? KeyRange{larger(list_[begin].begin, range.begin), smaller(list_[end - 1].end, range.end)}
                       : KeyRange{0, 0};
  }

 private:
  const Span* list_;
  std::int64_t count_;
};

__device__ inline RowSpans spans_of_row(const Arguments& args, const Sequence& sequence, std::int64_t b, std::int64_t h,
                                        std::int64_t i) {
  return {args.spans, b, h, sequence.query_begin + i};
}

// From the first to the last key that row i sees, before masks; without spans it sees all of them.
__device__ inline KeyRange row_keys(const Arguments& args, const Sequence& sequence, std::int64_t b, std::int64_t h,
                                    std::int64_t i) {
  const KeyRange range = row_range(args, sequence, b, i);
  return !args.spans.given || range.begin >= range.end ? range : spans_of_row(args, sequence, b, h, i).hull(range);
}

// ---- Tiles ----

// Lines [first, first + count) of tile bits.
struct TileLines {
  std::int64_t first;
  int count;
};

__device__ inline TileLines tile_lines(const TileBits& bits, std::int64_t b, std::int64_t h,
                                       std::int64_t sequence_begin, std::int64_t first, std::int64_t end) {
  const std::int64_t line = first / span_tile;
  return {sequence_begin / span_tile + b * bits.batch + h * bits.head + line,
          first < end ? static_cast<int>((end - 1) / span_tile - line) + 1 : 0};
}
// Of query rows [first, first + rows), and of keys.
__device__ inline TileLines row_lines(const Arguments& args, const Sequence& sequence, std::int64_t b, std::int64_t h,
                                      std::int64_t first, std::int64_t rows) {
  return tile_lines(args.spans.seen, b, h, sequence.query_begin, first, smaller(first + rows, sequence.query_count));
}
__device__ inline TileLines key_lines(const Arguments& args, const Sequence& sequence, std::int64_t b, std::int64_t h,
                                      std::int64_t first, std::int64_t keys) {
  return tile_lines(args.spans.seen_by_key, b, h, sequence.key_begin, first, smaller(first + keys, sequence.key_count));
}

// The first of at, at + step, .. whose tile of `step` (a power of 2, 32 or more) has a bit in one of the lines; `end`
// where none is before it.
__device__ __noinline__ inline std::int64_t next_tile(const TileBits& bits, TileLines lines, std::int64_t at,
                                                      std::int64_t end, int step) {
  constexpr std::int64_t word_keys = 64 * span_tile;
  const std::int64_t tile = at / span_tile;
#pragma unroll 1
  for (std::int64_t word = tile / 64; word * word_keys < end; ++word) {
    std::uint64_t found = 0;
    for (int line = 0; line < lines.count; ++line) {
      found |= bits.lines[(lines.first + line) * bits.words + word];
    }
    if (word == tile / 64) {
      found &= ~std::uint64_t{0} << tile % 64;
    }
    if (found != 0) {
      const std::int64_t position = word * word_keys + (__ffsll(static_cast<long long>(found)) - 1) * span_tile;
      return smaller(position > at ? at + ((position - at) & -static_cast<std::int64_t>(step)) : at, end);
    }
  }
  return end;
}

// The next tile of keys that some row of [first, first + rows) sees, and of queries that see one of these keys.
__device__ inline std::int64_t next_key_tile(const Arguments& args, const Sequence& sequence, std::int64_t b,
                                             std::int64_t h, std::int64_t first, std::int64_t rows, std::int64_t at,
                                             std::int64_t end, int step) {
  return !args.spans.given || at >= end
             ? at
             : next_tile(args.spans.seen, row_lines(args, sequence, b, h, first, rows), at, end, step);
}
__device__ inline std::int64_t next_query_tile(const Arguments& args, const Sequence& sequence, std::int64_t b,
                                               std::int64_t h, std::int64_t first, std::int64_t keys, std::int64_t at,
                                               std::int64_t end, int step) {
  return !args.spans.given || at >= end
             ? at
             : next_tile(args.spans.seen_by_key, key_lines(args, sequence, b, h, first, keys), at, end, step);
}

__device__ __noinline__ inline bool is_whole(const TileBits& bits, TileLines lines, std::int64_t key,
                                             std::int64_t key_end) {
  for (int line = 0; line < lines.count; ++line) {
    for (std::int64_t tile = key / span_tile; tile * span_tile < key_end; ++tile) {
      if ((bits.lines[(lines.first + line) * bits.words + tile / 64] >> tile % 64 & 1) == 0) {
        return false;
      }
    }
  }
  return true;
}

// Whether spans forbid a pair of these rows and keys.
__device__ inline bool has_holes(const Arguments& args, const Sequence& sequence, std::int64_t b, std::int64_t h,
                                 std::int64_t first, std::int64_t rows, std::int64_t key, std::int64_t keys) {
  return args.spans.given && !is_whole(args.spans.whole, row_lines(args, sequence, b, h, first, rows), key,
                                       smaller(key + keys, sequence.key_count));
}

// words[query][keys / 64], by all threads of a block.
template <int Queries, int Keys>
constexpr int span_words = Queries*((Keys + 63) / 64);

__device__ __noinline__ inline void fill_span_words(const Spans& spans, std::int64_t b, std::int64_t h,
                                                    std::int64_t first_position, std::int64_t queries, std::int64_t key,
                                                    int parts, int count, std::uint64_t* words) {
#pragma unroll 1
  for (int at = static_cast<int>(threadIdx.x); at < count; at += static_cast<int>(blockDim.x)) {
    const int query = at / parts;
    words[at] = query < queries ? RowSpans(spans, b, h, first_position + query).word(key + at % parts * 64) : 0;
  }
}

template <int Queries, int Keys>
__device__ inline void fill_span_words(const Arguments& args, const Sequence& sequence, std::int64_t b, std::int64_t h,
                                       std::int64_t first_query, std::int64_t first_key, std::uint64_t* words) {
  fill_span_words(args.spans, b, h, sequence.query_begin + first_query, sequence.real_queries - first_query, first_key,
                  (Keys + 63) / 64, span_words<Queries, Keys>, words);
}

// Forbids the pairs of a thread's M x N scores that the words leave out; with KeysAreRows the rows r are keys.
template <bool KeysAreRows, int Keys, class Thread, int M, int N, class Real>
__device__ inline void forbid_by_words(const Thread& thread, const std::uint64_t* words, Real (&scores)[M][N]) {
  constexpr int parts = (Keys + 63) / 64;
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const int query = KeysAreRows ? thread.col_of(n) : thread.row_of(m);
      const int key = KeysAreRows ? thread.row_of(m) : thread.col_of(n);
      const std::uint64_t word = words[query * parts + key / 64];
      scores[m][n] = (word >> key % 64 & 1) != 0 ? scores[m][n] : -infinity<Real>();
    }
  }
}

}  // namespace headway::cuda
