// The gradient of query on Hopper at head dims up to 256; hopper_key_gradients.cuh has those of key and value.
//
// A block of threads owns 128 query rows of a head, 64 for each of two consumer warpgroups, whose dQ stays in
// registers, and walks over the 64-key tiles that they see:
//   S = Q K^T   P = exp(S - lse)   dP = dO V^T   dS = P (dP - delta)   dQ += dS K
// dS goes from accumulators into the next product's operand. A consumer issues dQ of a tile and S of the next in one
// go, and dP when dQ is done; its exponentials run beside its own dP and the other's products. Each row's sum is made
// in one place and in one order: the same bits always.
//
// Bytes: Q, dO and dQ move once; K and V are read by each query tile, 64 KiB a step, from L2.
//
// Bound: shared memory, where both operands of S and dP lie. A step's three products take 3072 cycles of the tensor
// cores and read 320 KiB, and the copies write 64 KiB: 3070 cycles at 128 bytes each.
#pragma once

#include "engines/cuda/kernels/hopper_backward_sequence.cuh"
#include "engines/cuda/kernels/hopper_backward_weights.cuh"
#include "engines/cuda/kernels/hopper_guard.cuh"
#include "engines/cuda/kernels/hopper_schedule.cuh"
#include "engines/cuda/ptx/tma.cuh"
#include "engines/cuda/ptx/wgmma.cuh"

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
      ptx::barrier_arrive(shared.of(offsetof(Memory, checked), stage.slot));
      ptx::barrier_arrive(shared.of(offsetof(Memory, keys_empty), stage.slot));  // so that no step passes unseen
    }
    stage.advance();
  }
}

template <class Half, HopperBackwardVariant variant>
class QueryGradientsConsumer {
 public:
  using Memory = QueryGradientsMemory<variant>;
  static constexpr HopperBackwardTile tile = Memory::tile;
  static constexpr bool masked = variant == HopperBackwardVariant::masked;
  static constexpr bool modified = variant != HopperBackwardVariant::ranged;
  static constexpr int pairs = tile.keys / 2;  // that a thread holds

  __device__ __forceinline__ QueryGradientsConsumer(const HopperBackwardArguments& args, Memory& memory, int group,
                                                    int warp, int lane)
      : args_(args), memory_(memory), shared_(memory), group_(group), thread_(warp * 32 + lane) {}

  __device__ __forceinline__ void run() {
    PostPosition position;
#pragma unroll 1
    while (true) {
      wait(offsetof(Memory, post_full), position.slot, position.parity);
      const QueryGradientsPost& post = memory_.posts[position.slot];
      if (post.finished) {
        return;
      }
      differentiate(post);
      __syncwarp();
      release(offsetof(Memory, post_empty), position.slot);
      position.advance();
    }
  }

 private:
  __device__ __forceinline__ void differentiate(const QueryGradientsPost& post) {
#pragma unroll
    for (int i = 0; i < tile.head_dim / 2; ++i) {
      sums_[i] = 0.0f;
    }
    const int steps = __shfl_sync(~0u, post.steps, 0);
    if (steps > 0) {
      const TileSpan own = own_steps(post, steps);
      wait(offsetof(Memory, queries_full), 0, tiles_ & 1);
      ++tiles_;
      pass_over(own.begin);
      if (own.count() > 0) {
        read_rows(post);
        step<false>(post);
#pragma unroll 1
        for (int left = own.count(); left > 1; --left) {
          step<true>(post);
        }
      }
      __syncwarp();
      release(offsetof(Memory, queries_empty));
      if (own.count() > 0) {
        last_gradients();
      }
      pass_over(steps - own.end);
    }
    store(post);
  }

  // The steps whose keys this consumer's rows see; the other's rows may see more.
  __device__ __forceinline__ TileSpan own_steps(const QueryGradientsPost& post, int steps) const {
    const int row = post.row + static_cast<int>(group_) * tile.queries;
    TileSpan own{};
    if (row < post.sequence.real_queries) {
      own = post.sequence.keys_of(row / tile.queries);
    }
    const bool none = own.count() == 0;
    return {__shfl_sync(~0u, none ? steps : own.begin - post.first_key_tile, 0),
            __shfl_sync(~0u, none ? steps : own.end - post.first_key_tile, 0)};
  }

