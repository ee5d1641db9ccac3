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

#include "engines/cuda/kernels/hopper_backward_weights.cuh"
#include "engines/cuda/kernels/hopper_block.cuh"
#include "engines/cuda/kernels/hopper_query_gradients_producer.cuh"
#include "engines/cuda/ptx/wgmma.cuh"

namespace headway::cuda {

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
    KeptWeights<pairs> kept;
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
  __device__ __forceinline__ void weigh(const QueryGradientsPost& post, int column, KeptWeights<pairs>& kept) {
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

  __device__ __forceinline__ void weigh_modified(const QueryGradientsPost& post, int column, KeptWeights<pairs>& kept) {
    const BackwardPairs own{post.batch, post.head, column, first_row(post)};
    PairBits<pairs> allowed;
    allowed.set_all();
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
      kept.template draw<1>(args_.dropout, post.batch, post.head, own.first_query, column - 2 * quad_lane, quad_lane);
    }
    ptx::wgmma_wait<0>();
    ptx::touch(scores_);
    scale_scores(args_, scores_);
    const float alibi = alibi_of(args_, post.head);
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
  __device__ __forceinline__ void make_score_gradients(const KeptWeights<pairs>& kept) {
    const float kept_scale = modified ? args_.kept : 1.0f;  // 1 without dropout
#pragma unroll
    for (int e = 0; e < pairs; ++e) {
      float upstream = upstream_[e];
      if constexpr (modified) {
        upstream *= args_.dropout.active && !kept.get(e) ? 0.0f : kept_scale;
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

  // By every thread: each has read or written for itself.
  __device__ __forceinline__ void release(std::size_t offset, std::uint32_t index = 0) const {
    ptx::barrier_arrive(shared_.of(offset, index));
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
  constexpr int threads = 128 * Memory::consumers;
  init_barrier(memory.queries_full, 1);
  init_barrier(memory.queries_empty, threads);
  init_barrier(memory.values_full, 1);
  init_barrier(memory.values_empty, threads);
  for (int slot = 0; slot < Memory::stages; ++slot) {
    init_barrier(memory.keys_full[slot], 1);
    init_barrier(memory.keys_empty[slot], threads + guard_threads);
    init_barrier(memory.checked[slot], guard_warps);
    init_barrier(memory.post_full[slot], 1);
    init_barrier(memory.post_empty[slot], threads);
  }
  ptx::barrier_init_fence();
}

template <class Half, HopperBackwardVariant variant>
__global__ __launch_bounds__(HopperBackwardTile::threads,
                             1) void hopper_query_gradients(const __grid_constant__ HopperBackwardArguments args) {
  using Memory = QueryGradientsMemory<variant>;
  extern __shared__ __align__(tile_alignment) std::uint8_t dynamic_shared[];
  auto& memory = *reinterpret_cast<Memory*>(dynamic_shared);
  const auto feed = [&](int warp, int lane) {
    if (warp == 0 && lane == 0) {
      QueryGradientsProducer<Memory>(args, memory).run();
    } else if (warp >= 2) {
      guard_keys<Half>(memory, warp - 2, lane);
    }
  };
  part_block<HopperBackwardTile::producer_registers, HopperBackwardTile::consumer_registers>(
      [&] { init_query_gradients_barriers(memory); }, feed,
      [&](int which, int warp, int lane) {
        QueryGradientsConsumer<Half, variant>(args, memory, which, warp, lane).run();
      });
}

}  // namespace headway::cuda
