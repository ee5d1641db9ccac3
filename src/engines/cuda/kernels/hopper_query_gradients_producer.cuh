// The shared memory of hopper_query_gradients.cuh, and the threads beside its consumers: one takes work and loads
// tiles, two warps keep keys that a row may not see out of the sums.
#pragma once

#include "engines/cuda/kernels/hopper_backward_sequence.cuh"
#include "engines/cuda/kernels/hopper_backward_shared.cuh"
#include "engines/cuda/kernels/hopper_guard.cuh"
#include "engines/cuda/kernels/hopper_schedule.cuh"
#include "engines/cuda/ptx/dependent_launch.cuh"
#include "engines/cuda/ptx/tma.cuh"

namespace headway::cuda {

// One tile of query rows of one head.
struct QueryGradientsPost {
  BackwardSequence sequence;  // with tiles of 64 queries
  bool finished;              // there is no more work
  int batch, head;
  int row;                       // the first, counted inside its sequence
  int query_begin, query_count;  // where the sequence lies on the S axis
  int key_count;
  int first_tile;      // where the sequence has tile 0 in the arrays of tiles
  int steps;           // key tiles; 0: no row sees a key
  int first_key_tile;  // of them
};

struct QueryGradientsStep {
  int key_tile;
  int edges;  // bit g: consumer g's rows may not see some key; stop: no step, there are no more

  static constexpr int stop = 4;
};

template <HopperBackwardVariant variant>
struct alignas(tile_alignment) QueryGradientsMemory {
  static constexpr HopperBackwardTile tile = hopper_backward_tile(256, variant);
  static constexpr int consumers = HopperBackwardTile::consumers;
  static constexpr int stages = HopperBackwardTile::stages;
  static constexpr bool edges_everywhere = variant == HopperBackwardVariant::masked;

  std::uint8_t queries[consumers][tile.query_bytes()];
  std::uint8_t grad_outs[consumers][tile.query_bytes()];
  std::uint8_t keys[stages][tile.key_bytes()];  // dQ of one and S of the next are in flight together
  std::uint8_t values[tile.key_bytes()];
  std::uint64_t queries_full, queries_empty;
  std::uint64_t keys_full[stages], keys_empty[stages];
  std::uint64_t values_full, values_empty;
  std::uint64_t checked[stages];  // keys at an edge
  std::uint64_t post_full[2], post_empty[2];
  QueryGradientsStep steps[stages];
  QueryGradientsPost posts[2];
};

template <class Memory>
class QueryGradientsProducer {
 public:
  static constexpr HopperBackwardTile tile = Memory::tile;
  static constexpr int rows = tile.queries * Memory::consumers;

  __device__ __forceinline__ QueryGradientsProducer(const HopperBackwardArguments& args, Memory& memory)
      : args_(args), memory_(memory), shared_(memory) {}

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (int index = atomicAdd(args_.next_tile, 1); index < args_.tiles; index = atomicAdd(args_.next_tile, 1)) {
      work_on(grouped_tile(args_, index));
    }
    wait_for_post();
    memory_.posts[post_.slot].finished = true;
    publish_post();
    ptx::barrier_wait(shared_.of(offsetof(Memory, keys_empty), stage_.slot), stage_.parity ^ 1);
    memory_.steps[stage_.slot].edges = QueryGradientsStep::stop;
    ptx::barrier_arrive(shared_.of(offsetof(Memory, keys_full), stage_.slot));
    ptx::wait_for_kernel_before();  // hopper_key_gradients, beside which this one ran: who waits for one waits for both
  }

 private:
  __device__ __forceinline__ void wait_for_post() {
    ptx::barrier_wait(shared_.of(offsetof(Memory, post_empty), post_.slot), post_.parity ^ 1);
  }

  __device__ __forceinline__ void publish_post() {
    ptx::barrier_arrive(shared_.of(offsetof(Memory, post_full), post_.slot));
    post_.advance();
  }

  __device__ __forceinline__ void work_on(TileIndex at) {
    const Sequence sequence = sequence_of(args_, at.batch);
    const int row = at.query_tile * rows;
    if (row >= sequence.query_count) {
      return;
    }
    wait_for_post();
    QueryGradientsPost& post = memory_.posts[post_.slot];
    post.sequence = sequence_order(args_, sequence, at.batch, tile.row_bits() + 1, tile.key_bits());
    const TileSpan keys = post.sequence.keys_of(at.query_tile);
    post.sequence.row_bits = tile.row_bits();
    post.finished = false;
    post.batch = at.batch;
    post.head = at.head;
    post.row = row;
    post.query_begin = static_cast<int>(sequence.query_begin);
    post.query_count = static_cast<int>(sequence.query_count);
    post.key_count = static_cast<int>(sequence.key_count);
    post.first_tile = static_cast<int>(args_.first_tile(at.batch, sequence.query_begin, tile.queries));
    post.steps = keys.count();
    post.first_key_tile = keys.begin;
    publish_post();
    key_begin_ = static_cast<int>(sequence.key_begin);
    kv_head_ = at.head / static_cast<int>(args_.group);
#pragma unroll 1
    for (int n = keys.begin; n < keys.end; ++n) {
      load_keys(post, n);
      if (n == keys.begin) {
        load_queries(post);
      }
      load_values(post, n);
      stage_.advance();
    }
  }

