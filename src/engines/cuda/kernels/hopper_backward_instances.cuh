// Picks one of a head dim's kernels.
#pragma once

#include "engines/cuda/kernels/hopper_backward.cuh"
#include "engines/cuda/kernels/hopper_backward_kernels.h"

namespace headway::cuda {

template <int head_dim, HopperBackwardVariant variant>
HopperBackwardKernel hopper_backward_instance(DType dtype) {
  const void* function = dtype == DType::bf16
                             ? reinterpret_cast<const void*>(&hopper_backward<bfloat16, head_dim, variant>)
                             : reinterpret_cast<const void*>(&hopper_backward<float16, head_dim, variant>);
  return {function, hopper_backward_tile(head_dim, variant), sizeof(HopperBackwardMemory<head_dim, variant>)};
}

template <int head_dim>
HopperBackwardKernel hopper_backward_instance(DType dtype, HopperBackwardVariant variant) {
  using enum HopperBackwardVariant;
  switch (variant) {
    case capped: return hopper_backward_instance<head_dim, capped>(dtype);
    case sloped: return hopper_backward_instance<head_dim, sloped>(dtype);
    case dropped: return hopper_backward_instance<head_dim, dropped>(dtype);
    case modified: return hopper_backward_instance<head_dim, modified>(dtype);
    case bit_masked: return hopper_backward_instance<head_dim, bit_masked>(dtype);
    case biased: return hopper_backward_instance<head_dim, biased>(dtype);
    case masked: return hopper_backward_instance<head_dim, masked>(dtype);
    default: return hopper_backward_instance<head_dim, ranged>(dtype);
  }
}

}  // namespace headway::cuda
