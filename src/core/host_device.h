// Marks a function that CUDA kernels, or the CPU kernels of one instruction set, share with the host. A CPU kernel's
// file is compiled for instructions that a machine may lack, so what it shares is always inlined: the linker must not
// pick its copy for the host.
#pragma once

#ifdef __CUDACC__
#define HEADWAY_HOST_DEVICE __host__ __device__
#define HEADWAY_SHARED_INLINE __host__ __device__ __forceinline__
#else
#define HEADWAY_HOST_DEVICE
#define HEADWAY_SHARED_INLINE __attribute__((always_inline)) inline
#endif
