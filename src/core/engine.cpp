// The engine list and the choice from it.
#include "core/engine.h"

#include <algorithm>
#include <array>

#include "core/key_range.h"
#include "core/plan.h"
#include "core/text.h"

namespace headway {

std::span<const EngineBase* const> engine_list() {
  static const std::array<const EngineBase*, 3> list = {&cuda_engine(), &cpu_engine(), &reference_engine()};
  return list;
}

std::optional<std::string> refusal_outside_host(const Problem& problem) {
  if (problem.query.device() == Device{}) {
    return std::nullopt;
  }
  return text("the tensors are on ", problem.query.device(), ", and it reads host memory only");
}

std::vector<Engine> engines() {
  std::vector<Engine> result;
  for (const EngineBase* engine : engine_list()) {
    if (!engine->unavailable()) {
      result.push_back(engine->id());
    }
  }
  return result;
}

Choice choose(const Problem& problem) {
  Choice choice{nullptr, common_plan(problem)};
  for (const EngineBase* engine : engine_list()) {
    if (problem.engine != Engine::automatic && problem.engine != engine->id()) {
      continue;
    }
    std::optional<std::string> reason = engine->unavailable();
    if (!reason) {
      reason = engine->refusal(problem);
    }
    if (!reason) {
      choice.engine = engine;
      choice.plan.engine = engine->id();
      engine->describe(problem, choice.plan);
      return choice;
    }
    choice.plan.passed_over.push_back({engine->id(), *reason});
  }
  std::string reasons;
  for (const Plan::PassedOver& passed : choice.plan.passed_over) {
    reasons += text(reasons.empty() ? "" : "; ", name(passed.engine), ": ", passed.reason);
  }
  const bool any = problem.engine == Engine::automatic;
  throw Unsupported(text(problem.operation,
                         any ? ": no engine can run this (" : ": the requested engine cannot run this (", reasons,
                         ")"));
}

}  // namespace headway
