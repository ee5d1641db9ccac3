// The linear map of a layer, y = x W + b, and its gradients, on the engine that a call asks for.
#pragma once

#include <optional>
#include <string_view>

#include "headway/attention.h"
#include "headway/plan.h"
#include "headway/tensor.h"

namespace headway {

// Where linear_backward writes; a gradient without a view is not computed.
struct LinearGradients {
  std::optional<TensorView> dx = {};       // dy W^T         [B,S,in]
  std::optional<TensorView> dweight = {};  // sum of x^T dy  [in,out]
  std::optional<TensorView> dbias = {};    // sum of dy      [out]
};

// Who hears how much is done, under the name of the operation that a linear map is part of.
struct LinearReports {
  std::string_view operation = "linear";
  Progress progress = {};
};

// y = x W + b. x [B,S,in], weight [in,out], bias [out] or none, y [B,S,out]: one float type, any strides, host memory.
// The reference engine runs where it is asked for, the CPU engine everywhere else.
void linear(Engine engine, ConstTensorView x, ConstTensorView weight, const std::optional<ConstTensorView>& bias,
            TensorView y, const LinearReports& reports = {});

// The gradients of sum(dy * y), dy [B,S,out]. A row of dy that is all zero adds nothing to dweight, whatever its row of
// x holds: attention gives such rows to positions it may not see, and NaN or Inf stored there must stay invisible.
void linear_backward(Engine engine, ConstTensorView dy, ConstTensorView x, ConstTensorView weight,
                     const LinearGradients& gradients, const LinearReports& reports = {});

}  // namespace headway
