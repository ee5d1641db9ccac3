// The key blocks of a tile whose rows have spans: which are visited, from the last to the first, and which are edges.
// The scheduler counts them, so that a tile's steps are numbered without gaps; the producer finds them one by one, from
// the bits of spans.cuh, and leaves their numbers beside the ring for the consumers.
#pragma once

#include "engines/cuda/kernels/hopper_shared.cuh"
#include "engines/cuda/kernels/hopper_softmax.cuh"
#include "engines/cuda/spans.cuh"

namespace headway::cuda {

// A block of keys: its number, and whether some row may not see all of its keys.
struct SpanBlock {
  int number;
  bool edge;

  __device__ __forceinline__ int packed() const { return 2 * number + (edge ? 1 : 0); }
  __device__ __forceinline__ static SpanBlock unpacked(int word) { return {word >> 1, (word & 1) != 0}; }
};

template <int keys>
class SpanBlocks {
  static constexpr int tiles = keys / span_tile, word_blocks = 64 / tiles;  // of a block, and of a word
  static_assert(keys % span_tile == 0 && 64 % tiles == 0);

 public:
  __device__ __forceinline__ SpanBlocks(const Spans& spans, const SpanWork& work)
      : spans_(spans), work_(work), at_(work.blocks.last) {}

  // The next one down. Where no row sees a key there is one all the same.
  __device__ __forceinline__ SpanBlock next() {
    for (int word = (at_ - 1) / word_blocks; at_ > work_.blocks.first; --word) {
      const std::uint64_t left = any(word) & bits_between(0, at_ * tiles - word * 64);
      const int block = word * word_blocks + (63 - __clzll(static_cast<long long>(left))) / tiles;
      if (left != 0 && block >= work_.blocks.first) {
        at_ = block;
        return {block, work_.blocks.is_edge(block) || !is_whole(word, block)};
      }
      at_ = word * word_blocks;
    }
    return {work_.blocks.first, true};
  }

  // How many there are, for all lanes of a warp.
  __device__ __forceinline__ int count(int lane) const {
    constexpr std::uint64_t first_tiles = tiles == 2 ? 0x5555555555555555u : ~std::uint64_t{0};
    int found = 0;
#pragma unroll 1
    for (int word = work_.blocks.first / word_blocks + lane; word * word_blocks < work_.blocks.last; word += 32) {
      const std::uint64_t bits =
          any(word) & bits_between(work_.blocks.first * tiles - word * 64, work_.blocks.last * tiles - word * 64);
      found += __popcll(tiles == 2 ? (bits | bits >> 1) & first_tiles : bits);
    }
    return static_cast<int>(__reduce_add_sync(~0u, static_cast<unsigned>(found)));
  }

 private:
  __device__ __forceinline__ std::uint64_t any(int word) const {
    std::uint64_t bits = 0;
#pragma unroll 1
    for (int line = 0; line < work_.lines; ++line) {
      bits |= spans_.seen.lines[(work_.line + line) * spans_.seen.words + word];
    }
    return bits;
  }
  __device__ __forceinline__ bool is_whole(int word, int block) const {
    std::uint64_t bits = ~std::uint64_t{0};
#pragma unroll 1
    for (int line = 0; line < work_.lines; ++line) {
      bits &= spans_.whole.lines[(work_.line + line) * spans_.whole.words + word];
    }
    return (~bits >> block % word_blocks * tiles & ((1u << tiles) - 1)) == 0;
  }

  const Spans& spans_;
  const SpanWork& work_;
  int at_;  // blocks from here on have been given
};

// Turns the key blocks of a post into those that spans leave, by all lanes of a warp. From then on the post counts
// steps.
template <int rows, int keys>
__device__ __forceinline__ void post_spans(const HopperArguments& args, int lane, HopperPost<rows>& post,
                                           SpanWork& work) {
  __syncwarp();
  if (lane == 0) {
    const HopperWork& tile = post.work;
    const TileLines lines =
        tile_lines(args.spans.seen, tile.batch, tile.head, tile.query_begin, tile.row, tile.row + tile.stored_rows);
    work = {lines.first, lines.count, tile.blocks};
  }
  __syncwarp();
  const int count = SpanBlocks<keys>(args.spans, work).count(lane);
  if (lane < rows / 64) {
    post.consumer_last[lane] = post.consumer_last[lane] > 0 ? count : 0;
  }
  if (lane == 0) {
    post.work.blocks = {0, max(count, 1), 0, 0};
  }
}

// A thread's columns of the block from `first_key` on that its two rows see (rows `row` and row + 8 of the tile), a bit
// each as ColumnRange has them. Few spans are all looked at, so that their loads do not wait for each other.
template <int columns>
__device__ __forceinline__ void find_span_bits(const Spans& spans, const HopperWork& work, int row, int first_key,
                                               int quad_lane, const ColumnRange (&ranges)[2],
                                               std::uint32_t (&bits)[2]) {
  static_assert(columns <= 32);
  constexpr int few = 4;
  const int count = static_cast<int>(spans.count), column = first_key + 2 * quad_lane;
  const auto bits_of = [&](const Span& span) {
    return static_cast<std::uint32_t>(ColumnRange{span.begin - column, span.end - column}.bits<columns>());
  };
  // Rows past the last real one read its spans; their range is empty.
  const auto spans_of = [&](int i) {
    return RowSpans(spans, work.batch, work.head,
                    work.query_begin + work.row + max(min(row + 8 * i, work.real_rows - 1), 0));
  };
  const RowSpans lists[2] = {spans_of(0), spans_of(1)};
  bits[0] = bits[1] = 0;
  if (count <= few) {
#pragma unroll 2
    for (int s = 0; s < count; ++s) {
      const Span own[2] = {lists[0][s], lists[1][s]};
      bits[0] |= bits_of(own[0]);
      bits[1] |= bits_of(own[1]);
    }
  } else {
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      const RowSpans& list = i == 0 ? lists[0] : lists[1];
      std::uint32_t found = 0;
#pragma unroll 1
      for (int s = static_cast<int>(list.ending_by(first_key)); s < count; ++s) {
        const Span span = list[s];
        if (span.begin >= span.end || span.begin >= first_key + 4 * columns) {
          break;
        }
        found |= bits_of(span);
      }
      (i == 0 ? bits[0] : bits[1]) = found;
    }
  }
  bits[0] &= static_cast<std::uint32_t>(ranges[0].bits<columns>());
  bits[1] &= static_cast<std::uint32_t>(ranges[1].bits<columns>());
}

template <int count>
__device__ __forceinline__ void apply_span_bits(const std::uint32_t (&bits)[2], float (&scores)[count]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int k = 0; k < count / 2; ++k) {
      float& score = scores[k / 2 * 4 + 2 * i + k % 2];
      score = (bits[i] & 1u << k) != 0 ? score : minus_infinity;
    }
  }
}

}  // namespace headway::cuda
