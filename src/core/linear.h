// The linear map of a layer, y = x W + b, and its gradients, on the engine that a call asks for.
#pragma once

#include <optional>
#include <string_view>

#include "headway/attention.h"
#include "headway/linear.h"
#include "headway/plan.h"
#include "headway/tensor.h"

namespace headway {

// What a linear map takes from the operation that it is part of.
struct LinearCall {
  std::string_view operation = "linear";  // begins error texts
  Progress progress = {};
  void* stream = nullptr;        // a cudaStream_t
  bool batch_invariant = false;  // matters on a GPU only
};

// y = x W + b. x [B,S,in], weight [in,out], bias [out] or none, y [B,S,out]: one float type, any strides, one device.
// In host memory the reference engine runs where it is asked for, the CPU engine everywhere else.
void linear(Engine engine, ConstTensorView x, ConstTensorView weight, const std::optional<ConstTensorView>& bias,
            TensorView y, const LinearCall& call = {});

// The gradients of sum(dy * y), dy [B,S,out]. A row of dy that is all zero adds nothing to dweight, whatever its row of
// x holds: attention gives such rows to positions it may not see, and NaN or Inf stored there must stay invisible.
void linear_backward(Engine engine, ConstTensorView dy, ConstTensorView x, ConstTensorView weight,
                     const LinearGradients& gradients, const LinearCall& call = {});

}  // namespace headway
