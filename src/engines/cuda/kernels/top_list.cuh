// The list of a row's largest weights, in order, the smaller key first where weights are equal.
#pragma once

#include <cstdint>

namespace headway::cuda {

// A list of `size` entries in global memory; those that are free have a weight of 0. Lane n of the warp that owns it
// has entries n, n + 32, ..
template <class Real>
struct TopList {
  Real* weights;
  std::int64_t* keys;
  std::int64_t size;

  // The lanes of `entering` have a weight each, above 0, and its key. They enter one after the other into 32 entries,
  // and what these lose enters the next 32. Returns the last weight of the list.
  __device__ Real enter(std::uint32_t entering, Real weight, std::int64_t key) const {
    constexpr std::uint32_t all = 0xffffffffu;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    Real last = 0;
#pragma unroll 1
    for (std::int64_t first = 0; first < size; first += 32) {
      const int count = size - first < 32 ? static_cast<int>(size - first) : 32;
      const bool mine = lane < count;
      Real own = mine ? weights[first + lane] : Real(0);
      std::int64_t own_key = mine ? keys[first + lane] : 0;
#pragma unroll 1
      for (std::uint32_t left = entering; left != 0; left &= left - 1) {
        const int from = __ffs(static_cast<int>(left)) - 1;
        const Real next = __shfl_sync(all, weight, from);
        const std::int64_t next_key = __shfl_sync(all, key, from);
        const bool ahead = own > next || (own == next && own_key < next_key);
        const int place = __popc(__ballot_sync(all, mine && ahead));
        if (place == count) {
          continue;
        }
        const Real lost = __shfl_sync(all, own, count - 1), before = __shfl_up_sync(all, own, 1);
        const std::int64_t lost_key = __shfl_sync(all, own_key, count - 1);
        const std::int64_t before_key = __shfl_up_sync(all, own_key, 1);
        if (lane >= place) {
          own = lane == place ? next : before;
          own_key = lane == place ? next_key : before_key;
        }
        if (lane == from) {
          weight = lost;
          key = lost_key;
        }
      }
      if (mine) {
        weights[first + lane] = own;
        keys[first + lane] = own_key;
      }
      last = __shfl_sync(all, own, count - 1);
    }
    return last;
  }
};

}  // namespace headway::cuda
