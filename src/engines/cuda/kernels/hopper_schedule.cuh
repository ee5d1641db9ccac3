// Which tile a block takes next, and what work it is: sequences, key ranges, key blocks.
#pragma once

#include <climits>

#include "engines/cuda/kernels/hopper_shared.cuh"
#include "engines/cuda/kernels/hopper_spans.cuh"
#include "engines/cuda/key_range.cuh"
#include "engines/cuda/ptx/dependent_launch.cuh"

namespace headway::cuda {

struct TileIndex {
  int batch, head, query_tile;
};

// Tiles of one head are neighbours: they read the same keys and values.
__device__ __forceinline__ TileIndex plain_tile(const HopperArguments& args, int index) {
  const int heads = static_cast<int>(args.heads);
  const int pair = index / args.query_tiles;
  return {pair / heads, pair % heads, index - pair * args.query_tiles};
}

// Heads in groups, and of a group the last query tiles first: with a causal mask they are the longest, and the short
// ones fill the gaps at the end.
__device__ __forceinline__ TileIndex grouped_tile(const HopperArguments& args, int index) {
  const int heads = static_cast<int>(args.heads);
  const int group_tiles = args.head_group * args.query_tiles;
  const int group = index / group_tiles;
  const int within = index - group * group_tiles;
  const int first_pair = group * args.head_group;
  const int pairs = min(args.head_group, args.tiles / args.query_tiles - first_pair);
  const int step = within / pairs;
  const int pair = first_pair + within - step * pairs;
  return {pair / heads, pair % heads, args.query_tiles - 1 - step};
}

template <int rows, int keys>
__device__ __forceinline__ HopperWork plain_work(const HopperArguments& args, int index) {
  const TileIndex tile = plain_tile(args, index);
  HopperWork work{};
  work.batch = tile.batch;
  work.head = tile.head;
  work.row = tile.query_tile * rows;
  work.stored_rows = work.real_rows = static_cast<int>(args.query_len) - work.row;
  work.key_count = static_cast<int>(args.key_len);
  work.blocks.last = (work.key_count + keys - 1) / keys;
  work.blocks.full_last = work.key_count / keys;
  return work;
}

struct ShortRange {
  int begin, end;
};

// One batch item or packed sequence in numbers of 32 bits (longer axes are refused), and key_range's rule for its rows:
// row i sees keys [i + low, i + high), cut to those that exist. The scheduler has few registers, and what it says is
// waited for.
struct ShortSequence {
  int query_begin, query_count, real_queries, key_begin, key_count;
  int valid;  // keys that every row has at most
  int offset, low, high;

  __device__ __forceinline__ ShortSequence(const HopperArguments& args, int batch) {
    const Sequence sequence = sequence_of(args, batch);
    query_begin = static_cast<int>(sequence.query_begin);
    query_count = static_cast<int>(sequence.query_count);
    real_queries = static_cast<int>(sequence.real_queries);
    key_begin = static_cast<int>(sequence.key_begin);
    key_count = static_cast<int>(sequence.key_count);
    valid = args.valid_lens_per_batch ? static_cast<int>(valid_len(args, sequence, batch, 0)) : key_count;
    offset = static_cast<int>(sequence.offset);
    low = near(sequence.offset - args.rule.left);
    high = near(sequence.offset + args.rule.right + 1);
  }

  // The keys of a row that is not padding; `most` of them are valid.
  __device__ __forceinline__ ShortRange row_range(int row, int most) const {
    const ShortRange range{max(row + low, 0), min(row + high, most)};
    return range.begin < range.end ? range : ShortRange{0, 0};
  }

