// The choice of an engine for linear maps.
#include "core/linear.h"

#include "engines/cpu/linear.h"
#include "engines/reference/linear.h"

namespace headway {

void linear(Engine engine, ConstTensorView x, ConstTensorView weight, const std::optional<ConstTensorView>& bias,
            TensorView y) {
  engine == Engine::reference ? reference::linear(x, weight, bias, y) : cpu::linear(x, weight, bias, y);
}

void linear_backward(Engine engine, ConstTensorView dy, ConstTensorView x, ConstTensorView weight,
                     const LinearGradients& gradients) {
  engine == Engine::reference ? reference::linear_backward(dy, x, weight, gradients)
                              : cpu::linear_backward(dy, x, weight, gradients);
}

}  // namespace headway
