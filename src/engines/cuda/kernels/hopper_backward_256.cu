// The Hopper backward kernels of head dims up to 256.
#include "engines/cuda/kernels/hopper_backward_kernels.h"
#include "engines/cuda/kernels/hopper_key_gradients.cuh"
#include "engines/cuda/kernels/hopper_query_gradients.cuh"

namespace headway::cuda {
namespace {

template <class Choose>
HopperBackwardKernel with_variant(DType dtype, HopperBackwardVariant variant, const Choose& choose) {
  using enum HopperBackwardVariant;
  const auto of_type = [&]<class Half>() {
    switch (variant) {
      case modified: return choose.template operator()<Half, modified>();
      case masked: return choose.template operator()<Half, masked>();
      default: return choose.template operator()<Half, ranged>();
    }
  };
  return dtype == DType::bf16 ? of_type.template operator()<bfloat16>() : of_type.template operator()<float16>();
}

}  // namespace

HopperBackwardKernel hopper_key_gradients_kernel(DType dtype, HopperBackwardVariant variant) {
  return with_variant(dtype, variant, [&]<class Half, HopperBackwardVariant one>() -> HopperBackwardKernel {
    return {reinterpret_cast<const void*>(&hopper_key_gradients<Half, one>), hopper_backward_tile(256, one),
            sizeof(KeyGradientsMemory<one>)};
  });
}

HopperBackwardKernel hopper_query_gradients_kernel(DType dtype, HopperBackwardVariant variant) {
  return with_variant(dtype, variant, [&]<class Half, HopperBackwardVariant one>() -> HopperBackwardKernel {
    return {reinterpret_cast<const void*>(&hopper_query_gradients<Half, one>), hopper_backward_tile(256, one),
            sizeof(QueryGradientsMemory<one>)};
  });
}

}  // namespace headway::cuda