 private:
  // Further than any row is from any key.
  static __device__ __forceinline__ int near(std::int64_t distance) {
    constexpr std::int64_t far = std::int64_t{1} << 29;
    return static_cast<int>(smaller(larger(distance, -far), far));
  }
};

// Fills a post, by all lanes of a warp: each row's range, and from them the blocks to visit. False when the tile lies
// behind the end of its sequence and there is nothing to do.
template <int rows, int keys>
__device__ __forceinline__ bool post_work(const HopperArguments& args, const TileIndex& tile,
                                          const ShortSequence& sequence, int lane, HopperPost<rows>& post) {
  const int row = tile.query_tile * rows;
  if (row >= sequence.query_count) {
    return false;
  }
  const bool own_ends = args.valid_lens.data != nullptr && !args.valid_lens_per_batch;
  int lowest = INT_MAX, highest = 0, full_begin = 0, full_end = INT_MAX;
#pragma unroll 1
  for (int consumer = 0; consumer < rows / 64; ++consumer) {
    int consumer_end = 0;
#pragma unroll 1
    for (int i = 64 * consumer + lane; i < 64 * (consumer + 1); i += 32) {
      ShortRange range{0, 0};
      if (row + i < sequence.real_queries) {
        range = sequence.row_range(
            row + i, own_ends ? static_cast<int>(length_at(args.valid_lens, tile.batch, row + i, sequence.key_count))
                              : sequence.valid);
        full_begin = max(full_begin, range.begin);
        full_end = min(full_end, range.end);
      }
      post.begin[i] = range.begin;
      post.end[i] = range.end;
      lowest = range.begin < range.end ? min(lowest, range.begin) : lowest;
      consumer_end = max(consumer_end, range.end);
    }
    consumer_end = __reduce_max_sync(~0u, consumer_end);
    highest = max(highest, consumer_end);
    if (lane == 0) {
      post.consumer_last[consumer] = (consumer_end + keys - 1) / keys;
    }
  }
  lowest = __reduce_min_sync(~0u, lowest);
  full_begin = __reduce_max_sync(~0u, full_begin);
  full_end = __reduce_min_sync(~0u, full_end);
  if (lane == 0) {
    HopperWork& work = post.work;
    work.batch = tile.batch;
    work.head = tile.head;
    work.row = row;
    work.query_begin = sequence.query_begin;
    work.key_begin = sequence.key_begin;
    work.stored_rows = min(sequence.query_count - row, rows);
    work.real_rows = min(sequence.real_queries - row, rows);
    work.key_count = sequence.key_count;
    work.offset = sequence.offset;
    work.careful = false;
    // Where no row sees a key one block is visited all the same, every score masked: the rows then end as empty sums
    // do.
    work.blocks.first = highest > 0 ? lowest / keys : 0;
    work.blocks.last = highest > 0 ? (highest + keys - 1) / keys : 1;
    work.blocks.full_first = (full_begin + keys - 1) / keys;
    work.blocks.full_last = full_end == INT_MAX ? 0 : full_end / keys;
  }
  return true;
}

// Leaves a post one part of its key blocks, by all lanes of a warp. The parts of a tile depend on its own blocks alone.
template <int rows>
__device__ __forceinline__ void narrow_to_split(const HopperArguments& args, int split, int lane,
                                                HopperPost<rows>& post) {
  __syncwarp();
  const HopperBlocks all = post.work.blocks;
  const auto splits = static_cast<int>(args.split.splits);
  const int each = (all.last - all.first + splits - 1) / splits;
  const int first = min(all.first + split * each, all.last), last = min(first + each, all.last);
  __syncwarp();
  if (lane < rows / 64) {  // a consumer sees nothing of it, or less
    const int own_last = post.consumer_last[lane];
    post.consumer_last[lane] = own_last > first ? min(own_last, last) : 0;
  }
  if (lane == 0) {
    // A part without blocks has one that nobody sees.
    post.work.blocks.first = first < last ? first : all.first;
    post.work.blocks.last = first < last ? last : all.first + 1;
    post.work.split = split;
  }
}

// The tiles that one block of threads takes, one after another, for all lanes of a warp. The first needs no counter,
// which may be cleared only now (hopper_forward.cpp).
class TileSource {
 public:
  __device__ __forceinline__ explicit TileSource(const HopperArguments& args) : args_(args) {}

