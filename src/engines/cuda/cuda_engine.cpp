// The CUDA engine: tensors in the memory of an NVIDIA GPU, from compute capability 8.0 on. It takes every problem
// there.
#include "core/engine.h"
#include "core/text.h"
#include "engines/cuda/backward.h"
#include "engines/cuda/device.h"
#include "engines/cuda/forward.h"
#include "engines/cuda/scores.h"

namespace headway {
namespace {

class CudaEngine final : public EngineBase {
 public:
  Engine id() const override { return Engine::cuda; }

  std::optional<std::string> unavailable() const override {
    if (cuda::device_count() == 0) {
      return "there is no CUDA device, or no driver for one";
    }
    return std::nullopt;
  }

  std::optional<std::string> refusal(const Problem& problem) const override {
    const Device device = problem.query.device();
    if (device.type != DeviceType::cuda) {
      return text("the tensors are on ", device, ", and it reads CUDA memory only");
    }
    if (device.index < 0 || device.index >= cuda::device_count()) {
      return text("there is no ", device, ": CUDA has ", cuda::device_count(), " here");
    }
    const cuda::DeviceProperties& properties = cuda::device_properties(device.index);
    if (properties.major < 8) {
      return text(device, " has compute capability ", properties.major, ".", properties.minor,
                  ", expected 8.0 or later");
    }
    if (problem.spans) {
      return "spans are not on the cuda engine yet";
    }
    return std::nullopt;
  }

  void describe(const Problem& problem, Plan& plan) const override {
    const Device device = problem.query.device();
    const cuda::DeviceProperties& properties = cuda::device_properties(device.index);
    plan.instruction_set = text("compute capability ", properties.major, ".", properties.minor);
    const cuda::DeviceScope scope(device.index, problem.operation);
    switch (problem.pass) {
      case Pass::forward: return cuda::describe_forward(problem, plan);
      case Pass::backward: return cuda::describe_backward(problem, plan);
      case Pass::scores: return cuda::describe_scores(problem, plan);
    }
  }

  void forward(const ForwardProblem& problem, const Plan&) const override {
    start(problem, [&] { cuda::forward(problem); });
  }
  void backward(const BackwardProblem& problem, const Plan&) const override {
    start(problem, [&] { cuda::backward(problem); });
  }
  void scores(const ScoresProblem& problem, const Plan&) const override {
    start(problem, [&] { cuda::scores(problem); });
  }

 private:
  // Queued work reports no progress; a caller may still stop it before it begins.
  template <class Run>
  static void start(const Problem& problem, const Run& run) {
    if (problem.progress && !problem.progress(0.0)) {
      throw Cancelled(text(problem.operation, ": cancelled by the caller before the work was queued"));
    }
    const cuda::DeviceScope scope(problem.query.device().index, problem.operation);
    run();
  }
};

}  // namespace

const EngineBase& cuda_engine() {
  static const CudaEngine engine;
  return engine;
}

}  // namespace headway
