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

#include "engines/cuda/kernels/hopper_backward_consumer.cuh"
#include "engines/cuda/kernels/hopper_backward_guard.cuh"
#include "engines/cuda/kernels/hopper_backward_producer.cuh"
#include "engines/cuda/kernels/hopper_block.cuh"

namespace headway::cuda {

template <class Memory>
__device__ __forceinline__ void init_backward_barriers(Memory& memory) {
  constexpr int consumer_warps = 4 * HopperBackwardTile::consumers, consumer_threads = 32 * consumer_warps;
  init_barrier(memory.keys_full, 1);
  init_barrier(memory.keys_empty, consumer_threads);
  for (int slot = 0; slot < 2; ++slot) {
    init_barrier(memory.queries_full[slot], 1);
    init_barrier(memory.queries_empty[slot], consumer_threads + guard_threads);
    init_barrier(memory.grad_outs_full[slot], 1);
    init_barrier(memory.grad_outs_empty[slot], consumer_threads);
    init_barrier(memory.grad_outs_checked[slot], guard_warps);
    init_barrier(memory.queries_checked[slot], guard_warps);
    init_barrier(memory.gradients_full[slot], consumer_warps);
    init_barrier(memory.gradients_empty[slot], 1);
    init_barrier(memory.post_full[slot], 1);
    init_barrier(memory.post_empty[slot], consumer_threads + 1);  // and the adder
  }
  for (std::uint64_t& full : memory.turns_full) {
    init_barrier(full, 1);
  }
  ptx::barrier_init_fence();
}

template <class Half, int columns, HopperBackwardVariant variant>
__global__ __launch_bounds__(HopperBackwardTile::threads,
                             1) void hopper_backward(const __grid_constant__ HopperBackwardArguments args) {
  using Memory = HopperBackwardMemory<columns, variant>;
  static_assert(sizeof(Memory) <= 227 * 1024);  // what a block may have
  extern __shared__ __align__(tile_alignment) std::uint8_t dynamic_shared[];
  auto& memory = *reinterpret_cast<Memory*>(dynamic_shared);
  const auto feed = [&](int warp, int lane) {
    if (warp == 0) {
      HopperBackwardProducer<columns, variant>(args, memory, lane).run();
    } else if (warp == 1 && lane == 0) {
      HopperBackwardAdder<columns, variant>(args, memory).run();
    } else if (warp >= 2) {
      BackwardGuard<Half, Memory>(memory, warp - 2, lane).run();
    }
  };
  part_block<HopperBackwardTile::producer_registers, HopperBackwardTile::consumer_registers>(
      [&] { init_backward_barriers(memory); }, feed,
      [&](int which, int warp, int lane) {
        HopperBackwardConsumer<Half, columns, variant>(args, memory, which, warp, lane).run();
      });
}

}  // namespace headway::cuda