  __device__ __forceinline__ void load_queries(const QueryGradientsPost& post) {
    const std::uint32_t full = shared_.of(offsetof(Memory, queries_full));
    ptx::barrier_wait(shared_.of(offsetof(Memory, queries_empty)), queries_parity_ ^ 1);
    queries_parity_ ^= 1;
    ptx::barrier_expect_bytes(full, 2 * Memory::consumers * tile.query_bytes());
#pragma unroll 1
    for (int consumer = 0; consumer < Memory::consumers; ++consumer) {
      const int row = post.query_begin + post.row + consumer * tile.queries;
      copy_tile(shared_.of(offsetof(Memory, queries), consumer, tile.query_bytes()), &args_.query_map,
                args_.query_steps, row, post.head, post.batch, full);
      copy_tile(shared_.of(offsetof(Memory, grad_outs), consumer, tile.query_bytes()), &args_.grad_out_map,
                args_.grad_out_steps, row, post.head, post.batch, full);
    }
  }

  __device__ __forceinline__ void load_keys(const QueryGradientsPost& post, int key_tile) {
    const std::uint32_t full = shared_.of(offsetof(Memory, keys_full), stage_.slot);
    ptx::barrier_wait(shared_.of(offsetof(Memory, keys_empty), stage_.slot), stage_.parity ^ 1);
    int edges = 0;
#pragma unroll
    for (int consumer = 0; consumer < Memory::consumers; ++consumer) {
      const int query_tile = post.row / tile.queries + consumer;
      edges |= (Memory::edges_everywhere || post.sequence.is_edge(query_tile, key_tile)) << consumer;
    }
    memory_.steps[stage_.slot] = {key_tile, edges};
    ptx::barrier_expect_bytes(full, tile.key_bytes());
    copy_tile(shared_.of(offsetof(Memory, keys), stage_.slot, tile.key_bytes()), &args_.key_map, args_.key_steps,
              key_begin_ + key_tile * tile.keys, kv_head_, post.batch, full);
  }

  __device__ __forceinline__ void load_values(const QueryGradientsPost& post, int key_tile) {
    const std::uint32_t full = shared_.of(offsetof(Memory, values_full));
    ptx::barrier_wait(shared_.of(offsetof(Memory, values_empty)), values_parity_ ^ 1);
    values_parity_ ^= 1;
    ptx::barrier_expect_bytes(full, tile.key_bytes());
    copy_tile(shared_.of(offsetof(Memory, values)), &args_.value_map, args_.value_steps,
              key_begin_ + key_tile * tile.keys, kv_head_, post.batch, full);
  }

  // 64 rows, which all tiles here have.
  __device__ __forceinline__ void copy_tile(std::uint32_t shared, const CUtensorMap* map, MapSteps steps, int row,
                                            int head, int batch, std::uint32_t barrier) {
#pragma unroll
    for (int panel = 0; panel < tile.panels(); ++panel) {
      ptx::copy_box(shared + panel * 64 * 128, map, {panel * 64, row, head * steps.head, batch * steps.batch}, barrier);
    }
  }

  const HopperBackwardArguments& args_;
  Memory& memory_;
  const BackwardAddresses shared_;
  StagePosition stage_;
  PostPosition post_;
  std::uint32_t queries_parity_ = 0, values_parity_ = 0;
  int key_begin_ = 0, kv_head_ = 0;
};

// Looks through the keys of edges before dQ takes them.
template <class Half, class Memory>
__device__ __forceinline__ void guard_keys(Memory& memory, int warp, int lane) {
  const BackwardAddresses shared(memory);
  StagePosition stage;
#pragma unroll 1
  while (true) {
    ptx::barrier_wait(shared.of(offsetof(Memory, keys_full), stage.slot), stage.parity);
    const int edges = memory.steps[stage.slot].edges;
    if (edges == QueryGradientsStep::stop) {
      return;
    }
    if (edges != 0 && check_block<Half, Memory::tile.key_bytes()>(memory.keys[stage.slot], warp * 32 + lane)) {
      ptx::shared_writes_to_async_fence();
    }
    __syncwarp();
    if (lane == 0) {
      // Consumers wait at edges only; a phase that nobody waits for would look like a mistake.
      ptx::barrier_wait(shared.of(offsetof(Memory, checked), stage.slot), stage.parity ^ 1);
      ptx::barrier_arrive(shared.of(offsetof(Memory, checked), stage.slot));
    }
    ptx::barrier_arrive(shared.of(offsetof(Memory, keys_empty), stage.slot));  // so that no step passes unseen
    stage.advance();
  }
}

}  // namespace headway::cuda
