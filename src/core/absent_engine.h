// Stands in the engine list for an engine that this build does not have.
#pragma once

#include <cstdlib>

#include "core/engine.h"

namespace headway {

class AbsentEngine final : public EngineBase {
 public:
  AbsentEngine(Engine id, const char* reason) : id_(id), reason_(reason) {}

  Engine id() const override { return id_; }
  std::optional<std::string> unavailable() const override { return reason_; }
  std::optional<std::string> refusal(const Problem&) const override { return reason_; }
  void describe(const Problem&, Plan&) const override {}
  void forward(const ForwardProblem&, const Plan&) const override { refuse(); }
  void backward(const BackwardProblem&, const Plan&) const override { refuse(); }
  void scores(const ScoresProblem&, const Plan&) const override { refuse(); }

 private:
  void refuse() const { throw Unsupported(reason_); }

  Engine id_;
  const char* reason_;
};

}  // namespace headway
