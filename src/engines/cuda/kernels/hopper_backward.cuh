// Backward attention on Hopper: gradients of query, key and value from lse and delta = rowsum(dO * O).
//
// A block of threads owns 128 keys, 64 for each of two consumer warpgroups, whose dK and dV stay in registers. It walks
// over the query tiles that see them (all query heads that share the kv head), which one thread loads two steps ahead:
//   S^T = K Q^T   P = exp(S - lse)   dP^T = V dO^T   dS = P (dP - delta)   dV += P^T dO   dK += dS^T Q   dQ = dS K
// P^T and, where there is room, dS^T go from accumulators into the next product's operand; dS also goes through shared
// memory, since dQ sums over the keys of both warpgroups. dQ of a step leaves through shared memory as f32 and is added
// to its sum in device memory by the copy engine, in an order that hopper_backward_order.h fixes: the same bits always.
//
// Bytes: K, V, dK, dV move once. Q and dO are read by each key tile of their head, and the f32 sums of dQ are added to
// by each, all of which happens in L2; another kernel then reads the sums once.
//
// Bound: five products on the tensor cores, whose operands come from shared memory: for each step and 64 x 64 x D
// product at least one operand, and dS and dQ are written and read besides. That traffic, not the products, is the
// limit at head dim 64.
//
// What a row may not see stays out of the sums, where 0 times NaN is NaN: at the edges of ranges (everywhere with
// masks) two warps look through the operands in shared memory and replace what is not finite by 0. Pairs that do see
// such a key or query are NaN all the same, by their lse or delta; only what P takes from dO has to be added afterwards
// (hopper_backward_rows.cu).
#pragma once

#include "engines/cuda/kernels/hopper_backward_guard.cuh"
#include "engines/cuda/kernels/hopper_backward_producer.cuh"
#include "engines/cuda/kernels/hopper_backward_weights.cuh"
#include "engines/cuda/ptx/wgmma.cuh"

namespace headway::cuda {

template <class Half, int head_dim, HopperBackwardVariant variant>
class HopperBackwardConsumer {
 public:
  using Memory = HopperBackwardMemory<head_dim, variant>;
  static constexpr HopperBackwardTile tile = Memory::tile;
  static constexpr bool masked = variant == HopperBackwardVariant::masked;
  static constexpr bool modified = variant != HopperBackwardVariant::ranged;
  static constexpr int queries = tile.queries;
  static constexpr int pairs = queries / 2;  // that a thread holds
  // dP begins when P is there, because masks and biases need its registers.
  static constexpr bool late_gradients = masked;
  // Queries are worked on in parts of 32, so that the products of one run while the next is computed.
  static constexpr int part_blocks = 2, parts = queries / 16 / part_blocks;
  // Whose lse is read ahead of the products, and whose weights are made while dP runs.
  static constexpr int parts_ahead = masked ? 0 : modified ? 1 : 2;

  __device__ __forceinline__ HopperBackwardConsumer(const HopperBackwardArguments& args, Memory& memory, int group,
                                                    int warp, int lane)
      : args_(args), memory_(memory), shared_(memory), group_(group), thread_(group * 128 + warp * 32 + lane) {}

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (std::uint32_t tiles = 0;; ++tiles) {
      const std::uint32_t slot = tiles & 1;
      ptx::barrier_wait(shared_.of(offsetof(Memory, post_full), slot), tiles >> 1 & 1);
      if (memory_.posts[slot].finished) {
        return;
      }
      differentiate(memory_.posts[slot]);
      __syncwarp();
      release(offsetof(Memory, post_empty), slot);
    }
  }

 private:
  using Modifiers = ScoreModifiers<pairs, masked ? pairs : 1>;
  using Score = ptx::Wgmma<Half, queries>;
  using Gradient = ptx::Wgmma<Half, head_dim>;
  using QueryGradient = ptx::Wgmma<Half, tile.split_columns()>;