  // Steps that it leaves to the other.
  __device__ __forceinline__ void pass_over(int steps) {
#pragma unroll 1
    for (; steps > 0; --steps) {
      wait(offsetof(Memory, keys_full), steps_ & 1, steps_ >> 1 & 1);
      wait(offsetof(Memory, values_full), 0, steps_ & 1);
      __syncwarp();  // all lanes have seen the phases that may end now
      release(offsetof(Memory, keys_empty), steps_ & 1);
      release(offsetof(Memory, values_empty));
      ++steps_;
    }
  }

  __device__ __forceinline__ int first_row(const QueryGradientsPost& post) const {
    return post.row + group_ * tile.queries + thread_ / 32 * 16 + lane() / 4;
  }

  // Of this thread's two rows: lse, delta, and the keys that they may see. A row of padding sees none.
  __device__ __forceinline__ void read_rows(const QueryGradientsPost& post) {
    const BackwardSequence& order = post.sequence;
    const std::int64_t tiles = post.first_tile + std::int64_t{post.head} * args_.tiles_a_head;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = first_row(post) + 8 * r;
      lse_[r] = INFINITY;
      delta_[r] = 0.0f;
      range_[r] = {0, 0};
      if (i < order.real_queries) {
        const std::int64_t place = (tiles + i / tile.queries) * tile.queries + place_of_row(i % tile.queries);
        lse_[r] = args_.tile_lse[place];
        delta_[r] = args_.tile_delta[place];
        const int end = args_.own_ends ? static_cast<int>(length_at(args_.valid_lens, post.batch, i, post.key_count))
                                       : order.valid_keys;
        range_[r] = {max(i + order.offset - order.left, 0), min(i + order.offset + order.right + 1, end)};
      }
    }
  }

  // dQ of the last tile, if there was one, and dS of this one.
  template <bool later>
  __device__ __forceinline__ void step(const QueryGradientsPost& post) {
    steps_ = ptx::kept(steps_);
    const std::uint32_t slot = steps_ & 1, parity = steps_ >> 1 & 1;
    if constexpr (later) {
      add_gradients(slot ^ 1);
    }
    wait(offsetof(Memory, keys_full), slot, parity);
    multiply(shared_.of(offsetof(Memory, queries), group_, tile.query_bytes()), keys_at(slot), scores_);
    if constexpr (later) {
      ptx::wgmma_wait<1>();  // dP takes the registers that dQ has read
      ptx::touch(sums_);
      release(offsetof(Memory, keys_empty), slot ^ 1);
    }
    if constexpr (!modified) {
      multiply_upstream();
    }
    const QueryGradientsStep at = memory_.steps[slot];
    edge_ = masked || (__shfl_sync(~0u, at.edges, 0) >> group_ & 1) != 0;
    const int column = at.key_tile * tile.keys + 2 * (lane() & 3);
    PairBits<pairs> kept;
    weigh(post, column, kept);
    if constexpr (modified) {  // which needs the registers of dP before
      multiply_upstream();
    }
    ptx::wgmma_wait<0>();
    ptx::touch(upstream_);
    release(offsetof(Memory, values_empty));
    make_score_gradients(kept);
    ++steps_;
  }

  __device__ __forceinline__ void last_gradients() {
    const std::uint32_t slot = ~steps_ & 1;
    add_gradients(slot);
    ptx::wgmma_wait<0>();
    ptx::touch(sums_);
    release(offsetof(Memory, keys_empty), slot);
  }

  // ---- Products ----

  __device__ __forceinline__ std::uint32_t keys_at(std::uint32_t slot) const {
    return shared_.of(offsetof(Memory, keys), slot, tile.key_bytes());
  }

  // [64 queries, 64 keys] of rows of queries (or output gradients) with those of keys (or values).
  __device__ __forceinline__ void multiply(std::uint32_t own, std::uint32_t other, float (&products)[pairs]) {
    const std::uint64_t a = ptx::tile_descriptor(own, 16), b = ptx::tile_descriptor(other, 16);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < tile.head_dim / 16; ++k) {
      ptx::Wgmma<Half, tile.keys>::multiply(products, a + k / 4 * (tile.queries * 8) + k % 4 * 2,
                                            b + k / 4 * (tile.keys * 8) + k % 4 * 2, k != 0);
    }
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ void multiply_upstream() {
    wait(offsetof(Memory, values_full), 0, steps_ & 1);
    multiply(shared_.of(offsetof(Memory, grad_outs), group_, tile.query_bytes()), shared_.of(offsetof(Memory, values)),
             upstream_);
  }

  // dQ [64 queries, head_dim] += dS [64 queries, 64 keys] K [64 keys, head_dim], of the last step.
  __device__ __forceinline__ void add_gradients(std::uint32_t slot) {
    if (edge_) {
      wait(offsetof(Memory, checked), slot, (steps_ - 1) >> 1 & 1);
    }
    const std::uint64_t b = ptx::tile_descriptor(keys_at(slot), tile.keys * 128);
    ptx::touch(sums_);
    ptx::touch(score_gradients_);
    ptx::wgmma_fence();
#pragma unroll
    for (int k = 0; k < tile.keys / 16; ++k) {
      ptx::Wgmma<Half, tile.head_dim>::template multiply<ptx::Reduced::along_rows>(
          sums_, score_gradients_[4 * k], score_gradients_[4 * k + 1], score_gradients_[4 * k + 2],
          score_gradients_[4 * k + 3], b + k * 128, 1);
    }
    ptx::wgmma_commit();
  }

  // ---- Weights and score gradients ----

  __device__ __forceinline__ bool is_forbidden(int element, int column) const {
    const ColumnRange& range = range_[element / 2 % 2];
    const int key = column + element / 4 * 8 + element % 2;
    return key < range.begin || key >= range.end;
  }

  // Waits for the scores, which become weights, 0 where forbidden; with softcap times its slope.
  __device__ __forceinline__ void weigh(const QueryGradientsPost& post, int column, PairBits<pairs>& kept) {
    if constexpr (modified) {
      weigh_modified(post, column, kept);
    } else {
      ptx::wgmma_wait<1>();
      ptx::touch(scores_);
#pragma unroll
      for (int e = 0; e < pairs; ++e) {
        scores_[e] = ptx::exp2_fast(fmaf(scores_[e], args_.weight_unit, -lse_[e / 2 % 2]));
      }
      if (edge_) {
#pragma unroll
        for (int e = 0; e < pairs; ++e) {
          scores_[e] = is_forbidden(e, column) ? 0.0f : scores_[e];
        }
      }
    }
  }

  __device__ __forceinline__ void weigh_modified(const QueryGradientsPost& post, int column, PairBits<pairs>& kept) {
    const BackwardPairs own{post.batch, post.head, column, first_row(post)};
    PairBits<pairs> allowed;
    allowed.set_all();
    kept.set_all();
    float bias[masked ? pairs : 1];
    if (edge_) {
#pragma unroll
      for (int e = 0; e < pairs; ++e) {
        allowed.clear(e, is_forbidden(e, column));
      }
    }
    if constexpr (masked) {
      if (args_.mask.data != nullptr) {
        forbid_by_mask<Columns::keys>(args_.mask, own, allowed);
      }
      if (args_.bias.data != nullptr) {
        load_bias<Columns::keys>(args_.bias, own, allowed, bias);
      }
    }
    if (args_.dropout.active) {
      const int quad_lane = lane() & 3;
      for_kept<pairs, 1>(args_.dropout, post.batch, post.head, own.first_query, column - 2 * quad_lane, quad_lane,
                         [&](int e, bool keep) { kept.clear(e, !keep); });
    }
    ptx::wgmma_wait<0>();
    ptx::touch(scores_);
    scale_scores(args_, scores_);
    const float alibi = args_.slopes.data != nullptr ? -load_per_head(args_.slopes, post.head) : 0.0f;
    const auto distance = static_cast<float>(column - own.first_query - post.sequence.offset);
#pragma unroll
    for (int e = 0; e < pairs; ++e) {
      const float slope = cap_slope(args_, scores_[e]);
      if constexpr (masked) {
        scores_[e] += args_.bias.data != nullptr ? bias[e] : 0.0f;
      }
      const auto apart = static_cast<float>(e / 4 * 8 + e % 2 - e / 2 % 2 * 8);
      const float weight = modified_weight(scores_[e], alibi, distance + apart, lse_[e / 2 % 2]);
      scores_[e] = allowed.get(e) ? weight * slope : 0.0f;
    }
  }

  // dS = P (dP - delta), 0 where P is 0 at an edge: whatever comes from upstream.
  __device__ __forceinline__ void make_score_gradients(const PairBits<pairs>& kept) {
    const float kept_scale = modified ? args_.kept : 1.0f;  // 1 without dropout
#pragma unroll
    for (int e = 0; e < pairs; ++e) {
      float upstream = upstream_[e];
      if constexpr (modified) {
        upstream = kept.get(e) ? upstream * kept_scale : 0.0f;
      }
      const float gradient = scores_[e] * (upstream - delta_[e / 2 % 2]);
      upstream_[e] = edge_ && scores_[e] == 0.0f ? 0.0f : gradient;
    }
#pragma unroll
    for (int k = 0; k < pairs / 2; ++k) {
      score_gradients_[k] = ptx::packed_pair<Half>(upstream_[2 * k], upstream_[2 * k + 1]);
    }
  }

  __device__ __forceinline__ void store(const QueryGradientsPost& post) {
    const Rows& rows = args_.query_gradient;
    const float scale = static_cast<float>(args_.scale);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = first_row(post) + 8 * r;
      Half* row = static_cast<Half*>(rows.data) + row_offset(rows, post.batch, post.head, post.query_begin + i);
      store_row(row, sums_, r, scale, lane() & 3, static_cast<int>(args_.head_dim), i < post.query_count,
                i >= post.sequence.real_queries);
    }
  }

  // ---- Barriers ----

  __device__ __forceinline__ int lane() const { return thread_ & 31; }

  __device__ __forceinline__ void wait(std::size_t offset, std::uint32_t index, std::uint32_t parity) const {
    ptx::barrier_wait(shared_.of(offset, index), parity);
  }

  __device__ __forceinline__ void release(std::size_t offset, std::uint32_t index = 0) const {
    if (lane() == 0) {
      ptx::barrier_arrive(shared_.of(offset, index));
    }
  }

  const HopperBackwardArguments& args_;
  Memory& memory_;
  const BackwardAddresses shared_;
  const std::uint32_t group_;              // which consumer
  const int thread_;                       // of it
  std::uint32_t steps_ = 0, tiles_ = 0;    // so far
  float sums_[tile.head_dim / 2];          // dQ
  float scores_[pairs], upstream_[pairs];  // S and then P; dP
  std::uint32_t score_gradients_[pairs / 2];
  float lse_[2], delta_[2];
  ColumnRange range_[2];
  bool edge_ = false;  // of the last step
};

