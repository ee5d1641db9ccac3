// How the backward's tiles get into shared memory, and how its work is told to the others: what one thread does, who
// decides which tiles and in which order.
#pragma once

#include "engines/cuda/kernels/hopper_backward_sequence.cuh"
#include "engines/cuda/kernels/hopper_backward_shared.cuh"
#include "engines/cuda/ptx/bulk.cuh"
#include "engines/cuda/ptx/tma.cuh"

namespace headway::cuda {

template <class Memory>
class BackwardLoader {
 public:
  static constexpr HopperBackwardTile tile = Memory::tile;

  __device__ __forceinline__ BackwardLoader(const HopperBackwardArguments& args, Memory& memory)
      : args_(args), memory_(memory), shared_(memory) {}

  __device__ __forceinline__ BackwardPost& post() { return memory_.posts[post_.slot]; }

  // Another key tile of the same kv head as the last post.
  __device__ __forceinline__ void copy_post() {
    wait_for_post();
    memory_.posts[post_.slot] = memory_.posts[post_.slot ^ 1];
  }

  // Fills the next post as far as it is the same for all key tiles of a kv head.
  __device__ __forceinline__ void describe(int head) {
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
    post.sequence = sequence_order(args_, sequence, batch, tile.row_bits(), tile.key_bits());
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

  // No more work: for those who follow posts, and for those who follow steps.
  __device__ __forceinline__ void finish() {
    wait_for_post();
    post().finished = true;
    publish_post();
    ptx::barrier_wait(shared_.of(offsetof(Memory, queries_empty), stage_.slot), stage_.parity ^ 1);
    memory_.steps[stage_.slot].flags = BackwardStep::stop;
    ptx::barrier_arrive(shared_.of(offsetof(Memory, queries_full), stage_.slot));
  }

  __device__ __forceinline__ int posts() const { return posts_; }
  __device__ __forceinline__ void advance() { stage_.advance(); }

  __device__ __forceinline__ int tile_of(const BackwardPost& post, BackwardPosition at) const {
    const int head = post.kv_head * post.sequence.group + at.head;
    return post.first_tile + head * static_cast<int>(args_.tiles_a_head) + at.tile;
  }

  __device__ __forceinline__ void load_keys(const BackwardPost& post) {
    const std::uint32_t full = shared_.of(offsetof(Memory, keys_full));
    ptx::barrier_wait(shared_.of(offsetof(Memory, keys_empty)), keys_parity_ ^ 1);
    keys_parity_ ^= 1;
    ptx::barrier_expect_bytes(full, 2 * tile.key_bytes());
    const int row = post.key_begin + post.key_tile * tile.keys;
    copy_panels<tile.keys>(shared_.of(offsetof(Memory, keys)), &args_.key_map, args_.key_steps, row, post.kv_head,
                           post.batch, full);
    copy_panels<tile.keys>(shared_.of(offsetof(Memory, values)), &args_.value_map, args_.value_steps, row, post.kv_head,
                           post.batch, full);
  }

  __device__ __forceinline__ void load_queries(const BackwardPost& post, BackwardPosition position, bool first,
                                               bool last) {
    const std::uint32_t full = shared_.of(offsetof(Memory, queries_full), stage_.slot);
    ptx::barrier_wait(shared_.of(offsetof(Memory, queries_empty), stage_.slot), stage_.parity ^ 1);
    const int head = post.kv_head * post.sequence.group + position.head;
    const int row = position.tile * tile.queries;
    const bool edge = Memory::edges_everywhere || post.sequence.is_edge(position.tile, post.key_tile);
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

 private:
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
  int query_begin_ = 0;
};

}  // namespace headway::cuda