  __device__ __forceinline__ void differentiate(const BackwardPost& post) {
#pragma unroll
    for (int i = 0; i < head_dim / 2; ++i) {
      key_sums_[i] = 0.0f;
      value_sums_[i] = 0.0f;
    }
    if (__shfl_sync(~0u, post.steps, 0) > 0) {
      ptx::barrier_wait(shared_.of(offsetof(Memory, keys_full)), post.keys_parity);
      bool last = false;
#pragma unroll 1
      while (!last) {
        last = step(post);
      }
      release(offsetof(Memory, keys_empty));
      if constexpr (!tile.hands_over_at_once) {
        ptx::shared_writes_to_async_fence();
        release_gradients(~steps_ & 1);
      }
    }
    store(post);
  }

  // True for the last one of a key tile. What follows from the thread and the step is found again each time: to keep
  // it would take registers that the sums need.
  //
  // Whatever reads shared memory behind products in the queue waits until they have begun. So barriers are looked at
  // and rows' numbers read ahead of them.
  __device__ __forceinline__ bool step(const BackwardPost& post) {
    thread_ = static_cast<int>(ptx::kept(thread_));
    steps_ = ptx::kept(steps_);
    const std::uint32_t slot = steps_ & 1, parity = steps_ >> 1 & 1;
    const std::uint32_t group = group_;
    const std::uint32_t grad_outs_full = shared_.of(offsetof(Memory, grad_outs_full), slot);
    const bool grad_outs_there = ptx::barrier_is_over(grad_outs_full, parity);
    ptx::barrier_wait(shared_.of(offsetof(Memory, queries_full), slot), parity);
    const int flags = __shfl_sync(~0u, memory_.steps[slot].flags, 0);
    const bool edge = masked || (flags & BackwardStep::edge) != 0;
    float4 lse[masked ? 1 : parts_ahead * part_blocks];
#pragma unroll
    for (int k = 0; k < parts_ahead * part_blocks; ++k) {
      lse[k] = four_columns(lse_at(slot), lane(), k);
    }
    ptx::wgmma_fence();
    multiply_scores(shared_.of(offsetof(Memory, keys)), queries_at(slot), group, scores_);
    if (!grad_outs_there) {
      ptx::barrier_wait(grad_outs_full, parity);
    }
    if constexpr (!late_gradients) {
      multiply_weights(slot, group);
    }
    Modifiers modifiers;
    if constexpr (modified) {
      find_modifiers<masked>(args_, post, own_pairs(post, slot), edge, lane(), modifiers);
    }
    ptx::wgmma_wait<late_gradients ? 0 : 1>();
    ptx::touch(scores_);
    if (!modified && edge) {
      forbid_products(
          args_, post.sequence, own_pairs(post, slot), [&](int k) { return lse_of(slot, lse, k); }, scores_);
    }
    if (edge) {
      ptx::barrier_wait(shared_.of(offsetof(Memory, grad_outs_checked), slot), parity);
    }
    work_in_parts(slot, group, edge, lse, modifiers);
    if (!modified && edge) {
      forbid_score_gradients(post, slot);
    }
    ptx::shared_writes_to_async_fence();
    if constexpr (!tile.hands_over_at_once) {
      // The fence was for the last step's query gradients too.
      release_gradients(slot ^ 1, (flags & BackwardStep::first) == 0);
    }
    if (edge) {
      ptx::barrier_wait(shared_.of(offsetof(Memory, queries_checked), slot), parity);
    }
    sum_over_pairs(slot, parity, group);
    ++steps_;
    return (flags & BackwardStep::last) != 0;
  }

