// The linear map y = x W + b and its gradients: the products that a layer makes, for models built around attention.
#pragma once

#include <optional>

#include "headway/cxx20.h"
#include "headway/tensor.h"

#pragma GCC visibility push(default)
namespace headway {

// The outputs of linear_backward; a gradient without a view is not computed.
struct LinearGradients {
  std::optional<TensorView> dx = {};       // dy W^T, x's shape
  std::optional<TensorView> dweight = {};  // sum of x^T dy, [in,out]
  std::optional<TensorView> dbias = {};    // sum of dy, [out]
};

// y = x W + b. x [rows,in] or [B,S,in], weight [in,out], bias [out] or none, y [rows,out] or [B,S,out]: one float type,
// any strides, one device. Sums are f32 (f64 for f64) and rounded once; a row of y depends only on its own row of x.
void linear(ConstTensorView x, ConstTensorView weight, const std::optional<ConstTensorView>& bias, TensorView y);

// The same with the result allocated.
Tensor linear(ConstTensorView x, ConstTensorView weight, const std::optional<ConstTensorView>& bias = {});

// The gradients of sum(dy * y). A row of dy that is all zero adds nothing to dweight, even if its row of x has NaNs.
void linear_backward(ConstTensorView dy, ConstTensorView x, ConstTensorView weight, const LinearGradients& gradients);

}  // namespace headway
#pragma GCC visibility pop
