// The CPU engine: SIMD kernels on all cores.
#include "core/engine.h"
#include "engines/cpu/backward.h"
#include "engines/cpu/forward.h"
#include "engines/cpu/kernels.h"
#include "engines/cpu/scratch.h"

namespace headway {
namespace {

class CpuEngine final : public EngineBase {
 public:
  Engine id() const override { return Engine::cpu; }
  std::optional<std::string> unavailable() const override { return std::nullopt; }

  std::optional<std::string> refusal(const Problem& problem) const override { return refusal_outside_host(problem); }

  void describe(const Problem& problem, Plan& plan) const override {
    plan.instruction_set = cpu::chosen_kernels().name;
    problem.pass == Pass::backward ? cpu::describe_backward(problem, plan) : cpu::describe_forward(problem, plan);
  }

  void forward(const ForwardProblem& problem, const Plan& plan) const override { cpu::forward(problem, plan); }
  void backward(const BackwardProblem& problem, const Plan& plan) const override { cpu::backward(problem, plan); }
  void scores(const ScoresProblem& problem, const Plan& plan) const override { cpu::scores(problem, plan); }
  std::int64_t release_memory() const override { return cpu::KeptMemory::release(); }
};

}  // namespace

const EngineBase& cpu_engine() {
  static const CpuEngine engine;
  return engine;
}

}  // namespace headway
