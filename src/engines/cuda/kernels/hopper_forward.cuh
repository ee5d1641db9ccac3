// Forward attention on Hopper: one thread feeds tiles by the bulk copy engine, two or three warpgroups of 64 query rows
// consume them on the tensor cores. Blocks of threads stay and take tiles until none is left; beside the producer a
// scheduler posts what is to be done (hopper_schedule.cuh) and a guard keeps what may not be seen out of the sums
// (hopper_guard.cuh).
//
// Bytes: Q and O move once. K and V of a head are read by every query tile of it, which run near each other in time, so
// most reads end in L2; a block of keys serves all rows of the tile. Scores and weights never leave registers.
//
// Bound: the tensor cores, if the softmax keeps out of their way. A warpgroup issues S = Q K^T of block n, then O += P
// V of block n + 1, and takes the softmax of block n while the latter runs; named barriers pass the right to issue from
// one warpgroup to the next, so that one is in its softmax while another multiplies.
#pragma once

#include "engines/cuda/kernels/hopper_finish.cuh"
#include "engines/cuda/kernels/hopper_guard.cuh"
#include "engines/cuda/kernels/hopper_matrix.cuh"
#include "engines/cuda/kernels/hopper_modifiers.cuh"
#include "engines/cuda/kernels/hopper_producer.cuh"
#include "engines/cuda/kernels/hopper_repair.cuh"
#include "engines/cuda/ptx/wgmma.cuh"

namespace headway::cuda {

// Whether a block is an edge, as far as the compiler is told: a mask in the loop costs time even where it is jumped
// over.
enum class Edge : std::uint8_t { no, yes, perhaps };

template <class Half, int head_dim, HopperVariant variant>
class HopperConsumer {
 public:
  using Memory = HopperMemory<head_dim, variant>;
  static constexpr HopperTile tile = Memory::tile;
  static constexpr bool posted = !is_plain(variant);
  static constexpr bool masked = variant == HopperVariant::masked;
  static constexpr bool modified = masked || variant == HopperVariant::modified;

  __device__ __forceinline__ HopperConsumer(const HopperArguments& args, Memory& memory, int group, int warp, int lane)
      : args_(args),
        memory_(memory),
        base_(ptx::kept(ptx::shared_address(&memory))),
        next_turn_(ptx::kept(group + 1 == tile.consumers ? 1 : 2 + group)),
        group_(group),
        lane_(static_cast<int>(ptx::kept(lane))),
        quad_lane_(lane & 3) {
    tile_row_ = group * 64 + warp * 16 + lane / 4;
    softmax_.unit = args.softmax_unit;
    query_descriptor_ = ptx::tile_descriptor(ptx::shared_address(memory.query) + group * 64 * 128, 16);
    const std::uint32_t ring = ptx::shared_address(memory.ring);
    key_descriptor_ = ptx::tile_descriptor(ring, 16);
    value_descriptor_ = ptx::tile_descriptor(ring, tile.keys * 128);
  }

  __device__ __forceinline__ void run() {
    if (group_ == tile.consumers - 1) {
      hand_over();
    }
    if constexpr (posted) {
      run_posted();
    } else {
#pragma unroll 1
      for (int index = blockIdx.x; index < args_.tiles; index += gridDim.x) {
        attend(plain_work<tile.rows(), tile.keys>(args_, index));
      }
    }
  }

 private:
  using Position = RingPosition<tile.slots>;

  __device__ __forceinline__ void run_posted() {
#pragma unroll 1
    while (true) {
      ptx::barrier_wait(address(offsetof(Memory, post_full), post_.slot), post_.parity);
      if (memory_.posts[post_.slot].finished) {
        return;
      }
      attend(memory_.posts[post_.slot].work);
      __syncwarp();
      release(offsetof(Memory, post_empty), post_.slot);
      post_.advance();
    }
  }

  __device__ __forceinline__ void attend(const HopperWork& work) {
    blocks_ = posted ? work.blocks.uniform() : work.blocks;
    softmax_.start();
    poisoned_ = 0;
    if constexpr (modified) {
      slope_ = args_.slopes.data != nullptr ? args_.slope_factor * load_per_head(args_.slopes, work.head) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < head_dim / 2; ++i) {
      out_[i] = 0.0f;
    }
    take_query();
    if constexpr (posted) {
      skip_blocks();
    }
    first_block(work);
    later_blocks(work);
    if constexpr (!tile.query_in_registers) {
      release(offsetof(Memory, query_empty));
    }
    last_values();
    finish(work);
  }

