// Picks one of a head dim's kernels.
#pragma once

#include "engines/cuda/kernels/hopper_backward.cuh"
#include "engines/cuda/kernels/hopper_backward_kernels.h"

namespace headway::cuda {

template <int columns, HopperBackwardVariant variant>
HopperBackwardKernel hopper_backward_instance(DType dtype) {
  const void* function = dtype == DType::bf16
                             ? reinterpret_cast<const void*>(&hopper_backward<bfloat16, columns, variant>)
                             : reinterpret_cast<const void*>(&hopper_backward<float16, columns, variant>);
  return {function, hopper_backward_tile(columns, variant), sizeof(HopperBackwardMemory<columns, variant>)};
}

template <int columns>
HopperBackwardKernel hopper_backward_instance(DType dtype, HopperBackwardVariant variant) {
  using enum HopperBackwardVariant;
  switch (variant) {
    case capped: return hopper_backward_instance<columns, capped>(dtype);
    case sloped: return hopper_backward_instance<columns, sloped>(dtype);
    case dropped: return hopper_backward_instance<columns, dropped>(dtype);
    case modified: return hopper_backward_instance<columns, modified>(dtype);
    case bit_masked: return hopper_backward_instance<columns, bit_masked>(dtype);
    case biased: return hopper_backward_instance<columns, biased>(dtype);
    case masked: return hopper_backward_instance<columns, masked>(dtype);
    default: return hopper_backward_instance<columns, ranged>(dtype);
  }
}

}  // namespace headway::cuda
