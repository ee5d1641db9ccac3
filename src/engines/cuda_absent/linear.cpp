// Linear maps on a device in a build without the CUDA engine.
#include "engines/cuda/linear.h"

#include "core/text.h"

namespace headway::cuda {
namespace {

[[noreturn]] void refuse(const ConstTensorView& x, const LinearCall& call) {
  throw Unsupported(text(call.operation, ": the tensors are on ", x.device(),
                         ", and the CUDA engine is not built into this library"));
}

}  // namespace

void linear(ConstTensorView x, ConstTensorView, const std::optional<ConstTensorView>&, TensorView,
            const LinearCall& call) {
  refuse(x, call);
}

void linear_backward(ConstTensorView, ConstTensorView x, ConstTensorView, const LinearGradients&,
                     const LinearCall& call) {
  refuse(x, call);
}

}  // namespace headway::cuda