  // P and dS, and with them dV: from S, while dP runs. `lse` is of the parts ahead.
  template <int blocks>
  __device__ __forceinline__ void work_in_parts(std::uint32_t slot, std::uint32_t group, bool edge,
                                                const float4 (&lse)[blocks], Modifiers& modifiers) {
    const auto weigh = [&](int part) {
      if constexpr (modified) {
        scale_part<8 * part_blocks>(args_, part, scores_);
      }
#pragma unroll
      for (int k = part * part_blocks; k < (part + 1) * part_blocks; ++k) {
        if constexpr (modified) {
          make_modified_weights<Half>(args_, modifiers, lse_of(slot, lse, k), k, scores_, weights_);
        } else {
          make_weights(args_, lse_of(slot, lse, k), edge ? lowest_lse : NAN, k, scores_);
        }
      }
    };
#pragma unroll
    for (int part = 0; part < (late_gradients ? parts : parts_ahead); ++part) {
      weigh(part);
    }
    if constexpr (late_gradients) {
      multiply_weights(slot, group);
      ptx::wgmma_wait<0>();
      ptx::touch(weight_gradients_);
    }
#pragma unroll
    for (int part = 0; part < parts; ++part) {
      float4 delta[part_blocks];
#pragma unroll
      for (int k = 0; k < part_blocks; ++k) {
        delta[k] = four_columns(delta_at(slot), lane(), part * part_blocks + k);
      }
      if constexpr (!modified) {
        pack_part(part);
      }
      add_value_gradients(slot, part);
      if constexpr (!late_gradients) {
        if (part == 0) {
          ptx::wgmma_wait<1>();
          ptx::touch(weight_gradients_);
        }
        if (part + parts_ahead < parts) {
          weigh(part + parts_ahead);
        }
      }
      make_score_gradients(slot, edge, modifiers.kept, delta, part);
    }
  }

  // dQ and dK, from dS of both consumers. dQ goes out while dK is made.
  __device__ __forceinline__ void sum_over_pairs(std::uint32_t slot, std::uint32_t parity, std::uint32_t group) {
    ptx::named_barrier_sync(1, 256);
    ptx::touch(key_sums_);
    ptx::wgmma_fence();
    float query_gradients[tile.gradient_numbers() / 256];
    multiply_query_gradients(slot, group, query_gradients);
    add_key_gradients(slot, group);
    ptx::barrier_wait(shared_.of(offsetof(Memory, gradients_empty), slot), parity ^ 1);
    ptx::wgmma_wait<1>();
    ptx::touch(query_gradients);
    release(offsetof(Memory, grad_outs_empty), slot);
    store_query_gradients(slot, query_gradients);
    if constexpr (tile.hands_over_at_once) {
      ptx::shared_writes_to_async_fence();
      release_gradients(slot);
    }
    ptx::wgmma_wait<0>();
    ptx::touch(key_sums_);
    ptx::touch(value_sums_);
    release(offsetof(Memory, queries_empty), slot);
  }

  __device__ __forceinline__ std::uint32_t queries_at(std::uint32_t slot) const {
    return shared_.of(offsetof(Memory, queries), slot, tile.query_bytes());
  }
  __device__ __forceinline__ std::uint32_t grad_outs_at(std::uint32_t slot) const {
    return shared_.of(offsetof(Memory, grad_outs), slot, tile.query_bytes());
  }
  __device__ __forceinline__ std::uint32_t score_gradients_at(std::uint32_t slot) const {
    return shared_.of(offsetof(Memory, score_gradients), slot, tile.score_bytes());
  }

  __device__ __forceinline__ std::uint32_t lse_at(std::uint32_t slot) const {
    return shared_.of(offsetof(Memory, lse), slot, queries * 4);
  }

  __device__ __forceinline__ std::uint32_t delta_at(std::uint32_t slot) const {
    return shared_.of(offsetof(Memory, delta), slot, queries * 4);
  }

  // Of 16 rows, of which those of the parts ahead have been read.
  template <int blocks>
  __device__ __forceinline__ float4 lse_of(std::uint32_t slot, const float4 (&read)[blocks], int k) const {
    return k < parts_ahead * part_blocks ? read[k] : four_columns(lse_at(slot), lane(), k);
  }

  // ---- Products ----