  // Only the last block of a plain tile can be an edge, and it comes first.
  __device__ __forceinline__ void later_blocks(const HopperWork& work) {
    int n = blocks_.last - 2;
    if constexpr (modified) {
#pragma unroll 1
      for (; n >= blocks_.first; --n) {
        step<Edge::perhaps>(work, n);
      }
    } else if constexpr (posted) {
#pragma unroll 1
      while (n >= blocks_.first) {
#pragma unroll 1
        for (; n >= blocks_.first && blocks_.is_edge(n); --n) {
          step<Edge::yes>(work, n);
        }
#pragma unroll 1
        for (; n >= max(blocks_.first, blocks_.full_first); --n) {
          step<Edge::no>(work, n);
        }
      }
    } else {
#pragma unroll 1
      for (; n >= 0; --n) {
        step<Edge::no>(work, n);
      }
    }
  }

  // Passes over the blocks from which this consumer's rows see no key (others' rows do): lets go of them and of its
  // turns, in the order in which the others use them.
  __device__ __forceinline__ void skip_blocks() {
    const int own_last = max(__shfl_sync(~0u, memory_.posts[post_.slot].consumer_last[group_], 0), blocks_.first + 1);
    const int skipped = blocks_.last - own_last;
    if (skipped == 0) {
      return;
    }
    values_ = keys_;
    values_.advance(2);
#pragma unroll 1
    for (int k = 0; k < skipped; ++k) {
      pass_over(keys_);
      keys_.advance(k == 0 ? 1 : 2);
      wait_for_turn();
      hand_over();
      pass_over(values_);
      values_.advance(2);
    }
    blocks_.last = own_last;
    skipped_ = true;
  }

  __device__ __forceinline__ void pass_over(Position position) {
    ptx::barrier_wait(address(offsetof(Memory, full), position.slot), position.parity);
    release(offsetof(Memory, empty), position.slot);
  }

  __device__ __forceinline__ void take_query() {
    ptx::barrier_wait(address(offsetof(Memory, query_full)), query_parity_);
    query_parity_ ^= 1;
    if constexpr (tile.query_in_registers) {
      const int row = tile_row_ - lane_ / 4 + (lane_ & 15);
      const std::uint32_t shared = address(offsetof(Memory, query)) + row * 128;
#pragma unroll
      for (int k = 0; k < head_dim / 16; ++k) {
        const int chunk = 2 * (k % 4) + lane_ / 16;
        ptx::load_matrices(query_[k], shared + k / 4 * tile.rows() * 128 + ((chunk ^ (row & 7)) << 4));
      }
      __syncwarp();
      release(offsetof(Memory, query_empty));
    }
  }

  __device__ __forceinline__ void first_block(const HopperWork& work) {
    ptx::barrier_wait(address(offsetof(Memory, full), keys_.slot), keys_.parity);
    ptx::wgmma_fence();
    multiply_keys();
    fetch(work, blocks_.last - 1);
    ptx::wgmma_wait<0>();
    ptx::touch(scores_);
    release(offsetof(Memory, empty), keys_.slot);
    // The next blocks in the ring are keys and then values; after a skip the values before them have been let go of.
    keys_.advance(posted && skipped_ ? 2 : 1);
    values_ = keys_;
    values_.advance();
    skipped_ = false;
    modify<Edge::perhaps>(work, blocks_.last - 1);
    float older[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      older[i] = softmax_.raise(scores_, i);
      softmax_.exponentials(scores_, i, older[i]);
    }
    pack_weights(work, blocks_.last - 1);
  }

