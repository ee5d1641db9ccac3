// The CUDA engine: tensors in the memory of an NVIDIA GPU, from compute capability 8.0 on. It takes every problem
// there.
#include <limits>

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
    if (problem.dropout.active() && problem.origin != Origin{}) {
      return "dropout in a part of a split sequence";
    }
    constexpr std::int64_t most = (std::int64_t{1} << 31) - 1;
    if (problem.pages && (problem.key_len > most || problem.key.size(0) > most)) {
      return text("pages with ", problem.key.size(0), " of them and sequences of up to ", problem.key_len,
                  " keys, expected at most ", most);
    }
    constexpr std::int64_t most_keys = std::numeric_limits<std::int32_t>::max();
    if (problem.spans && problem.key_len > most_keys) {
      return text("spans over ", problem.key_len, " keys, expected at most ", most_keys);
    }
    return std::nullopt;
  }

  std::int64_t release_memory() const override { return cuda::release_pools(); }

  // The choice goes with the plan, and is what runs.
  void describe(const Problem& problem, Plan& plan) const override {
    const cuda::DeviceScope scope(problem.query.device().index, problem.operation);
    const cuda::DeviceProperties& properties = cuda::device_properties(problem.query.device().index);
    plan.instruction_set =
        "compute capability " + std::to_string(properties.major) + "." + std::to_string(properties.minor);
    switch (problem.pass) {
      case Pass::forward: return keep(cuda::choose_forward(problem), cuda::describe_forward, problem, plan);
      case Pass::backward: return keep(cuda::choose_backward(problem), cuda::describe_backward, problem, plan);
      case Pass::scores: return keep(cuda::choose_scores(problem), cuda::describe_scores, problem, plan);
    }
  }

  void add_passed_kernels(const Problem& problem, Plan& plan) const override {
    const cuda::DeviceScope scope(problem.query.device().index, problem.operation);
    switch (problem.pass) {
      case Pass::forward: cuda::choose_forward(problem, nullptr, &plan.passed_kernels); break;
      case Pass::backward: cuda::choose_backward(problem, nullptr, &plan.passed_kernels); break;
      case Pass::scores: cuda::choose_scores(problem, &plan.passed_kernels); break;
    }
  }

  void forward(const ForwardProblem& problem, const Plan& plan) const override {
    start(problem, [&] { cuda::forward(problem, kept<cuda::ForwardChoice>(plan)); });
  }
  void backward(const BackwardProblem& problem, const Plan& plan) const override {
    start(problem, [&] { cuda::backward(problem, kept<cuda::BackwardChoice>(plan)); });
  }
  void scores(const ScoresProblem& problem, const Plan& plan) const override {
    start(problem, [&] { cuda::scores(problem, kept<cuda::Launch>(plan)); });
  }

 private:
  template <class Decision>
  static void keep(const Decision& decision, void (*describe)(const Problem&, const Decision&, Plan&),
                   const Problem& problem, Plan& plan) {
    describe(problem, decision, plan);
    plan.decision = std::make_shared<Decision>(decision);
  }
  template <class Decision>
  static const Decision& kept(const Plan& plan) {
    return *static_cast<const Decision*>(plan.decision.get());
  }

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