  // Rows of keys (or values), 64 for each consumer, with all rows of queries (or output gradients).
  __device__ __forceinline__ void multiply_scores(std::uint32_t own, std::uint32_t other, std::uint32_t group,
                                                  float (&products)[pairs]) {
    const std::uint64_t a = ptx::tile_descriptor(own + group * 64 * 128, 16), b = ptx::tile_descriptor(other, 16);
#pragma unroll
    for (int k = 0; k < head_dim / 16; ++k) {
      Score::multiply(products, a + k / 4 * (backward_keys * 8) + k % 4 * 2, b + k / 4 * (queries * 8) + k % 4 * 2,
                      k != 0);
    }
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ void multiply_weights(std::uint32_t slot, std::uint32_t group) {
    ptx::wgmma_fence();
    multiply_scores(shared_.of(offsetof(Memory, values)), grad_outs_at(slot), group, weight_gradients_);
  }

  // Of a part of the queries.
  __device__ __forceinline__ void add_value_gradients(std::uint32_t slot, int part) {
    const std::uint64_t b = ptx::tile_descriptor(grad_outs_at(slot), queries * 128);
    if (part == 0) {
      ptx::touch(value_sums_);
    }
    ptx::wgmma_fence();
#pragma unroll
    for (int k = part * part_blocks; k < (part + 1) * part_blocks; ++k) {
      Gradient::template multiply<ptx::Reduced::along_rows>(value_sums_, weights_[4 * k], weights_[4 * k + 1],
                                                            weights_[4 * k + 2], weights_[4 * k + 3], b + k * 128, 1);
    }
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ void add_key_gradients(std::uint32_t slot, std::uint32_t group) {
    const std::uint64_t b = ptx::tile_descriptor(queries_at(slot), queries * 128);
    if constexpr (tile.keeps_score_gradients) {
#pragma unroll
      for (int k = 0; k < queries / 16; ++k) {
        Gradient::template multiply<ptx::Reduced::along_rows>(key_sums_, score_gradients_[4 * k],
                                                              score_gradients_[4 * k + 1], score_gradients_[4 * k + 2],
                                                              score_gradients_[4 * k + 3], b + k * 128, 1);
      }
    } else {
      const std::uint64_t a = ptx::tile_descriptor(score_gradients_at(slot) + group * 64 * 128, 16);
#pragma unroll
      for (int k = 0; k < queries / 16; ++k) {
        Gradient::template multiply<ptx::Reduced::along_columns, ptx::Reduced::along_rows>(
            key_sums_, a + k / 4 * (backward_keys * 8) + k % 4 * 2, b + k * 128, 1);
      }
    }
    ptx::wgmma_commit();
  }

  // Over all 128 keys: this consumer's columns, or its queries.
  __device__ __forceinline__ void multiply_query_gradients(std::uint32_t slot, std::uint32_t group,
                                                           float (&gradients)[tile.gradient_numbers() / 256]) {
    constexpr std::uint32_t panel = backward_keys * 128;
    // A panel has 64 columns; of head dim 64 each consumer has half of one.
    const std::uint32_t columns = head_dim == 64 ? group * 64 : group * panel;
    const std::uint64_t a =
        ptx::tile_descriptor(score_gradients_at(slot) + (tile.split_by_columns() ? 0 : group * panel), 16);
    const std::uint64_t b =
        ptx::tile_descriptor(shared_.of(offsetof(Memory, keys)) + (tile.split_by_columns() ? columns : 0), 16);
#pragma unroll
    for (int k = 0; k < backward_keys / 16; ++k) {
      QueryGradient::template multiply<ptx::Reduced::along_rows, ptx::Reduced::along_rows>(gradients, a + k * 128,
                                                                                           b + k * 128, k != 0);
    }
    ptx::wgmma_commit();
  }

  // ---- Scores, weights and their gradients ----

  __device__ __forceinline__ BackwardPairs own_pairs(const BackwardPost& post, std::uint32_t slot) const {
    return {post.batch, memory_.steps[slot].head, post.key_tile * backward_keys + thread_ / 32 * 16 + lane() / 4,
            memory_.steps[slot].row + 2 * (lane() & 3)};
  }

  // Rounded, for dV.
  __device__ __forceinline__ void pack_part(int part) {
#pragma unroll
    for (int k = part * part_blocks; k < (part + 1) * part_blocks; ++k) {
      pack_weights<Half>(k, scores_, weights_);
    }
  }

  // dS = P (dP - delta) of a part, rounded, to shared memory as [keys][queries]. Each 16 queries are stored while the
  // next ones are computed.
  __device__ __forceinline__ void make_score_gradients(std::uint32_t slot, bool edge, const PairBits<pairs>& kept,
                                                       const float4 (&delta)[part_blocks], int part) {
#pragma unroll
    for (int k = part * part_blocks; k < (part + 1) * part_blocks; ++k) {
      float gradients[8];
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const float weight = scores_[8 * k + e];
        float upstream = weight_gradients_[8 * k + e];
        if constexpr (modified) {
          if (args_.dropout.active) {
            upstream = kept.get(8 * k + e) ? upstream * args_.kept : 0.0f;
          }
        }
        gradients[e] = weight * (upstream - of_column(delta[k % part_blocks], e));
        if constexpr (modified) {
          gradients[e] = edge && weight == 0.0f ? 0.0f : gradients[e];
        }
      }
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        score_gradients_[4 * k + x] = ptx::packed_pair<Half>(gradients[2 * x], gradients[2 * x + 1]);
      }
      store_score_gradients(slot, k);
    }
  }