  // Scores of block n, output of block n + 1, softmax of block n.
  template <Edge edge>
  __device__ __forceinline__ void step(const HopperWork& work, int n) {
    ptx::barrier_wait(address(offsetof(Memory, full), keys_.slot), keys_.parity);
    wait_for_turn();
    ptx::touch(out_);
    ptx::touch(weights_);
    ptx::wgmma_fence();
    multiply_keys();
    wait_for_values(n + 1, values_);
    ptx::wgmma_fence();
    multiply_values(values_);
    if constexpr (tile.hand_over == HandOver::issued) {
      hand_over();
    }
    fetch(work, n);
    ptx::wgmma_wait<1>();
    ptx::touch(scores_);
    if constexpr (tile.hand_over == HandOver::scored) {
      hand_over();
    }
    release(offsetof(Memory, empty), keys_.slot);
    keys_.advance(2);
    modify<edge>(work, n);
    float older[2];
    older[0] = softmax_.raise(scores_, 0);
    if constexpr (tile.pinned_maximum) {
      older[1] = softmax_.raise(scores_, 1);
      ptx::pin(softmax_.reference[0] + softmax_.reference[1], address(offsetof(Memory, never_written)));
      finish_values();
      softmax_.exponentials(scores_, 0, older[0]);
      softmax_.exponentials(scores_, 1, older[1]);
    } else {
      softmax_.exponentials(scores_, 0, older[0]);
      older[1] = softmax_.raise(scores_, 1);
      softmax_.exponentials(scores_, 1, older[1]);
      finish_values();
    }
    pack_weights(work, n);
    rescale(older);
  }

  __device__ __forceinline__ void last_values() {
    wait_for_values(blocks_.first, keys_);
    ptx::touch(out_);
    ptx::touch(weights_);
    ptx::wgmma_fence();
    multiply_values(keys_);
    softmax_.join_quad();
    ptx::wgmma_wait<0>();
    ptx::touch(out_);
    release(offsetof(Memory, empty), keys_.slot);
    keys_.advance();
  }

  // ---- Products ----

  // S = Q K^T  [64, keys]
  __device__ __forceinline__ void multiply_keys() {
    using Product = ptx::Wgmma<Half, tile.keys>;
    const std::uint64_t keys = key_descriptor_ + keys_.slot * (tile.block_bytes() >> 4);
#pragma unroll
    for (int k = 0; k < head_dim / 16; ++k) {
      const std::uint64_t b = keys + k / 4 * (tile.keys * 128 >> 4) + k % 4 * 2;
      if constexpr (tile.query_in_registers) {
        Product::template multiply<ptx::Reduced::along_columns>(scores_, query_[k][0], query_[k][1], query_[k][2],
                                                                query_[k][3], b, k != 0);
      } else {
        Product::multiply(scores_, query_descriptor_ + k / 4 * (tile.rows() * 128 >> 4) + k % 4 * 2, b, k != 0);
      }
    }
    ptx::wgmma_commit();
  }

