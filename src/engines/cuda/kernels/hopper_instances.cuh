// Picks one of a head dim's kernels.
#pragma once

#include "engines/cuda/kernels/hopper_forward.cuh"
#include "engines/cuda/kernels/hopper_kernels.h"

namespace headway::cuda {

template <class Half, int head_dim, HopperVariant variant>
HopperKernel hopper_instance() {
  return {reinterpret_cast<const void*>(&hopper_forward<Half, head_dim, variant>), hopper_tile(head_dim, variant),
          sizeof(HopperMemory<head_dim, variant>)};
}

template <int head_dim, HopperVariant variant>
HopperKernel hopper_instance(DType dtype) {
  return dtype == DType::bf16 ? hopper_instance<bfloat16, head_dim, variant>()
                              : hopper_instance<float16, head_dim, variant>();
}

// Every head dim has these; where long or short sequences have no kernel of their own they take the common one.
template <int head_dim>
HopperKernel hopper_instance(DType dtype, HopperVariant variant) {
  switch (variant) {
    case HopperVariant::ranged:
    case HopperVariant::ranged_short: return hopper_instance<head_dim, HopperVariant::ranged>(dtype);
    case HopperVariant::split: return hopper_instance<head_dim, HopperVariant::split>(dtype);
    case HopperVariant::modified: return hopper_instance<head_dim, HopperVariant::modified>(dtype);
    case HopperVariant::masked: return hopper_instance<head_dim, HopperVariant::masked>(dtype);
    case HopperVariant::dropped: return hopper_instance<head_dim, HopperVariant::dropped>(dtype);
    default: return hopper_instance<head_dim, HopperVariant::plain>(dtype);
  }
}

}  // namespace headway::cuda
