// The threads beside the consumers: one takes work and loads tiles, one adds query gradients up in order, and two warps
// keep what a row may not see out of the sums.
#pragma once

#include "engines/cuda/kernels/hopper_backward_shared.cuh"
#include "engines/cuda/kernels/hopper_guard.cuh"
#include "engines/cuda/key_range.cuh"
#include "engines/cuda/ptx/bulk.cuh"
#include "engines/cuda/ptx/tma.cuh"

namespace headway::cuda {

template <int head_dim, HopperBackwardVariant variant>
class HopperBackwardProducer {
 public:
  using Memory = HopperBackwardMemory<head_dim, variant>;
  static constexpr HopperBackwardTile tile = Memory::tile;

  __device__ __forceinline__ HopperBackwardProducer(const HopperBackwardArguments& args, Memory& memory)
      : args_(args), memory_(memory), shared_(memory) {}

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (int item = take_item(); item < args_.items; item = take_item()) {
      team_ = team_of(item);
      work_on(item / args_.members, item % args_.members);
    }
    wait_for_post();
    memory_.posts[post_.slot].finished = true;
    publish_post();
    ptx::barrier_wait(shared_.of(offsetof(Memory, queries_empty), stage_.slot), stage_.parity ^ 1);
    memory_.steps[stage_.slot].flags = BackwardStep::stop;
    ptx::barrier_arrive(shared_.of(offsetof(Memory, queries_full), stage_.slot));
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
    if (posts_ > 0 && next < args_.items && team_of(next) == team_) {
      ptx::barrier_wait(shared_.of(offsetof(Memory, added)), (posts_ - 1) & 1);
    }
    return next < args_.items ? atomicAdd(args_.next_item, 1) : args_.items;
  }

  __device__ __forceinline__ void work_on(int head, int member) {
    wait_for_post();
    describe(head, member);
    const BackwardPost& post = memory_.posts[post_.slot];
    const BackwardSequence& order = post.sequence;
    const int seen = order.seen_tiles(), tiles = (post.key_count + backward_keys - 1) / backward_keys;
    const bool works = member < order.members(), triangle = order.shape == TeamShape::triangle;
    bool described = true;  // the next post; others are copies
    const auto next_post = [&]() -> BackwardPost& {
      if (!described) {
        wait_for_post();
        memory_.posts[post_.slot] = memory_.posts[post_.slot ^ 1];
      }
      described = false;
      return memory_.posts[post_.slot];
    };
    const int own = !works ? 0 : triangle && member < seen / 2 ? 2 : 1;
#pragma unroll 1
    for (int n = 0; n < own; ++n) {
      load_tile(next_post(), triangle && n == 0 ? seen - 1 - member : member, n == 1);
    }
    // Keys that nobody sees are shared out too: their gradients have to be written.
#pragma unroll 1
    for (int n = seen + member; n < tiles; n += args_.members) {
      post_tile(next_post(), n, 0);
    }
  }

  // Fills the next post as far as it is the same for all key tiles of a member.
  __device__ __forceinline__ void describe(int head, int member) {
    const int kv_heads = static_cast<int>(args_.kv_heads);
    const int batch = head / kv_heads;
    const Sequence sequence = sequence_of(args_, batch);
    BackwardPost& post = memory_.posts[post_.slot];
    post.finished = false;
    post.batch = batch;
    post.kv_head = head - batch * kv_heads;
    post.key_begin = static_cast<int>(sequence.key_begin);
    post.key_count = static_cast<int>(sequence.key_count);
    post.first_tile = static_cast<int>(args_.first_tile(batch, sequence.query_begin, tile.queries));
    query_begin_ = static_cast<int>(sequence.query_begin);
    BackwardSequence& order = post.sequence;
    order.shape = args_.shape;
    order.row_bits = tile.row_bits();
    order.group = static_cast<int>(args_.group);
    order.real_queries = static_cast<int>(sequence.real_queries);
    order.valid_keys = static_cast<int>(args_.own_ends ? sequence.key_count : valid_len(args_, sequence, batch, 0));
    order.left = args_.left;
    order.right = args_.right;
    order.offset = static_cast<int>(sequence.offset);
    order.chunk = args_.chunk;
    post.chunk = BackwardChunk(order, member);
  }

