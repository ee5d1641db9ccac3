// The linear map of a layer, y = x W + b, and its gradients, in plain loops.
//
// Every sum is taken in float64, in the order of its index, and rounded once to the tensors' type. A row of y and of dx
// depends on nothing but its own row of x or dy: what else is in the batch changes no bit.
#pragma once

#include <optional>

#include "core/linear.h"
#include "headway/tensor.h"

namespace headway::reference {

// y = x W + b. x [B,S,in], weight [in,out], bias [out] or none, y [B,S,out]: one float type, any strides.
void linear(ConstTensorView x, ConstTensorView weight, const std::optional<ConstTensorView>& bias, TensorView y);

// The gradients of sum(dy * y), dy [B,S,out]. A row of dy that is all zero adds nothing to dweight, whatever its row of
// x holds: attention gives such rows to positions it may not see, and NaN or Inf stored there must stay invisible.
void linear_backward(ConstTensorView dy, ConstTensorView x, ConstTensorView weight, const LinearGradients& gradients);

}  // namespace headway::reference