template <class Memory>
__device__ __forceinline__ void init_query_gradients_barriers(Memory& memory) {
  constexpr int warps = 4 * Memory::consumers;
  const auto init = [](std::uint64_t& barrier, int arrivals) {
    ptx::barrier_init(ptx::shared_address(&barrier), arrivals);
  };
  init(memory.queries_full, 1);
  init(memory.queries_empty, warps);
  init(memory.values_full, 1);
  init(memory.values_empty, warps);
  for (int slot = 0; slot < Memory::stages; ++slot) {
    init(memory.keys_full[slot], 1);
    init(memory.keys_empty[slot], warps + guard_warps);
    init(memory.checked[slot], guard_warps);
    init(memory.post_full[slot], 1);
    init(memory.post_empty[slot], warps);
  }
  ptx::barrier_init_fence();
}

template <class Half, HopperBackwardVariant variant>
__global__ __launch_bounds__(HopperBackwardTile::threads,
                             1) void hopper_query_gradients(const __grid_constant__ HopperBackwardArguments args) {
  using Memory = QueryGradientsMemory<variant>;
  extern __shared__ __align__(tile_alignment) std::uint8_t dynamic_shared[];
  auto& memory = *reinterpret_cast<Memory*>(dynamic_shared);
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0);
  const int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    init_query_gradients_barriers(memory);
  }
  __syncthreads();
  if (group == 0) {
    ptx::lower_registers<HopperBackwardTile::producer_registers>();
    if (warp == 0 && lane == 0) {
      QueryGradientsProducer<Memory>(args, memory).run();
    } else if (warp >= 2) {
      guard_keys<Half>(memory, warp - 2, lane);
    }
  } else {
    ptx::raise_registers<HopperBackwardTile::consumer_registers>();
    QueryGradientsConsumer<Half, variant>(args, memory, group - 1, warp, lane).run();
  }
}

}  // namespace headway::cuda