  __device__ __forceinline__ int next(int lane) {
    const int before = taken_++;
    if (args_.next_tile == nullptr || before == 0) {
      return static_cast<int>(blockIdx.x + before * gridDim.x);
    }
    if (before == 1) {
      ptx::wait_for_kernel_before();
    }
    const int next = lane == 0 ? static_cast<int>(gridDim.x) + atomicAdd(args_.next_tile, 1) : 0;
    return __shfl_sync(~0u, next, 0);
  }

 private:
  const HopperArguments& args_;
  int taken_ = 0;
};

// What the scheduler knows of the sequence that its last tile belonged to.
class KnownSequence {
 public:
  __device__ __forceinline__ explicit KnownSequence(const HopperArguments& args)
      : args_(args),
        alike_(args.cu_seqlens_q.data == nullptr && args.query_lens.data == nullptr && !args.valid_lens_per_batch &&
               args.pages.table == nullptr),
        sequence_(args, 0) {}

  __device__ __forceinline__ const ShortSequence& of(int batch) {
    if (batch != batch_ && !alike_) {
      batch_ = batch;
      sequence_ = ShortSequence(args_, batch);
    }
    return sequence_;
  }

 private:
  const HopperArguments& args_;
  const bool alike_;  // those of all batch items
  int batch_ = 0;
  ShortSequence sequence_;
};

// Fills the post with the next tile that has work; false when there is none left.
template <class Memory>
__device__ __forceinline__ bool post_next(const HopperArguments& args, TileSource& source, KnownSequence& sequences,
                                          int lane, Memory& memory, std::uint32_t slot) {
  auto& post = memory.posts[slot];
  constexpr HopperTile shape = Memory::tile;
#pragma unroll 1
  for (int index = source.next(lane); index < args.tiles; index = source.next(lane)) {
    TileIndex tile = grouped_tile(args, index);
    int split = 0;
    if constexpr (Memory::splits) {
      split = tile.query_tile % static_cast<int>(args.split.splits);
      tile.query_tile /= static_cast<int>(args.split.splits);
    }
    if (post_work<shape.rows(), shape.keys>(args, tile, sequences.of(tile.batch), lane, post)) {
      if constexpr (Memory::splits) {
        narrow_to_split(args, split, lane, post);
      }
      if constexpr (Memory::spanned) {
        post_spans<shape.rows(), shape.keys>(args, lane, post, memory.spans.works[slot]);
      }
      return true;
    }
  }
  return false;
}

// The scheduler, one warp: posts the work of tiles one ahead of those who do it. Where tiles differ they are taken from
// a counter, so that a block of threads that is done early takes more of them. Behind the last tile comes a pause:
// tiles that are not done yet may have to be done again.
template <class Memory>
__device__ __forceinline__ void schedule(const HopperArguments& args, Memory& memory, int lane) {
  TileSource source(args);
  KnownSequence sequences(args);
  PostPosition position;
  int pauses = post_slots - 1;
  PostKind kind = PostKind::tile;
  while (kind != PostKind::finished) {
    ptx::barrier_wait(ptx::shared_address(&memory.post_empty[position.slot]), position.parity ^ 1);
    auto& post = memory.posts[position.slot];
    const bool again = post.again;
    __syncwarp();
    if (again) {
      if (lane == 0) {
        post.again = false;
        post.work.careful = true;
      }
    } else if (kind == PostKind::pause || !post_next(args, source, sequences, lane, memory, position.slot)) {
      kind = pauses-- > 0 ? PostKind::pause : PostKind::finished;
    }
    if (lane == 0) {
      post.kind = again ? PostKind::tile : kind;
    }
    ptx::barrier_arrive(ptx::shared_address(&memory.post_full[position.slot]));
    position.advance();
  }
}

}  // namespace headway::cuda
