// Forward attention on Hopper: one thread feeds tiles by the bulk copy engine, two to four warpgroups of 64 query rows
// consume them on the tensor cores. Blocks of threads stay and take tiles until none is left; beside the producer a
// scheduler posts what is to be done (hopper_schedule.cuh) and a guard keeps what may not be seen out of the sums
// (hopper_guard.cuh).
//
// Bytes: Q and O move once. K and V of a head are read by every query tile of it, which run near each other in time, so
// most reads end in L2; a block of keys serves all rows of the tile. A mask or bias is read once for each tile that it
// changes (hopper_units.cuh). Scores and weights never leave registers.
//
// Bound: the tensor cores, if the softmax keeps out of their way. A warpgroup issues S = Q K^T of block n, then O += P
// V of block n + 1, and takes the softmax of block n while the latter runs; named barriers pass the right to issue from
// one warpgroup to the next, so that one is in its softmax while another multiplies.
#pragma once

#include "engines/cuda/kernels/hopper_block.cuh"
#include "engines/cuda/kernels/hopper_consumer.cuh"
#include "engines/cuda/kernels/hopper_producer.cuh"
#include "engines/cuda/kernels/hopper_unit_rows.cuh"

namespace headway::cuda {

// Places that the copy engine fills and the tensor cores read are let go of by one lane of each warp; what ordinary
// instructions read or write is by every thread that did.
template <class Memory>
__device__ __forceinline__ void init_barriers(Memory& memory) {
  constexpr int consumer_warps = 4 * Memory::tile.consumers;
  for (int slot = 0; slot < Memory::tile.query_slots; ++slot) {
    init_barrier(memory.query_full[slot], 1);
    init_barrier(memory.query_empty[slot], consumer_warps);
  }
  for (int slot = 0; slot < Memory::tile.slots; ++slot) {
    init_barrier(memory.full[slot], 1);
    init_barrier(memory.empty[slot], consumer_warps);
    init_barrier(memory.checked[slot], guard_warps);
  }
  for (int slot = 0; slot < Memory::unit_slots; ++slot) {
    init_barrier(memory.unit_full[slot], 1);
    init_barrier(memory.unit_ready[slot], guard_threads);
    init_barrier(memory.unit_empty[slot], 128);  // one consumer
  }
  for (int post = 0; post < post_slots; ++post) {
    init_barrier(memory.post_full[post], 32);                                        // the scheduler
    init_barrier(memory.post_empty[post], 32 * consumer_warps + 1 + guard_threads);  // the producer is one
    memory.posts[post].again = false;
  }
  init_barrier(memory.careful_begun, 1);
  ptx::barrier_init_fence();
}

// The guard's warps, beside the producer. They follow it through the ring only in tiles that need them, and pass over
// the others.
template <class Half, class Memory>
class HopperGuard {
 public:
  __device__ __forceinline__ HopperGuard(const HopperArguments& args, Memory& memory, int warp, int lane)
      : args_(args),
        memory_(memory),
        warp_(warp),
        lane_(lane),
        prepares_(Memory::masked && args.units.prepared),
        rows_(args, memory, warp, lane) {}

  __device__ __forceinline__ void run() {
    PostPosition post;
    while (true) {
      ptx::barrier_wait(ptx::shared_address(&memory_.post_full[post.slot]), post.parity);
      const PostKind kind = memory_.posts[post.slot].kind;
      if (kind == PostKind::finished) {
        return;
      }
      if (kind == PostKind::tile) {
        const HopperWork& work = memory_.posts[post.slot].work;
        if (work.careful) {
          // The ring is then where the tile begins: a barrier's parity is the same two phases earlier.
          ptx::barrier_wait(ptx::shared_address(&memory_.careful_begun), careful_parity_);
          careful_parity_ ^= 1;
        }
        if constexpr (Memory::spanned) {
          if (work.careful) {
            follow_spans(work, memory_.spans.works[post.slot]);
          }
        } else if (prepares_ || work.careful) {
          follow(work);
        }
        position_.skip(2 * (work.blocks.last - work.blocks.first));
      }
      ptx::barrier_arrive(ptx::shared_address(&memory_.post_empty[post.slot]));
      post.advance();
    }
  }

 private:
  using Position = RingPosition<Memory::tile.slots>;

