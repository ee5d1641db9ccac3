// Two threads beside the consumers: one takes work and loads tiles, one adds query gradients up in order.
#pragma once

#include "engines/cuda/kernels/hopper_backward_loader.cuh"

namespace headway::cuda {

template <int head_dim, HopperBackwardVariant variant>
class HopperBackwardProducer {
 public:
  using Memory = HopperBackwardMemory<head_dim, variant>;
  static constexpr HopperBackwardTile tile = Memory::tile;

  __device__ __forceinline__ HopperBackwardProducer(const HopperBackwardArguments& args, Memory& memory)
      : args_(args), memory_(memory), shared_(memory), loader_(args, memory) {}

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (int item = take_item(); item < args_.items; item = take_item()) {
      team_ = team_of(item);
      work_on(item / args_.members, item % args_.members);
    }
    loader_.finish();
  }

 private:
  __device__ __forceinline__ int team_of(int item) const {
    const int head = item / args_.members;
    return head * ((args_.members + args_.chunk - 1) / args_.chunk) + (item - head * args_.members) / args_.chunk;
  }

  // The next item of all. Members of a team wait for each other, so each must be at work or have been: whoever takes a
  // second item of its own team does so only after the first has been added, or it could wait for itself. Items are
  // taken in order, so that what is taken belongs to no earlier team than what is seen before.
  __device__ __forceinline__ int take_item() {
    const int next = *static_cast<volatile int*>(args_.next_item);
    if (loader_.posts() > 0 && next < args_.items && team_of(next) == team_) {
      ptx::barrier_wait(shared_.of(offsetof(Memory, added)), (loader_.posts() - 1) & 1);
    }
    return next < args_.items ? atomicAdd(args_.next_item, 1) : args_.items;
  }

  __device__ __forceinline__ void work_on(int head, int member) {
    loader_.wait_for_post();
    loader_.describe(head);
    BackwardPost& post = loader_.post();
    const BackwardSequence& order = post.sequence;
    post.chunk = BackwardChunk(order, member);
    const int seen = order.seen_tiles(), tiles = (post.key_count + backward_keys - 1) / backward_keys;
    const bool works = member < order.members(), triangle = order.shape == TeamShape::triangle;
    bool described = true;  // the next post; others are copies
    const auto next_post = [&]() -> BackwardPost& {
      if (!described) {
        loader_.copy_post();
      }
      described = false;
      return loader_.post();
    };
    const int own = !works ? 0 : triangle && member < seen / 2 ? 2 : 1;
#pragma unroll 1
    for (int n = 0; n < own; ++n) {
      load_tile(next_post(), triangle && n == 0 ? seen - 1 - member : member, n == 1);
    }
    // Keys that nobody sees are shared out too: their gradients have to be written.
#pragma unroll 1
    for (int n = seen + member; n < tiles; n += args_.members) {
      loader_.post_tile(next_post(), n, 0);
    }
  }

  // The post stays as it is until the next but one.
  __device__ __forceinline__ void load_tile(BackwardPost& post, int key_tile, bool second) {
    BackwardWalk walk(post.sequence, post.chunk, key_tile, second);
    const int steps = walk.steps();
    loader_.post_tile(post, key_tile, steps);
    BackwardRanks ranks(post.sequence, post.chunk, key_tile, second);
    int rank = ranks.rank(walk.position(), walk.wrapped());
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      const BackwardPosition at = walk.position();
      loader_.load_queries(post, at, step == 0, step == steps - 1);
      if (step == 0) {
        loader_.load_keys(post);
      }
      memory_.turns[turn_.slot] = {loader_.tile_of(post, at), rank};
      ptx::barrier_arrive(shared_.of(offsetof(Memory, turns_full), turn_.slot));
      turn_.advance();
      loader_.load_grad_outs(post, at);
      loader_.advance();
      walk.advance();
      // While the copies run, and not before they start.
      if (step < steps - 1) {
        rank = ranks.rank(walk.position(), walk.wrapped());
      }
    }
  }

  const HopperBackwardArguments& args_;
  Memory& memory_;
  const BackwardAddresses shared_;
  BackwardLoader<Memory> loader_;
  int team_ = -1;
  TurnPosition turn_;
};

// Adds the query gradients of each step to their sum, when it is their turn.
template <int head_dim, HopperBackwardVariant variant>
class HopperBackwardAdder {
 public:
  using Memory = HopperBackwardMemory<head_dim, variant>;
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
        add_step();
      }
      ptx::barrier_arrive(shared_.of(offsetof(Memory, added)));
      ptx::barrier_arrive(shared_.of(offsetof(Memory, post_empty), position.slot));
      position.advance();
    }
  }

 private:
  // The turn has mostly come before the step's gradients are there, so it is waited for first.
  __device__ __forceinline__ void add_step() {
    constexpr std::uint32_t bytes = tile.gradient_numbers() * 4;
    ptx::barrier_wait(shared_.of(offsetof(Memory, turns_full), turn_.slot), turn_.parity);
    const BackwardTurn turn = memory_.turns[turn_.slot];
    turn_.advance();
    float* sums = args_.tile_sums + std::int64_t{turn.tile} * tile.gradient_numbers();
    int* turns = args_.tile_turns + turn.tile;
    const std::uint32_t from = shared_.of(offsetof(Memory, query_gradients), stage_.slot, bytes);
    while (ptx::load_acquire(turns) < turn.rank) {
    }
    ptx::global_to_async_fence();
    ptx::barrier_wait(shared_.of(offsetof(Memory, gradients_full), stage_.slot), stage_.parity);
    if (turn.rank == 0) {
      ptx::bulk_store(sums, from, bytes);  // so nothing has to be cleared before
    } else {
      ptx::bulk_add(sums, from, bytes);
    }
    ptx::bulk_commit();
    ptx::bulk_wait_read();
    ptx::barrier_arrive(shared_.of(offsetof(Memory, gradients_empty), stage_.slot));
    stage_.advance();
    ptx::bulk_wait();
    ptx::add_release(turns, 1);
  }

  const HopperBackwardArguments& args_;
  Memory& memory_;
  const BackwardAddresses shared_;
  StagePosition stage_;
  TurnPosition turn_;
};

}  // namespace headway::cuda
