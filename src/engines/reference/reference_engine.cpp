// The reference engine: the contract in plain float64 loops. The last engine of the list; it takes every problem.
#include "core/engine.h"
#include "engines/reference/head.h"
#include "engines/reference/passes.h"

namespace headway {
namespace {

class ReferenceEngine final : public EngineBase {
 public:
  Engine id() const override { return Engine::reference; }
  std::optional<std::string> unavailable() const override { return std::nullopt; }

  std::optional<std::string> refusal(const Problem& problem) const override { return refusal_outside_host(problem); }

  void describe(const Problem& problem, Plan& plan) const override {
    plan.kernel = "row by row in float64";
    plan.instruction_set = "portable C++";
    plan.tasks = 1;
    plan.threads = 1;
    plan.scratch_bytes = problem.pass == Pass::backward
                             ? reference::backward_scratch(problem)
                             : static_cast<double>(problem.key_len) * sizeof(reference::Scored) +
                                   static_cast<double>(problem.value_dim) * sizeof(reference::Sum);
  }

  void forward(const ForwardProblem& problem, const Plan&) const override { reference::forward(problem); }
  void backward(const BackwardProblem& problem, const Plan&) const override { reference::backward(problem); }
  void scores(const ScoresProblem& problem, const Plan&) const override { reference::scores(problem); }
};

}  // namespace

const EngineBase& reference_engine() {
  static const ReferenceEngine engine;
  return engine;
}

}  // namespace headway
