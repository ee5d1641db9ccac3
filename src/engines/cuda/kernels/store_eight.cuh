// Four or eight neighbouring features of an output row.
#pragma once

#include "engines/cuda/arguments.h"
#include "engines/cuda/elements.cuh"

namespace headway::cuda {

// From d on, a multiple of 4.
template <class T>
__device__ inline void store_four(const ForwardArguments& args, T* row, std::int64_t d, const float (&four)[4]) {
  T elements[4] = {element<T>(four[0]), element<T>(four[1]), element<T>(four[2]), element<T>(four[3])};
  if (args.out.chunks && d + 4 <= args.value_dim) {
    *reinterpret_cast<uint2*>(row + d) = *reinterpret_cast<const uint2*>(elements);
    return;
  }
#pragma unroll
  for (int x = 0; x < 4; ++x) {
    if (d + x < args.value_dim) {
      row[(d + x) * args.out.feature] = elements[x];
    }
  }
}

// From d on, a multiple of 8.
template <class T>
__device__ inline void store_eight(const ForwardArguments& args, T* row, int d, const float (&eight)[8]) {
  if (d >= args.value_dim) {
    return;
  }
  if (args.out.chunks && d + 8 <= args.value_dim) {
    if constexpr (std::is_same_v<T, float>) {
      reinterpret_cast<float4*>(row + d)[0] = {eight[0], eight[1], eight[2], eight[3]};
      reinterpret_cast<float4*>(row + d)[1] = {eight[4], eight[5], eight[6], eight[7]};
    } else {
      *reinterpret_cast<uint4*>(row + d) = {
          ptx::packed_pair<T>(eight[0], eight[1]), ptx::packed_pair<T>(eight[2], eight[3]),
          ptx::packed_pair<T>(eight[4], eight[5]), ptx::packed_pair<T>(eight[6], eight[7])};
    }
    return;
  }
#pragma unroll
  for (int x = 0; x < 8; ++x) {
    if (d + x < args.value_dim) {
      row[(d + x) * args.out.feature] = element<T>(eight[x]);
    }
  }
}

}  // namespace headway::cuda