  __device__ __forceinline__ void wait_for_post() {
    ptx::barrier_wait(shared_.of(offsetof(Memory, post_empty), post_.slot), post_.parity ^ 1);
  }

  __device__ __forceinline__ void publish_post() {
    ptx::barrier_arrive(shared_.of(offsetof(Memory, post_full), post_.slot));
    post_.advance();
    ++posts_;
  }

  __device__ __forceinline__ void post_tile(BackwardPost& post, int key_tile, int steps) {
    post.key_tile = key_tile;
    post.steps = steps;
    post.keys_parity = keys_parity_;
    publish_post();
  }

  // The post stays as it is until the next but one.
  __device__ __forceinline__ void load_tile(BackwardPost& post, int key_tile, bool second) {
    BackwardWalk walk(post.sequence, post.chunk, key_tile, second);
    const int steps = walk.steps();
    post_tile(post, key_tile, steps);
    BackwardRanks ranks(post.sequence, post.chunk, key_tile, second);
    int rank = ranks.rank(walk.position(), walk.wrapped());
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      const BackwardPosition at = walk.position();
      load_queries(post, at, step == 0, step == steps - 1);
      if (step == 0) {
        load_keys(post);
      }
      memory_.turns[turn_.slot] = {tile_of(post, at), rank};
      ptx::barrier_arrive(shared_.of(offsetof(Memory, turns_full), turn_.slot));
      turn_.advance();
      load_grad_outs(post, at);
      stage_.advance();
      walk.advance();
      // While the copies run, and not before they start.
      if (step < steps - 1) {
        rank = ranks.rank(walk.position(), walk.wrapped());
      }
    }
  }

  __device__ __forceinline__ int tile_of(const BackwardPost& post, BackwardPosition at) const {
    const int head = post.kv_head * post.sequence.group + at.head;
    return post.first_tile + head * static_cast<int>(args_.tiles_a_head) + at.tile;
  }

  __device__ __forceinline__ void load_keys(const BackwardPost& post) {
    const std::uint32_t full = shared_.of(offsetof(Memory, keys_full));
    ptx::barrier_wait(shared_.of(offsetof(Memory, keys_empty)), keys_parity_ ^ 1);
    keys_parity_ ^= 1;
    ptx::barrier_expect_bytes(full, 2 * tile.key_bytes());
    const int row = post.key_begin + post.key_tile * backward_keys;
    copy_panels<backward_keys>(shared_.of(offsetof(Memory, keys)), &args_.key_map, args_.key_steps, row, post.kv_head,
                               post.batch, full);
    copy_panels<backward_keys>(shared_.of(offsetof(Memory, values)), &args_.value_map, args_.value_steps, row,
                               post.kv_head, post.batch, full);
  }

  __device__ __forceinline__ void load_queries(const BackwardPost& post, BackwardPosition position, bool first,
                                               bool last) {
    const std::uint32_t full = shared_.of(offsetof(Memory, queries_full), stage_.slot);
    ptx::barrier_wait(shared_.of(offsetof(Memory, queries_empty), stage_.slot), stage_.parity ^ 1);
    const int head = post.kv_head * post.sequence.group + position.head;
    const int row = position.tile * tile.queries;
    const bool edge = variant == HopperBackwardVariant::masked || post.sequence.is_edge(position.tile, post.key_tile);
    BackwardStep& step = memory_.steps[stage_.slot];
    step.head = head;
    step.row = row;
    step.flags = (edge ? BackwardStep::edge : 0) | (first ? BackwardStep::first : 0) | (last ? BackwardStep::last : 0);
    ptx::barrier_expect_bytes(full, tile.query_bytes() + tile.queries * 4);
    copy_panels<tile.queries>(shared_.of(offsetof(Memory, queries), stage_.slot, tile.query_bytes()), &args_.query_map,
                              args_.query_steps, query_begin_ + row, head, post.batch, full);
    ptx::bulk_load(shared_.of(offsetof(Memory, lse), stage_.slot, tile.queries * 4),
                   rows_of(args_.tile_lse, post, position), tile.queries * 4, full);
  }

  __device__ __forceinline__ void load_grad_outs(const BackwardPost& post, BackwardPosition position) {
    const std::uint32_t full = shared_.of(offsetof(Memory, grad_outs_full), stage_.slot);
    ptx::barrier_wait(shared_.of(offsetof(Memory, grad_outs_empty), stage_.slot), stage_.parity ^ 1);
    const int head = post.kv_head * post.sequence.group + position.head;
    ptx::barrier_expect_bytes(full, tile.query_bytes() + tile.queries * 4);
    copy_panels<tile.queries>(shared_.of(offsetof(Memory, grad_outs), stage_.slot, tile.query_bytes()),
                              &args_.grad_out_map, args_.grad_out_steps, query_begin_ + position.tile * tile.queries,
                              head, post.batch, full);
    ptx::bulk_load(shared_.of(offsetof(Memory, delta), stage_.slot, tile.queries * 4),
                   rows_of(args_.tile_delta, post, position), tile.queries * 4, full);
  }

  __device__ __forceinline__ const float* rows_of(const float* values, const BackwardPost& post,
                                                  BackwardPosition at) const {
    return values + std::int64_t{tile_of(post, at)} * tile.queries;
  }

  template <int rows>
  __device__ __forceinline__ void copy_panels(std::uint32_t shared, const CUtensorMap* map, MapSteps steps, int row,
                                              int head, int batch, std::uint32_t barrier) {
#pragma unroll
    for (int panel = 0; panel < tile.panels(); ++panel) {
      ptx::copy_box(shared + panel * rows * 128, map, {panel * 64, row, head * steps.head, batch * steps.batch},
                    barrier);
    }
  }

  const HopperBackwardArguments& args_;
  Memory& memory_;
  const BackwardAddresses shared_;
  StagePosition stage_;
  PostPosition post_;
  std::uint32_t keys_parity_ = 0;
  int posts_ = 0;
  int team_ = -1;
  int query_begin_ = 0;
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

