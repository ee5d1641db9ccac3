// Forward attention on Hopper: one thread feeds tiles by the bulk copy engine, two or three warpgroups of 64 query rows
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

#include "engines/cuda/kernels/hopper_consumer.cuh"
#include "engines/cuda/kernels/hopper_producer.cuh"

namespace headway::cuda {

template <bool posted, class Memory>
__device__ __forceinline__ void init_barriers(Memory& memory) {
  constexpr int consumer_warps = 4 * Memory::tile.consumers;
  const auto init = [](std::uint64_t& barrier, int arrivals) {
    ptx::barrier_init(ptx::shared_address(&barrier), arrivals);
  };
  for (int slot = 0; slot < Memory::tile.query_slots; ++slot) {
    init(memory.query_full[slot], 1);
    init(memory.query_empty[slot], consumer_warps);
  }
  for (int slot = 0; slot < Memory::tile.slots; ++slot) {
    init(memory.full[slot], 1);
    init(memory.empty[slot], consumer_warps + (posted ? guard_warps : 0));
    init(memory.checked[slot], guard_warps);
  }
  for (int slot = 0; slot < Memory::unit_slots; ++slot) {
    init(memory.unit_full[slot], 1);
    init(memory.unit_ready[slot], guard_warps);
    init(memory.unit_empty[slot], 4);  // the warps of one consumer
  }
  for (int post = 0; post < 2; ++post) {
    init(memory.post_full[post], 1);
    init(memory.post_empty[post], consumer_warps + 1);  // and the producer
    memory.posts[post].again = false;
  }
  ptx::barrier_init_fence();
}

// The guard's warps, beside the producer: they follow it through the ring. Mostly they have nothing to do.
template <class Half, class Memory>
__device__ __forceinline__ void guard(const HopperArguments& args, Memory& memory, int warp, int lane) {
  RingPosition<Memory::tile.slots> position;
  UnitPosition unit;
  while (true) {
    ptx::barrier_wait(ptx::shared_address(&memory.full[position.slot]), position.parity);
    const GuardTask task = memory.guard_task[position.slot];
    if (task.look == GuardTask::Look::stop) {
      return;
    }
    if (task.look == GuardTask::Look::check) {
      check_slot<Half>(memory, position.slot, warp, lane);
    }
    __syncwarp();
    if (lane == 0) {
      ptx::barrier_arrive(ptx::shared_address(&memory.checked[position.slot]));
      ptx::barrier_arrive(ptx::shared_address(&memory.empty[position.slot]));
    }
    if constexpr (Memory::masked) {
      if (task.prepare >= 0) {
        prepare_units(args, memory, memory.posts[task.post].work, task.prepare, unit, warp, lane);
        unit.advance(args.units.each);
      }
    }
    position.advance();
  }
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
    init_barriers<!is_plain(variant)>(memory);
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
        guard<Half>(args, memory, warp - 2, lane);
      }
    }
  } else {
    ptx::raise_registers<Memory::tile.consumer_registers>();
    HopperConsumer<Half, head_dim, variant>(args, memory, group - 1, warp, lane).run();
  }
}

}  // namespace headway::cuda
