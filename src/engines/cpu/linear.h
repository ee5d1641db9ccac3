// The CPU engine's linear map: the packed matrix product on all cores. See core/linear.h for what is computed.
//
// Sums are taken in f32 (f64 for f64), in chains of 64 products (of pairs for bf16 dot products), and rounded once to
// the tensors' type. A row of y and of dx depends only on its own row of x or dy: neither the rest of the batch
// nor the number of threads changes a bit.
#pragma once

#include <optional>

#include "core/linear.h"
#include "headway/tensor.h"

namespace headway::cpu {

void linear(ConstTensorView x, ConstTensorView weight, const std::optional<ConstTensorView>& bias, TensorView y,
            const LinearCall& call = {});
void linear_backward(ConstTensorView dy, ConstTensorView x, ConstTensorView weight, const LinearGradients& gradients,
                     const LinearCall& call = {});

}  // namespace headway::cpu
