// What an engine is, the ordered list of them, and how one is chosen.
#pragma once

#include <new>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>

#include "core/problem.h"
#include "core/text.h"
#include "headway/plan.h"

namespace headway {

class EngineBase {
 public:
  EngineBase() = default;
  EngineBase(const EngineBase&) = delete;
  EngineBase& operator=(const EngineBase&) = delete;

  virtual Engine id() const = 0;

  // Why this build or machine cannot use the engine at all; nothing when it can.
  virtual std::optional<std::string> unavailable() const = 0;

  // Why the engine does not take this problem; nothing when it does.
  virtual std::optional<std::string> refusal(const Problem& problem) const = 0;

  // Fills in what the engine decides: kernel, instruction set, tiles, tasks, threads, scratch.
  virtual void describe(const Problem& problem, Plan& plan) const = 0;

  // For explain(): adds the kernels that come before the chosen one, and why they do not run the problem.
  virtual void add_passed_kernels(const Problem&, Plan&) const {}

  // A valid problem that was not refused; only resources can fail.
  virtual void forward(const ForwardProblem& problem, const Plan& plan) const = 0;
  virtual void backward(const BackwardProblem& problem, const Plan& plan) const = 0;
  virtual void scores(const ScoresProblem& problem, const Plan& plan) const = 0;

  // Frees the memory that the engine keeps between calls; returns its bytes.
  virtual std::int64_t release_memory() const { return 0; }

 protected:
  ~EngineBase() = default;
};

// The refusal of an engine that reads host memory only: nothing when the problem lies there.
std::optional<std::string> refusal_outside_host(const Problem& problem);

// Each engine's folder defines one of these; for an engine that is not built, the folder that replaces it does.
const EngineBase& reference_engine();
const EngineBase& cpu_engine();
const EngineBase& cuda_engine();

// The fastest first, the reference last.
std::span<const EngineBase* const> engine_list();

// The engine that will run a problem. Throws Unsupported, with the reason, when the one asked for by name cannot.
struct Choice {
  const EngineBase* engine;
  Plan plan;
};
Choice choose(const Problem& problem);

// Runs the pass on the chosen engine. If its scratch cannot be allocated, throws OutOfMemory.
template <class SomeProblem>
void run(const SomeProblem& problem, const Choice& choice,
         void (EngineBase::*pass)(const SomeProblem&, const Plan&) const) {
  const auto refuse = [&] {
    throw OutOfMemory(text(problem.operation, ": could not allocate ", choice.plan.scratch_bytes, " bytes of scratch"));
  };
  try {
    (choice.engine->*pass)(problem, choice.plan);
  } catch (const std::bad_alloc&) {
    refuse();
  } catch (const std::length_error&) {
    refuse();
  }
}

// A plan for another pass than the one that runs would have the wrong tiles and too little scratch.
template <class SomeProblem>
void run(const SomeProblem& problem, void (EngineBase::*pass)(const SomeProblem&, const Plan&) const) {
  if (problem.pass != SomeProblem::own_pass) {
    throw std::logic_error(text(problem.operation, ": a problem of another pass"));
  }
  run(problem, choose(problem), pass);
}

}  // namespace headway
