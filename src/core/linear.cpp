// The choice of an engine for linear maps.
#include "core/linear.h"

#include "core/progress.h"
#include "core/text.h"
#include "engines/cpu/linear.h"
#include "engines/cuda/linear.h"
#include "engines/reference/linear.h"

namespace headway {
namespace {

// Progress counts the reference engine's loops as one step, and queued work too.
template <class Run>
void in_one_step(const LinearCall& call, const Run& run) {
  ProgressMeter meter(call.operation, call.progress, 1);
  run();
  meter.advance();
}

// Tensors on a device can be computed by one engine only.
void check_engine(Engine engine, const ConstTensorView& x, const LinearCall& call) {
  if (engine != Engine::automatic && engine != Engine::cuda) {
    throw Unsupported(text(call.operation, ": the requested engine cannot run this (", name(engine),
                           ": the tensors are on ", x.device(), ", and it reads host memory only)"));
  }
}

}  // namespace

void linear(Engine engine, ConstTensorView x, ConstTensorView weight, const std::optional<ConstTensorView>& bias,
            TensorView y, const LinearCall& call) {
  if (x.device() != Device{}) {
    check_engine(engine, x, call);
    in_one_step(call, [&] { cuda::linear(x, weight, bias, y, call); });
  } else if (engine == Engine::reference) {
    in_one_step(call, [&] { reference::linear(x, weight, bias, y); });
  } else {
    cpu::linear(x, weight, bias, y, call);
  }
}

void linear_backward(Engine engine, ConstTensorView dy, ConstTensorView x, ConstTensorView weight,
                     const LinearGradients& gradients, const LinearCall& call) {
  if (x.device() != Device{}) {
    check_engine(engine, x, call);
    in_one_step(call, [&] { cuda::linear_backward(dy, x, weight, gradients, call); });
  } else if (engine == Engine::reference) {
    in_one_step(call, [&] { reference::linear_backward(dy, x, weight, gradients); });
  } else {
    cpu::linear_backward(dy, x, weight, gradients, call);
  }
}

}  // namespace headway
