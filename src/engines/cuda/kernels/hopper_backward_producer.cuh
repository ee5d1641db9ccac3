// Beside the consumers: a warp takes work and loads tiles, a thread adds query gradients up in order.
#pragma once

#include "engines/cuda/kernels/hopper_backward_loader.cuh"
#include "engines/cuda/kernels/hopper_backward_spans.cuh"
#include "engines/cuda/ptx/dependent_launch.cuh"

namespace headway::cuda {

// One thread loads, and all 32 find out what: where the next 32 steps are and when their turns come. To find that out
// step by step takes longer than a step does.
template <int columns, HopperBackwardVariant variant>
class HopperBackwardProducer {
 public:
  using Memory = HopperBackwardMemory<columns, variant>;
  static constexpr HopperBackwardTile tile = Memory::tile;
  static constexpr bool spanned = variant == HopperBackwardVariant::spanned;

  __device__ __forceinline__ HopperBackwardProducer(const HopperBackwardArguments& args, Memory& memory, int lane)
      : args_(args), memory_(memory), shared_(memory), loader_(args, memory), lane_(lane) {}

  __device__ __forceinline__ void run() {
    ptx::wait_for_kernel_before();  // its lse, delta and counters
#pragma unroll 1
    for (int item = next_item(); item < args_.items; item = next_item()) {
      const BackwardItem place = item_at(item);
      team_ = place.team;
      work_on(place.head, place.member);
    }
    if (loads()) {
      loader_.finish();
    }
  }

 private:
  __device__ __forceinline__ bool loads() const { return lane_ == 0; }

  __device__ __forceinline__ BackwardItem item_at(int item) const {
    return backward_item(item, args_.items, args_.members, args_.chunk, args_.spread);
  }

  __device__ __forceinline__ int next_item() { return __shfl_sync(~0u, loads() ? take_item() : 0, 0); }

  // The next item of all. Members of a team wait for each other, so each must be at work or have been: whoever takes a
  // second item of its own team does so only after the first has been added, or it could wait for itself. Items are
  // taken in order, so that what is taken belongs to no earlier team than what is seen before.
  __device__ __forceinline__ int take_item() {
    const int next = *static_cast<volatile int*>(args_.next_item);
    if (!spanned && next < args_.items && item_at(next).team == team_) {
      loader_.wait_for_posts();
    }
    return next < args_.items ? atomicAdd(args_.next_item, 1) : args_.items;
  }

  __device__ __forceinline__ void work_on(int head, int member) {
    if (loads()) {
      loader_.wait_for_post();
      loader_.describe(head);
      loader_.post().chunk = BackwardChunk(loader_.post().sequence, member);
    }
    const BackwardPost& post = next_post();
    const BackwardSequence& order = post.sequence;
    const int seen = order.seen_tiles(), tiles = (post.key_count + backward_keys - 1) / backward_keys;
    const bool works = member < order.members(), triangle = order.shape == TeamShape::triangle;
    const int own = !works ? 0 : triangle && member < seen / 2 ? 2 : 1;
#pragma unroll 1
    for (int n = 0; n < own; ++n) {
      if (n > 0 && loads()) {
        loader_.copy_post();
      }
      load_tile((triangle || spanned) && n == 0 ? seen - 1 - member : member, n == 1);
    }
    // Keys that nobody sees are shared out too: their gradients have to be written.
#pragma unroll 1
    for (int n = seen + member; n < tiles && loads(); n += args_.members) {
      if (own > 0 || n > seen + member) {
        loader_.copy_post();
      }
      loader_.post_tile(loader_.post(), n, 0);
    }
  }

  // What the loading thread has written.
  __device__ __forceinline__ const BackwardPost& next_post() {
    __syncwarp();
    return memory_.posts[__shfl_sync(~0u, loader_.slot(), 0)];
  }