  // As HopperProducer::load_tile goes.
  __device__ __forceinline__ void follow(const HopperWork& work) {
    Position position = position_;
    const int last = work.blocks.last - 1;
    prepare(work, last);
    position.advance();  // over K(last)
#pragma unroll 1
    for (int n = last; n > work.blocks.first; --n) {
      position.advance();  // over K(n - 1)
      check(work, n, position);
      prepare(work, n - 1);
      position.advance();
    }
    if constexpr (Memory::masked) {
      rows_.finish();
    }
    check(work, work.blocks.first, position);
  }

  // As HopperProducer::load_spans goes.
  __device__ __forceinline__ void follow_spans(const HopperWork& work, const SpanWork& spans) {
    Position position = position_;
    SpanBlocks<Memory::tile.keys> blocks(args_.spans, spans);
    position.advance();  // over the first keys
#pragma unroll 1
    for (int n = work.blocks.last - 1; n >= 0; --n) {
      position.advance(n > 0 ? 1 : 0);  // over the next keys
      check(blocks.next().edge, position);
      position.advance();
    }
  }

  __device__ __forceinline__ void check(const HopperWork& work, int n, Position position) {
    check(is_checked(args_, work.careful, work.blocks, n), position);
  }

  __device__ __forceinline__ void check(bool checked, Position position) {
    if (checked) {
      ptx::barrier_wait(ptx::shared_address(&memory_.full[position.slot]), position.parity);
      check_slot<Half>(memory_, position.slot, warp_, lane_);
      arrive(memory_.checked[position.slot]);
    }
  }

  __device__ __forceinline__ void prepare(const HopperWork& work, int n) {
    if constexpr (Memory::masked) {
      if (prepares_ && args_.units.source == UnitSource::rows) {
        copy_rows(work, n);
      } else if (prepares_) {
        prepare_units(args_, memory_, work, n, unit_, warp_, lane_);
      }
      if (prepares_) {
        unit_.advance(args_.units.each);
      }
    }
  }

  // The units of all consumers at a block. The last one stays under way, unless somebody has to wait for it.
  __device__ __forceinline__ void copy_rows(const HopperWork& work, int n) {
    const bool forbids = args_.bias.data != nullptr && args_.mask.data != nullptr;
#pragma unroll 1
    for (int consumer = 0; consumer < Memory::tile.consumers; ++consumer) {
      rows_.begin(work, n, consumer, unit_);
      if (forbids) {
        rows_.finish([&](std::uint8_t* unit) {
          prepare_row<Memory::tile.keys>(args_, {work, unit_rows * consumer, n * Memory::tile.keys}, unit,
                                         32 * warp_ + lane_);
        });
      }
    }
    if (work.careful) {
      rows_.finish();
    }
  }

  __device__ __forceinline__ void arrive(std::uint64_t& barrier) {
    __syncwarp();
    if (lane_ == 0) {
      ptx::barrier_arrive(ptx::shared_address(&barrier));
    }
  }

  const HopperArguments& args_;
  Memory& memory_;
  const int warp_, lane_;
  const bool prepares_;
  Position position_;  // of the tile's first keys
  UnitPosition unit_;
  UnitRows<Memory> rows_;
  std::uint32_t careful_parity_ = 0;
};

template <class Half, int head_dim, HopperVariant variant>
__global__ __launch_bounds__(hopper_tile(head_dim, variant).threads(),
                             1) void hopper_forward(const __grid_constant__ HopperArguments args) {
  using Memory = HopperMemory<head_dim, variant>;
  static_assert(sizeof(Memory) <= 227 * 1024);  // what a block may have
  extern __shared__ __align__(tile_alignment) std::uint8_t dynamic_shared[];
  auto& memory = *reinterpret_cast<Memory*>(dynamic_shared);
  const auto init = [&] {
    ptx::prefetch_map(&args.query_map);
    ptx::prefetch_map(&args.key_map);
    ptx::prefetch_map(&args.value_map);
    init_barriers(memory);
  };
  const auto feed = [&](int warp, int lane) {
    if (warp == 0 && lane == 0) {
      HopperProducer<head_dim, variant>(args, memory).run();
    }
    if constexpr (!is_plain(variant)) {
      if (warp == 1) {
        schedule(args, memory, lane);
      } else if (warp >= 2) {
        HopperGuard<Half, Memory>(args, memory, warp - 2, lane).run();
      }
    }
  };
  part_block<Memory::tile.producer_registers, Memory::tile.consumer_registers>(
      init, feed, [&](int which, int warp, int lane) {
        HopperConsumer<Half, head_dim, variant>(args, memory, which, warp, lane).run();
      });
}

}  // namespace headway::cuda