  // O += P V  [64, head_dim]
  __device__ __forceinline__ void multiply_values(Position position) {
    const std::uint64_t values = value_descriptor_ + position.slot * (tile.block_bytes() >> 4);
#pragma unroll
    for (int k = 0; k < tile.keys / 16; ++k) {
      ptx::Wgmma<Half, head_dim>::template multiply<ptx::Reduced::along_rows>(
          out_, weights_[4 * k], weights_[4 * k + 1], weights_[4 * k + 2], weights_[4 * k + 3], values + k * 128, 1);
    }
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ void finish_values() {
    ptx::wgmma_wait<0>();
    ptx::touch(out_);
    ptx::touch(scores_);
    release(offsetof(Memory, empty), values_.slot);
    values_.advance(2);
  }

  // ---- Scores and weights ----

  // Begins to read what the modifiers of block n need from device memory: the bias, or else the mask.
  __device__ __forceinline__ void fetch(const HopperWork& work, int n) {
    if constexpr (masked) {
      if (args_.bias.data != nullptr && args_.bias.dtype != DType::f32) {
        fetch_bias(args_, work, tile_row_, n * tile.keys, quad_lane_, fetched_);
      } else if (args_.mask.data != nullptr) {
        fetch_mask(args_, work, tile_row_, n * tile.keys, quad_lane_, fetched_);
      }
    }
  }

  __device__ __forceinline__ void add_bias(const HopperWork& work, int n) {
    const int key = n * tile.keys;
    if (args_.bias.dtype == DType::f32) {
      add_f32_bias<tile.keys / 2, tile.keys>(args_, work, tile_row_, key, quad_lane_, scores_);
      return;
    }
    if (args_.bias.dtype == DType::bf16) {
      add_half_bias<bfloat16>(fetched_, quad_lane_, scores_);
    } else {
      add_half_bias<float16>(fetched_, quad_lane_, scores_);
    }
    if (args_.mask.data != nullptr) {  // the bias was in its place
      fetch_mask(args_, work, tile_row_, key, quad_lane_, fetched_);
    }
  }

  __device__ __forceinline__ void modify_scores(const HopperWork& work, int n) {
    scale_scores(args_, scores_);
    if (masked && args_.bias.data != nullptr) {
      add_bias(work, n);
    }
    if (args_.slopes.data != nullptr) {
      add_alibi(slope_, work, tile_row_, n * tile.keys + 2 * quad_lane_, scores_);
    }
    if (masked && args_.mask.data != nullptr) {
      apply_mask(fetched_, lane_, scores_);
    }
  }

  template <Edge edge>
  __device__ __forceinline__ void modify(const HopperWork& work, int n) {
    const int column = n * tile.keys + 2 * quad_lane_;
    if constexpr (modified) {
      modify_scores(work, n);
    }
    if (edge == Edge::yes || (edge == Edge::perhaps && blocks_.is_edge(n))) {
      ColumnRange rows[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if constexpr (posted) {
          rows[i] = {memory_.posts[post_.slot].begin[tile_row_ + 8 * i] - column,
                     memory_.posts[post_.slot].end[tile_row_ + 8 * i] - column};
        } else {
          rows[i] = {INT_MIN, work.key_count - column};
        }
      }
      mask_columns(scores_, rows);
    }
  }

  __device__ __forceinline__ void pack_weights(const HopperWork& work, int n) {
    if constexpr (modified) {
      if (args_.dropout.active) {
        drop_weights(args_, work, tile_row_, n * tile.keys, quad_lane_, scores_);
      }
    }
#pragma unroll
    for (int k = 0; k < tile.keys / 4; ++k) {
      weights_[k] = ptx::packed_pair<Half>(scores_[2 * k], scores_[2 * k + 1]);
    }
  }

  __device__ __forceinline__ void rescale(const float (&older)[2]) {
#pragma unroll
    for (int j = 0; j < head_dim / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        out_[4 * j + 2 * i] *= older[i];
        out_[4 * j + 2 * i + 1] *= older[i];
      }
    }
  }

  // ---- The end of a tile ----