// At edges, looks through the operands of sums over pairs: keys, queries and output gradients. Consumers wait for it
// only before those sums; that it may change products which they read before does not matter, see hopper_backward.cuh.
template <class Half, int head_dim, HopperBackwardVariant variant>
class HopperBackwardGuard {
 public:
  using Memory = HopperBackwardMemory<head_dim, variant>;
  static constexpr HopperBackwardTile tile = Memory::tile;

  __device__ __forceinline__ HopperBackwardGuard(Memory& memory, int warp, int lane)
      : memory_(memory), shared_(memory), thread_(warp * 32 + lane), lane_(lane) {}

  __device__ __forceinline__ void run() {
    StagePosition stage;
    std::uint32_t keys_parity = 1;
    bool keys_checked = false;
#pragma unroll 1
    while (true) {
      ptx::barrier_wait(shared_.of(offsetof(Memory, queries_full), stage.slot), stage.parity);
      const int flags = memory_.steps[stage.slot].flags;
      if ((flags & BackwardStep::stop) != 0) {
        return;
      }
      if ((flags & BackwardStep::first) != 0) {
        keys_parity ^= 1;
        keys_checked = false;
      }
      if ((flags & BackwardStep::edge) != 0) {
        if (!keys_checked) {
          ptx::barrier_wait(shared_.of(offsetof(Memory, keys_full)), keys_parity);
          check<tile.key_bytes()>(memory_.keys);
          keys_checked = true;
        }
        check<tile.query_bytes()>(memory_.queries[stage.slot]);
        ptx::barrier_wait(shared_.of(offsetof(Memory, grad_outs_full), stage.slot), stage.parity);
        check<tile.query_bytes()>(memory_.grad_outs[stage.slot]);
      }
      __syncwarp();
      if (lane_ == 0) {
        ptx::barrier_arrive(shared_.of(offsetof(Memory, checked), stage.slot));
      }
      stage.advance();
    }
  }

 private:
  template <std::uint32_t bytes>
  __device__ __forceinline__ void check(std::uint8_t* block) {
    if (check_block<Half, bytes>(block, thread_)) {
      ptx::shared_writes_to_async_fence();
    }
  }

  Memory& memory_;
  const BackwardAddresses shared_;
  const int thread_, lane_;
};

}  // namespace headway::cuda