  // The post stays as it is until the next but one.
  __device__ __forceinline__ void load_tile(int key_tile, bool second) {
    const BackwardPost& post = next_post();
    if constexpr (spanned) {
      load_spans(post, key_tile);
      return;
    }
    const BackwardWalk walk(post.sequence, post.chunk, key_tile, second);
    const int steps = walk.steps();
    if (loads()) {
      loader_.post_tile(loader_.post(), key_tile, steps);
    }
    const TileSpan tiles = walk.tiles();
#pragma unroll 1
    for (int n = tiles.begin + lane_; n < tiles.end; n += 32) {
      memory_.starts[n - tiles.begin] = walk.start_of(n);
    }
    __syncwarp();
#pragma unroll 1
    for (int begin = 0; begin < steps; begin += 32) {
      const int own = min(begin + lane_, steps - 1);
      const BackwardStep found = loader_.step_at(post, key_tile, walk.position(own), own == 0, own == steps - 1);
      const int rank = walk.rank(own, [&](int n) { return memory_.starts[n - tiles.begin]; });
#pragma unroll 1
      for (int n = 0; n < min(32, steps - begin); ++n) {
        const auto of_step = [&](int value) { return __shfl_sync(~0u, value, n); };
        const BackwardStep step = {of_step(found.head), of_step(found.row), of_step(found.flags), of_step(found.tile)};
        const BackwardTurn turn = {step.tile, of_step(rank)};
        if (loads()) {
          load_step(post, step, turn);
        }
      }
    }
  }

  // The same where rows have spans.
  __device__ __forceinline__ void load_spans(const BackwardPost& post, int key_tile) {
    SpanWalk walk(args_, post, key_tile);
    const int steps = walk.steps(lane_);
    if (loads()) {
      loader_.post_tile(loader_.post(), key_tile, steps);
    }
    __syncwarp();
#pragma unroll 1
    for (int begin = 0; begin < steps; begin += 32) {
      const int count = min(32, steps - begin), own = begin + min(lane_, count - 1);
      const BackwardPosition at = walk.next(lane_, count);
      BackwardStep found = loader_.step_at(post, key_tile, at, own == 0, own == steps - 1);
      found.flags |= walk.has_holes(at) ? BackwardStep::edge : 0;
      const int rank = walk.rank(at);
#pragma unroll 1
      for (int n = 0; n < count; ++n) {
        const auto of_step = [&](int value) { return __shfl_sync(~0u, value, n); };
        const BackwardStep step = {of_step(found.head), of_step(found.row), of_step(found.flags), of_step(found.tile)};
        const BackwardTurn turn = {step.tile, of_step(rank)};
        if (loads()) {
          load_step(post, step, turn);
        }
      }
    }
  }

  __device__ __forceinline__ void load_step(const BackwardPost& post, const BackwardStep& step, BackwardTurn turn) {
    loader_.load_queries(step);
    if ((step.flags & BackwardStep::first) != 0) {
      loader_.load_keys(post);
    }
    memory_.turns[turn_.slot] = turn;
    ptx::barrier_arrive(shared_.of(offsetof(Memory, turns_full), turn_.slot));
    turn_.advance();
    loader_.load_grad_outs(step);
    loader_.advance();
  }

  const HopperBackwardArguments& args_;
  Memory& memory_;
  const BackwardAddresses shared_;
  BackwardLoader<Memory> loader_;  // only one thread's is used
  const int lane_;
  int team_ = -1;
  TurnPosition turn_;
};

// Adds the query gradients of each step to their sum, when it is their turn; or stores them, where they are whole.
template <int columns, HopperBackwardVariant variant>
class HopperBackwardAdder {
 public:
  using Memory = HopperBackwardMemory<columns, variant>;
  static constexpr HopperBackwardTile tile = Memory::tile;

  __device__ __forceinline__ HopperBackwardAdder(const HopperBackwardArguments& args, Memory& memory)
      : args_(args), memory_(memory), shared_(memory) {}

