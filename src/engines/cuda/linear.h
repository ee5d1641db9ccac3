// The linear map of a layer on a GPU: cuBLASLt's products, queued on the call's stream. See core/linear.h for what is
// computed, over any layout. Where cuBLASLt has no way, and for calls that must not depend on what else is in the
// batch, an exact kernel of our own computes the product, slowly.
#pragma once

#include "core/linear.h"

namespace headway::cuda {

void linear(ConstTensorView x, ConstTensorView weight, const std::optional<ConstTensorView>& bias, TensorView y,
            const LinearCall& call);
void linear_backward(ConstTensorView dy, ConstTensorView x, ConstTensorView weight, const LinearGradients& gradients,
                     const LinearCall& call);

}  // namespace headway::cuda
