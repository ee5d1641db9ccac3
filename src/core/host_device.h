// Marks a function that CUDA kernels share with the host; to every other compiler it is nothing.
#pragma once

#ifdef __CUDACC__
#define HEADWAY_HOST_DEVICE __host__ __device__
#else
#define HEADWAY_HOST_DEVICE
#endif
