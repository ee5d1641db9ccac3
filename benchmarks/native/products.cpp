// The matrix product of the layer's projections.
#include "core/linear.h"
#include "native.h"

using namespace headway;

extern "C" int headway_product(const float* x, const float* weight, float* y, std::int64_t rows, std::int64_t inputs,
                               std::int64_t outputs) {
  linear(Engine::automatic, ConstTensorView(x, {1, rows, inputs}), ConstTensorView(weight, {inputs, outputs}), {},
         TensorView(y, {1, rows, outputs}));
  return 1;
}