  // A forbidden pair's gradient is 0 whatever comes from upstream. Stored again: rather that than keep all the others
  // waiting.
  __device__ __forceinline__ void forbid_score_gradients(const BackwardPost& post, std::uint32_t slot) {
    for_range<pairs>(post.sequence, own_pairs(post, slot), [&](int e, bool forbidden) {
      score_gradients_[e / 2] &= forbidden ? (e % 2 == 0 ? 0xFFFF0000u : 0x0000FFFFu) : ~0u;
    });
#pragma unroll
    for (int k = 0; k < queries / 16; ++k) {
      store_score_gradients(slot, k);
    }
  }

  __device__ __forceinline__ void store_score_gradients(std::uint32_t slot, int k) {
    const int row = thread_ / 32 * 16 + (lane() & 15), chunk = 2 * (k % 4) + lane() / 16;
    const std::uint32_t packed[4] = {score_gradients_[4 * k], score_gradients_[4 * k + 1], score_gradients_[4 * k + 2],
                                     score_gradients_[4 * k + 3]};
    ptx::store_matrices(
        packed, score_gradients_at(slot) + row * 128 + k / 4 * (backward_keys * 128) + ((chunk ^ (row & 7)) << 4));
  }

  // ---- Results ----

  // In the order of the threads, which keeps the stores free of conflicts; see hopper_backward_rows.cu.
  __device__ __forceinline__ void store_query_gradients(std::uint32_t slot,
                                                        const float (&gradients)[tile.gradient_numbers() / 256]) {
    constexpr int chunks = tile.gradient_numbers() / 1024;
    auto* to = reinterpret_cast<float4*>(memory_.query_gradients[slot]) + thread_ / 128 * chunks * 128 + thread_ % 128;
#pragma unroll
    for (int c = 0; c < chunks; ++c) {
      to[c * 128] = {gradients[4 * c], gradients[4 * c + 1], gradients[4 * c + 2], gradients[4 * c + 3]};
    }
  }

