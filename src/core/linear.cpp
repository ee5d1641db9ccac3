// The choice of an engine for linear maps.
#include "core/linear.h"

#include "core/progress.h"
#include "engines/cpu/linear.h"
#include "engines/reference/linear.h"

namespace headway {
namespace {

// The reference engine's loops are one step.
template <class Run>
void in_one_step(const LinearReports& reports, const Run& run) {
  ProgressMeter meter(reports.operation, reports.progress, 1);
  run();
  meter.advance();
}

}  // namespace

void linear(Engine engine, ConstTensorView x, ConstTensorView weight, const std::optional<ConstTensorView>& bias,
            TensorView y, const LinearReports& reports) {
  if (engine == Engine::reference) {
    in_one_step(reports, [&] { reference::linear(x, weight, bias, y); });
  } else {
    cpu::linear(x, weight, bias, y, reports);
  }
}

void linear_backward(Engine engine, ConstTensorView dy, ConstTensorView x, ConstTensorView weight,
                     const LinearGradients& gradients, const LinearReports& reports) {
  if (engine == Engine::reference) {
    in_one_step(reports, [&] { reference::linear_backward(dy, x, weight, gradients); });
  } else {
    cpu::linear_backward(dy, x, weight, gradients, reports);
  }
}

}  // namespace headway
