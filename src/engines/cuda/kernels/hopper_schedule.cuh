// Which tile a block takes next, and what work it is: sequences, key ranges, key blocks.
#pragma once

#include <climits>

#include "engines/cuda/kernels/hopper_shared.cuh"
#include "engines/cuda/key_range.cuh"

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

// Fills a post, by all lanes of a warp: each row's range, and from them the blocks to visit. False when the tile lies
// behind the end of its sequence and there is nothing to do.
template <int rows, int keys>
__device__ __forceinline__ bool post_work(const HopperArguments& args, int index, int lane, HopperPost<rows>& post) {
  const TileIndex tile = grouped_tile(args, index);
  const Sequence sequence = sequence_of(args, tile.batch);
  const int row = tile.query_tile * rows;
  if (row >= sequence.query_count) {
    return false;
  }
  int lowest = INT_MAX, highest = 0, full_begin = 0, full_end = INT_MAX;
#pragma unroll 1
  for (int consumer = 0; consumer < rows / 64; ++consumer) {
    int consumer_end = 0;
#pragma unroll 1
    for (int i = 64 * consumer + lane; i < 64 * (consumer + 1); i += 32) {
      int begin = 0, end = 0;
      if (row + i < sequence.real_queries) {
        const KeyRange range = row_range(args, sequence, tile.batch, row + i);
        begin = static_cast<int>(range.begin);
        end = static_cast<int>(range.end);
        full_begin = max(full_begin, begin);
        full_end = min(full_end, end);
      }
      post.begin[i] = begin;
      post.end[i] = end;
      lowest = begin < end ? min(lowest, begin) : lowest;
      consumer_end = max(consumer_end, end);
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
    work.query_begin = static_cast<int>(sequence.query_begin);
    work.key_begin = static_cast<int>(sequence.key_begin);
    work.stored_rows = static_cast<int>(smaller(sequence.query_count - row, rows));
    work.real_rows = static_cast<int>(smaller(sequence.real_queries - row, rows));
    work.key_count = static_cast<int>(sequence.key_count);
    work.offset = static_cast<int>(sequence.offset);
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

// The tiles that one block of threads takes, one after another, for all lanes of a warp.
class TileSource {
 public:
  __device__ __forceinline__ explicit TileSource(const HopperArguments& args) : args_(args), next_(blockIdx.x) {}

  __device__ __forceinline__ int next(int lane) {
    if (args_.next_tile != nullptr) {
      const int taken = lane == 0 ? atomicAdd(args_.next_tile, 1) : 0;
      return __shfl_sync(~0u, taken, 0);
    }
    const int taken = next_;
    next_ += gridDim.x;
    return taken;
  }

 private:
  const HopperArguments& args_;
  int next_;
};

// Fills the post with the next tile that has work; false when there is none left.
template <class Memory, class Post>
__device__ __forceinline__ bool post_next(const HopperArguments& args, TileSource& source, int lane, Post& post) {
  constexpr HopperTile tile = Memory::tile;
  int index = source.next(lane);
  while (index < args.tiles && !post_work<tile.rows(), tile.keys>(args, index, lane, post)) {
    index = source.next(lane);
  }
  return index < args.tiles;
}

// A tile that was done is posted again, possibly in the other post.
template <class Post>
__device__ __forceinline__ void post_again(Post& from, Post& to, int lane) {
  static_assert(sizeof(Post) % sizeof(int) == 0);
  if (&from != &to) {
    for (int i = lane; i < static_cast<int>(sizeof(Post) / sizeof(int)); i += 32) {
      reinterpret_cast<int*>(&to)[i] = reinterpret_cast<const int*>(&from)[i];
    }
  }
  __syncwarp();
  if (lane == 0) {
    from.again = to.again = false;
    to.work.careful = true;
  }
}

// The scheduler, one warp: posts the work of tiles one ahead of those who do it. Where tiles differ they are taken from
// a counter, so that a block of threads that is done early takes more of them.
template <class Memory>
__device__ __forceinline__ void schedule(const HopperArguments& args, Memory& memory, int lane) {
  const auto wait_until_done = [&](PostPosition position) {
    ptx::barrier_wait(ptx::shared_address(&memory.post_empty[position.slot]), position.parity ^ 1);
  };
  TileSource source(args);
  PostPosition position;
  bool finished = false;
  while (!finished) {
    wait_until_done(position);
    auto& post = memory.posts[position.slot];
    if (post.again) {
      post_again(post, post, lane);
    } else if (!post_next<Memory>(args, source, lane, post)) {
      PostPosition other = position;  // the last tile may be one to be done again
      other.advance();
      wait_until_done(other);
      finished = !memory.posts[other.slot].again;
      if (!finished) {
        post_again(memory.posts[other.slot], post, lane);
      }
    }
    if (lane == 0) {
      post.finished = finished;
    }
    __syncwarp();
    if (lane == 0) {
      ptx::barrier_arrive(ptx::shared_address(&memory.post_full[position.slot]));
    }
    position.advance();
  }
}

}  // namespace headway::cuda
