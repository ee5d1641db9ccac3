// Adding to and raising numbers in global memory without waiting for them.
#pragma once

namespace headway::cuda::ptx {

__device__ __forceinline__ void add_to(double& global, double added) {
  asm volatile("red.relaxed.gpu.global.add.f64 [%0], %1;" ::"l"(__cvta_generic_to_global(&global)), "d"(added)
               : "memory");
}

// Of numbers from 0 on, whose bits are in order.
__device__ __forceinline__ void raise_to(float& global, float other) {
  asm volatile("red.relaxed.gpu.global.max.s32 [%0], %1;" ::"l"(__cvta_generic_to_global(&global)),
               "r"(__float_as_int(other))
               : "memory");
}
__device__ __forceinline__ void raise_to(double& global, double other) {
  asm volatile("red.relaxed.gpu.global.max.s64 [%0], %1;" ::"l"(__cvta_generic_to_global(&global)),
               "l"(__double_as_longlong(other))
               : "memory");
}

}  // namespace headway::cuda::ptx
