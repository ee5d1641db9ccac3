// A kernel that is launched while the one before it still runs (sm_90 and later; elsewhere it starts after its end).
#pragma once

namespace headway::cuda::ptx {

// Lets the next kernel's blocks start as soon as there is room for them.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Waits until the kernel before has ended, and all that it wrote can be read.
__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace headway::cuda::ptx