  __device__ __forceinline__ void store(const BackwardPost& post) {
    const float scale = static_cast<float>(args_.scale);
    const float kept = modified ? args_.kept : 1.0f;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int key = post.key_tile * backward_keys + thread_ / 32 * 16 + lane() / 4 + 8 * r;
      const bool stored = key < post.key_count;
      const std::int64_t position = post.key_begin + key;
      if (args_.key_gradient.data != nullptr) {
        Half* row = static_cast<Half*>(args_.key_gradient.data) +
                    row_offset(args_.key_gradient, post.batch, post.kv_head, position);
        store_row(row, key_sums_, r, scale, lane() & 3, static_cast<int>(args_.head_dim), stored, false);
      }
      if (args_.value_gradient.data != nullptr) {
        Half* row = static_cast<Half*>(args_.value_gradient.data) +
                    row_offset(args_.value_gradient, post.batch, post.kv_head, position);
        store_row(row, value_sums_, r, kept, lane() & 3, static_cast<int>(args_.value_dim), stored, false);
      }
    }
  }

  // ---- Barriers ----

  __device__ __forceinline__ int lane() const { return thread_ & 31; }

  __device__ __forceinline__ void release(std::size_t offset, std::uint32_t index = 0) {
    if (lane() == 0) {
      ptx::barrier_arrive(shared_.of(offset, index));
    }
  }

  __device__ __forceinline__ void release_gradients(std::uint32_t slot, bool there = true) {
    __syncwarp();
    if (lane() == 0 && there) {
      ptx::barrier_arrive(shared_.of(offsetof(Memory, gradients_full), slot));
    }
  }

  const HopperBackwardArguments& args_;
  Memory& memory_;
  const BackwardAddresses shared_;
  const std::uint32_t group_;  // which consumer
  int thread_;                 // of both consumers
  float key_sums_[head_dim / 2], value_sums_[head_dim / 2];
  float scores_[pairs], weight_gradients_[pairs];
  std::uint32_t weights_[queries / 4];
  std::uint32_t score_gradients_[queries / 4];
  std::uint32_t steps_ = 0;  // so far
};

template <class Memory>
__device__ __forceinline__ void init_backward_barriers(Memory& memory) {
  constexpr int consumer_warps = 4 * HopperBackwardTile::consumers;
  const auto init = [](std::uint64_t& barrier, int arrivals) {
    ptx::barrier_init(ptx::shared_address(&barrier), arrivals);
  };
  init(memory.keys_full, 1);
  init(memory.keys_empty, consumer_warps);
  for (int slot = 0; slot < 2; ++slot) {
    init(memory.queries_full[slot], 1);
    init(memory.queries_empty[slot], consumer_warps + guard_warps);
    init(memory.grad_outs_full[slot], 1);
    init(memory.grad_outs_empty[slot], consumer_warps);
    init(memory.grad_outs_checked[slot], guard_warps);
    init(memory.queries_checked[slot], guard_warps);
    init(memory.gradients_full[slot], consumer_warps);
    init(memory.gradients_empty[slot], 1);
    init(memory.post_full[slot], 1);
    init(memory.post_empty[slot], consumer_warps + 1);  // and the adder
  }
  for (std::uint64_t& full : memory.turns_full) {
    init(full, 1);
  }
  ptx::barrier_init_fence();
}

template <class Half, int head_dim, HopperBackwardVariant variant>
__global__ __launch_bounds__(HopperBackwardTile::threads,
                             1) void hopper_backward(const __grid_constant__ HopperBackwardArguments args) {
  using Memory = HopperBackwardMemory<head_dim, variant>;
  static_assert(sizeof(Memory) <= 227 * 1024);  // what a block may have
  extern __shared__ __align__(tile_alignment) std::uint8_t dynamic_shared[];
  auto& memory = *reinterpret_cast<Memory*>(dynamic_shared);
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0);
  const int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    init_backward_barriers(memory);
  }
  __syncthreads();
  if (group == 0) {
    ptx::lower_registers<HopperBackwardTile::producer_registers>();
    if (warp == 0) {
      HopperBackwardProducer<head_dim, variant>(args, memory, lane).run();
    } else if (warp == 1 && lane == 0) {
      HopperBackwardAdder<head_dim, variant>(args, memory).run();
    } else if (warp >= 2) {
      BackwardGuard<Half, Memory>(memory, warp - 2, lane).run();
    }
  } else {
    ptx::raise_registers<HopperBackwardTile::consumer_registers>();
    HopperBackwardConsumer<Half, head_dim, variant>(args, memory, group - 1, warp, lane).run();
  }
}

}  // namespace headway::cuda