  __device__ __forceinline__ void run() {
    PostPosition position;
#pragma unroll 1
    while (true) {
      ptx::barrier_wait(shared_.of(offsetof(Memory, post_full), position.slot), position.parity);
      const BackwardPost& post = memory_.posts[position.slot];
      if (post.finished) {
        return;
      }
#pragma unroll 1
      for (int steps = post.steps; steps > 0; --steps) {
        if (args_.whole_query_gradients) {
          store_step(post);
        } else {
          add_step();
        }
      }
      ptx::barrier_arrive(shared_.of(offsetof(Memory, post_empty), position.slot));
      position.advance();
    }
  }

 private:
  // Rows that are whole go where they belong.
  __device__ __forceinline__ void store_step(const BackwardPost& post) {
    ptx::barrier_wait(shared_.of(offsetof(Memory, turns_full), turn_.slot), turn_.parity);
    const int number = memory_.turns[turn_.slot].tile - post.first_tile;
    turn_.advance();
    const int tiles = static_cast<int>(args_.tiles_a_head), head = number / tiles;
    const int row = (number - head * tiles) * tile.queries;
    const MapSteps steps = args_.query_gradient_steps;
    const std::uint32_t from = shared_.of(offsetof(Memory, query_gradients), stage_.slot, tile.gradient_numbers() * 4);
    ptx::barrier_wait(shared_.of(offsetof(Memory, gradients_full), stage_.slot), stage_.parity);
#pragma unroll
    for (int panel = 0; panel < tile.panels(); ++panel) {
      if (args_.query_gradient.data != nullptr && panel * 64 < args_.head_dim) {
        ptx::store_box(from + panel * tile.queries * 128, &args_.query_gradient_map,
                       {panel * 64, row, head * steps.head, post.batch * steps.batch});
      }
    }
    ptx::bulk_commit();
    ptx::bulk_wait_read();
    ptx::barrier_arrive(shared_.of(offsetof(Memory, gradients_empty), stage_.slot));
    stage_.advance();
  }

  __device__ __forceinline__ void add_step() {
    constexpr std::uint32_t bytes = tile.gradient_numbers() * 4;
    if (!known_) {
      ptx::barrier_wait(shared_.of(offsetof(Memory, turns_full), turn_.slot), turn_.parity);
      look();
    }
    const BackwardTurn turn = next_;
    int* turns = args_.tile_turns + turn.tile;
    while (turns_so_far_ < turn.rank) {
      turns_so_far_ = ptx::load_acquire(turns);
    }
    float* sums = args_.tile_sums + std::int64_t{turn.tile} * tile.gradient_numbers();
    const std::uint32_t from = shared_.of(offsetof(Memory, query_gradients), stage_.slot, bytes);
    ptx::global_to_async_fence();
    ptx::barrier_wait(shared_.of(offsetof(Memory, gradients_full), stage_.slot), stage_.parity);
    if (turn.rank == 0) {
      ptx::bulk_store(sums, from, bytes);  // so nothing has to be cleared before
    } else {
      ptx::bulk_add(sums, from, bytes);
    }
    ptx::bulk_commit();
    // The next turn has mostly come by now, and to look takes as long as the copy.
    known_ = ptx::barrier_is_over(shared_.of(offsetof(Memory, turns_full), turn_.slot), turn_.parity);
    if (known_) {
      look();
    }
    ptx::bulk_wait_read();
    ptx::barrier_arrive(shared_.of(offsetof(Memory, gradients_empty), stage_.slot));
    stage_.advance();
    ptx::bulk_wait();
    ptx::add_release(turns, 1);
  }

  __device__ __forceinline__ void look() {
    next_ = memory_.turns[turn_.slot];
    turn_.advance();
    turns_so_far_ = ptx::load_acquire(args_.tile_turns + next_.tile);
  }

  const HopperBackwardArguments& args_;
  Memory& memory_;
  const BackwardAddresses shared_;
  StagePosition stage_;
  TurnPosition turn_;     // the next to look at
  BackwardTurn next_{};   // the next to take, if known
  int turns_so_far_ = 0;  // of its tile, when looked at last
  bool known_ = false;
};

}  // namespace headway::cuda
