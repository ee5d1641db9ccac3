// The walk of a key tile in the Hopper backward where rows have spans: over the positions that see one of its keys, in
// ascending order. Contributions to a query tile are ordered by descending key tile, and key tiles of a head are taken
// in that order too. So everybody waits only for what was taken before, and nobody for ever, however many run at once;
// and the first keys, which all rows may see, keep nobody waiting. Everybody leaves out the same tiles, because both
// directions come from the same bits (spans.cuh).
#pragma once

#include "engines/cuda/kernels/hopper_backward_shared.cuh"
#include "engines/cuda/spans.cuh"

namespace headway::cuda {

// For all lanes of a warp.
class SpanWalk {
  static constexpr int key_tiles = backward_keys / span_tile;  // tiles of bits of a key tile
  static_assert(key_tiles == 2);

 public:
  __device__ __forceinline__ SpanWalk(const HopperBackwardArguments& args, const BackwardPost& post, int key_tile)
      : spans_(args.spans),
        post_(post),
        queries_(post.sequence.queries_of(key_tile)),
        key_tile_(key_tile),
        word_(queries_.begin / 64) {
    const bool packed = args.cu_seqlens_q.data != nullptr;
    const std::int64_t head = post.kv_head * post.sequence.group;
    const std::int64_t key_line =
        packed ? post.key_begin / span_tile + post.batch : post.batch * spans_.seen_by_key.batch;
    const std::int64_t row_line = packed ? post.first_tile : post.batch * spans_.seen.batch;
    key_line_ = key_line + head * spans_.seen_by_key.head + key_tile * key_tiles;
    row_line_ = row_line + head * spans_.seen.head;
    key_lines_ = key_tile * backward_keys + span_tile < post.key_count ? 2 : 1;
  }

  __device__ __forceinline__ int steps(int lane) const {
    if (queries_.count() == 0) {
      return 0;
    }
    const int first = queries_.begin / 64, words = (queries_.end - 1) / 64 + 1 - first;
    unsigned found = 0;
#pragma unroll 1
    for (int n = lane; n < words * post_.sequence.group; n += 32) {
      found += __popcll(seeing(n / words, first + n % words));
    }
    return static_cast<int>(__reduce_add_sync(~0u, found));
  }

  // The next positions of up to 32: a lane has its own of `count`, those behind it the last.
  __device__ __forceinline__ BackwardPosition next(int lane, int count) {
    BackwardPosition own;
#pragma unroll 1
    for (int n = 0; n < count; ++n) {
      while (left_ == 0) {  // there is a step left
        left_ = seeing(head_, word_);
        if (left_ == 0) {
          skip_word();
        }
      }
      const BackwardPosition at{head_, word_ * 64 + __ffsll(static_cast<long long>(left_)) - 1};
      own = lane >= n ? at : own;
      left_ &= left_ - 1;
      if (left_ == 0) {
        skip_word();
      }
    }
    return own;
  }

  // How many contributions to the position come before this key tile's: those of higher ones.
  __device__ __forceinline__ int rank(const BackwardPosition& at) const {
    const TileSpan seen = post_.sequence.keys_of(at.tile);
    return count(row_line_ + at.head * spans_.seen.head + at.tile, seen.within({key_tile_ + 1, seen.end}));
  }

  // Whether spans forbid a pair of the key tile and a query tile.
  __device__ __forceinline__ bool has_holes(const BackwardPosition& at) const {
    const std::int64_t line = row_line_ + at.head * spans_.whole.head + at.tile;
    const std::uint64_t bits = spans_.whole.lines[line * spans_.whole.words + key_tile_ / 32];
    return (~bits >> key_tile_ % 32 * key_tiles & 3) != 0;
  }

  // Whether a query tile sees no key.
  __device__ __forceinline__ static bool is_empty(const Spans& spans, std::int64_t line, TileSpan keys) {
    return count(spans, line, keys) == 0;
  }

 private:
  // The query tiles of a word that see one of the keys.
  __device__ __forceinline__ std::uint64_t seeing(int head, int word) const {
    const TileBits& bits = spans_.seen_by_key;
    const std::uint64_t* line = bits.lines + (key_line_ + head * bits.head) * bits.words + word;
    const std::uint64_t both = key_lines_ == 2 ? line[0] | line[bits.words] : line[0];
    return both & bits_between(queries_.begin - word * 64, queries_.end - word * 64);
  }

  __device__ __forceinline__ void skip_word() {
    if (++word_ * 64 >= queries_.end) {
      word_ = queries_.begin / 64;
      ++head_;
    }
  }

  __device__ __forceinline__ int count(std::int64_t line, TileSpan keys) const { return count(spans_, line, keys); }

  // Key tiles of [begin, end) of which a line has a bit.
  __device__ __forceinline__ static int count(const Spans& spans, std::int64_t line, TileSpan keys) {
    int found = 0;
#pragma unroll 1
    for (int word = keys.begin / 32; word * 32 < keys.end; ++word) {
      const std::uint64_t bits = spans.seen.lines[line * spans.seen.words + word] &
                                 bits_between(keys.begin * key_tiles - word * 64, keys.end * key_tiles - word * 64);
      found += __popcll((bits | bits >> 1) & 0x5555555555555555u);
    }
    return found;
  }

  const Spans& spans_;
  const BackwardPost& post_;
  TileSpan queries_;  // that ranges leave
  int key_tile_, key_lines_;
  std::int64_t key_line_, row_line_;  // of the first query head
  int head_ = 0, word_;               // the next position's
  std::uint64_t left_ = 0;            // of the word
};

}  // namespace headway::cuda
