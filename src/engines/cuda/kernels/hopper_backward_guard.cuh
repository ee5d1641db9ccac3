// Two warps of the backward keep what a row may not see out of the sums.
#pragma once

#include "engines/cuda/kernels/hopper_backward_shared.cuh"
#include "engines/cuda/kernels/hopper_guard.cuh"

namespace headway::cuda {

// At edges, looks through the operands of sums over pairs: keys, queries and output gradients. Consumers wait for it
// only before those sums; that it may change products which they read before does not matter, see hopper_backward.cuh.
template <class Half, class Memory>
class BackwardGuard {
 public:
  static constexpr HopperBackwardTile tile = Memory::tile;

  __device__ __forceinline__ BackwardGuard(Memory& memory, int warp, int lane)
      : memory_(memory), shared_(memory), thread_(warp * 32 + lane), lane_(lane) {}

  __device__ __forceinline__ void run() {
    StagePosition stage;
    std::uint32_t keys_parity = 1;
    bool keys_checked = false;
#pragma unroll 1
    while (true) {
      ptx::barrier_wait(shared_.of(offsetof(Memory, queries_full), stage.slot), stage.parity);
      const int flags = memory_.steps[stage.slot].flags;
      if ((flags & BackwardStep::stop) != 0) {
        return;
      }
      if ((flags & BackwardStep::first) != 0) {
        keys_parity ^= 1;
        keys_checked = false;
      }
      const bool edge = (flags & BackwardStep::edge) != 0;
      if (edge) {
        ptx::barrier_wait(shared_.of(offsetof(Memory, grad_outs_full), stage.slot), stage.parity);
        check<tile.query_bytes()>(memory_.grad_outs[stage.slot]);
      }
      report(offsetof(Memory, grad_outs_checked), stage);
      if (edge) {
        if (Memory::sums_over_keys && !keys_checked) {
          ptx::barrier_wait(shared_.of(offsetof(Memory, keys_full)), keys_parity);
          check<tile.key_bytes()>(memory_.keys);
          keys_checked = true;
        }
        check<tile.query_bytes()>(memory_.queries[stage.slot]);
      }
      report(offsetof(Memory, queries_checked), stage);
      ptx::barrier_arrive(shared_.of(offsetof(Memory, queries_empty), stage.slot));  // so that no step passes unseen
      stage.advance();
    }
  }

 private:
  template <std::uint32_t bytes>
  __device__ __forceinline__ void check(std::uint8_t* block) {
    if (check_block<Half, bytes>(block, thread_)) {
      ptx::shared_writes_to_async_fence();
    }
  }

  // Consumers wait at edges only. The guard itself waits for the last phase, which is over: one that nobody waits for
  // would look like a mistake.
  __device__ __forceinline__ void report(std::size_t offset, const StagePosition& stage) {
    __syncwarp();
    if (lane_ == 0) {
      ptx::barrier_wait(shared_.of(offset, stage.slot), stage.parity ^ 1);
      ptx::barrier_arrive(shared_.of(offset, stage.slot));
    }
  }

  Memory& memory_;
  const BackwardAddresses shared_;
  const int thread_, lane_;
};

}  // namespace headway::cuda