  __device__ __forceinline__ void finish(const HopperWork& work) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = tile_row_ + 8 * i;
      const bool stored = row < work.stored_rows;
      const bool real = row < work.real_rows;
      float factor = 1.0f;
      if (posted && args_.sinks.data != nullptr) {
        factor = softmax_.add_sink(i, load_per_head(args_.sinks, work.head));
      }
      const bool empty = !real || softmax_.sum[i] == 0.0f;
      factor = factor / softmax_.sum[i];
      if constexpr (modified) {
        factor *= args_.kept;
      }
      const std::int64_t position = work.query_begin + work.row + row;
      Half* out = static_cast<Half*>(args_.out.data) + row_offset(args_.out, work.batch, work.head, position);
      store_row(out, out_, i, factor, quad_lane_, static_cast<int>(args_.value_dim), stored, empty);
      if (args_.lse.data != nullptr && stored && quad_lane_ == 0) {
        static_cast<float*>(args_.lse.data)[row_offset(args_.lse, work.batch, work.head, position)] =
            real ? softmax_.lse(i) : minus_infinity;
      }
    }
    if constexpr (posted) {
      if (poisoned_ != 0) {
        repair<Half>(args_, memory_.posts[post_.slot], tile_row_ - lane_ / 4, tile.keys, lane_);
      }
    }
  }

  // ---- Barriers ----

  __device__ __forceinline__ void release(std::size_t offset, std::uint32_t index = 0) {
    if (lane_ == 0) {
      ptx::barrier_arrive(address(offset, index));
    }
  }

  __device__ __forceinline__ void wait_for_values(int n, Position position) {
    if constexpr (posted) {
      if (blocks_.is_edge(n) || (masked && args_.masks_anywhere())) {
        ptx::barrier_wait(address(offsetof(Memory, checked), position.slot), position.parity);
#pragma unroll
        for (int warp = 0; warp < guard_warps; ++warp) {
          poisoned_ |= memory_.guard_found[position.slot][warp];
        }
        return;
      }
    }
    ptx::barrier_wait(address(offsetof(Memory, full), position.slot), position.parity);
  }

  __device__ __forceinline__ void wait_for_turn() { ptx::named_barrier_sync(1 + group_, 256); }
  __device__ __forceinline__ void hand_over() { ptx::named_barrier_arrive(static_cast<int>(next_turn_), 256); }

  // A field's address in shared memory, or that of a barrier in an array; from a base that is kept, since to find it
  // takes a slow instruction.
  __device__ __forceinline__ std::uint32_t address(std::size_t offset, std::uint32_t index = 0) const {
    return base_ + static_cast<std::uint32_t>(offset) + index * static_cast<std::uint32_t>(sizeof(std::uint64_t));
  }

  const HopperArguments& args_;
  Memory& memory_;
  const std::uint32_t base_;       // of memory_
  const std::uint32_t next_turn_;  // the named barrier of the warpgroup that issues after this one
  const int group_;                // which consumer
  const int lane_;                 // of the warp
  const int quad_lane_;            // of the four lanes that share a row
  int tile_row_;                   // this thread's first row in the tile; its second is 8 further
  std::uint64_t query_descriptor_, key_descriptor_, value_descriptor_;

  std::uint32_t query_[tile.query_in_registers ? head_dim / 16 : 1][4];
  float scores_[tile.keys / 2];
  std::uint32_t weights_[tile.keys / 4];
  float out_[head_dim / 2];
  RowSoftmax<Half, masked> softmax_;
  FetchedMatrix<masked ? tile.keys : 0> fetched_;
  float slope_;

  HopperBlocks blocks_;
  Position keys_, values_;
  std::uint32_t query_parity_ = 0;
  PostPosition post_;
  bool skipped_ = false;
  int poisoned_ = 0;  // a value that is not finite was taken out of an edge block
};

template <class Memory>
__device__ __forceinline__ void init_barriers(Memory& memory) {
  constexpr int consumer_warps = 4 * Memory::tile.consumers;
  const auto init = [](std::uint64_t& barrier, int arrivals) {
    ptx::barrier_init(ptx::shared_address(&barrier), arrivals);
  };
  init(memory.query_full, 1);
  init(memory.query_empty, consumer_warps);
  for (int slot = 0; slot < Memory::tile.slots; ++slot) {
    init(memory.full[slot], 1);
    init(memory.empty[slot], consumer_warps);
    init(memory.checked[slot], guard_warps);
  }
  for (int post = 0; post < 2; ++post) {
    init(memory.post_full[post], 1);
    init(memory.post_empty[post], consumer_warps + 1);  // and the producer
  }
  ptx::barrier_init_fence();
}

template <class Half, int head_dim, HopperVariant variant>
__global__ __launch_bounds__(hopper_tile(head_dim, variant).threads(),
                             1) void hopper_forward(const __grid_constant__ HopperArguments args) {
  using Memory = HopperMemory<head_dim, variant>;
  extern __shared__ __align__(tile_alignment) std::uint8_t dynamic_shared[];
  auto& memory = *reinterpret_cast<Memory*>(dynamic_shared);
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0);
  const int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    init_barriers(memory);
  }
  __syncthreads();
  if (group == 0) {
    ptx::lower_registers<Memory::tile.producer_registers>();
    if (warp == 0 && lane == 0) {
      HopperProducer<head_dim, variant>(args, memory).run();
    }
    if constexpr (!is_plain(variant)) {
      if (warp == 1) {
        schedule(args, memory, lane);
      } else if (warp >= 2) {
        guard<Half>(memory, warp - 2, lane);
      }
    }
  } else {
    ptx::raise_registers<Memory::tile.consumer_registers>();
    HopperConsumer<Half, head_dim, variant>(args, memory, group - 1, warp, lane).run();
  }
}

}  // namespace headway::cuda
