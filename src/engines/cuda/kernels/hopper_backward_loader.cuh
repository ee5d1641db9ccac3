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

  __device__ __forceinline__ std::uint32_t slot() const { return post_.slot; }
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
    batch_ = batch;
    query_begin_ = static_cast<int>(sequence.query_begin);
    post.sequence = sequence_order(args_, sequence, batch, tile.row_bits(), tile.key_bits());
    post.sequence.share = query_share(post.sequence, post.kv_head % args_.query_parts, args_.query_parts);
  }

  __device__ __forceinline__ void wait_for_post() {
    ptx::barrier_wait(shared_.of(offsetof(Memory, post_empty), post_.slot), post_.parity ^ 1);
  }

  // Until all are done with all posts.
  __device__ __forceinline__ void wait_for_posts() {
    wait_for_post();
    PostPosition last = post_;
    last.advance();
    ptx::barrier_wait(shared_.of(offsetof(Memory, post_empty), last.slot), last.parity ^ 1);
  }

  __device__ __forceinline__ void publish_post() {
    ptx::barrier_arrive(shared_.of(offsetof(Memory, post_full), post_.slot));
    post_.advance();
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

  __device__ __forceinline__ void advance() { stage_.advance(); }

  __device__ __forceinline__ BackwardStep step_at(const BackwardPost& post, int key_tile, BackwardPosition at,
                                                  bool first, bool last) const {
    const int head = post.kv_head / args_.query_parts * post.sequence.group + at.head;
    const bool cut = post.sequence.is_edge(at.tile, key_tile);
    const int flags = (cut ? BackwardStep::cut : 0) | (cut || Memory::edges_everywhere ? BackwardStep::edge : 0) |
                      (first ? BackwardStep::first : 0) | (last ? BackwardStep::last : 0);
    return {head, at.tile * tile.queries, flags,
            post.first_tile + head * static_cast<int>(args_.tiles_a_head) + at.tile};
  }

  __device__ __forceinline__ void load_keys(const BackwardPost& post) {
    const std::uint32_t full = shared_.of(offsetof(Memory, keys_full));
    ptx::barrier_wait(shared_.of(offsetof(Memory, keys_empty)), keys_parity_ ^ 1);
    keys_parity_ ^= 1;
    ptx::barrier_expect_bytes(full, 2 * tile.key_bytes());
    const int row = post.key_begin + post.key_tile * tile.keys, kv_head = post.kv_head / args_.parts;
    copy_panels<tile.keys>(shared_.of(offsetof(Memory, keys)), &args_.key_map, args_.key_steps, row, kv_head,
                           post.batch, full);
    copy_panels<tile.keys>(shared_.of(offsetof(Memory, values)), &args_.value_map, args_.value_steps, row, kv_head,
                           post.batch, full);
  }

  // Of the sequence described last.
  __device__ __forceinline__ void load_queries(const BackwardStep& step) {
    const std::uint32_t full = shared_.of(offsetof(Memory, queries_full), stage_.slot);
    ptx::barrier_wait(shared_.of(offsetof(Memory, queries_empty), stage_.slot), stage_.parity ^ 1);
    memory_.steps[stage_.slot] = step;
    ptx::barrier_expect_bytes(full, tile.query_bytes() + tile.queries * 4);
    copy_panels<tile.queries>(shared_.of(offsetof(Memory, queries), stage_.slot, tile.query_bytes()), &args_.query_map,
                              args_.query_steps, query_begin_ + step.row, step.head, batch_, full);
    ptx::bulk_load(shared_.of(offsetof(Memory, lse), stage_.slot, tile.queries * 4),
                   args_.tile_lse + std::int64_t{step.tile} * tile.queries, tile.queries * 4, full);
  }

  __device__ __forceinline__ void load_grad_outs(const BackwardStep& step) {
    const std::uint32_t full = shared_.of(offsetof(Memory, grad_outs_full), stage_.slot);
    ptx::barrier_wait(shared_.of(offsetof(Memory, grad_outs_empty), stage_.slot), stage_.parity ^ 1);
    ptx::barrier_expect_bytes(full, tile.query_bytes() + tile.queries * 4);
    copy_panels<tile.queries>(shared_.of(offsetof(Memory, grad_outs), stage_.slot, tile.query_bytes()),
                              &args_.grad_out_map, args_.grad_out_steps, query_begin_ + step.row, step.head, batch_,
                              full);
    ptx::bulk_load(shared_.of(offsetof(Memory, delta), stage_.slot, tile.queries * 4),
                   args_.tile_delta + std::int64_t{step.tile} * tile.queries, tile.queries * 4, full);
  }

 private:
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
  int batch_ = 0, query_begin_ = 0;
};

}  // namespace headway::cuda
