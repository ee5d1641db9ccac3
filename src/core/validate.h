// From a user's call to a valid Problem: every check of the contract, once, before anything runs.
#pragma once

#include <optional>
#include <string_view>

#include "core/problem.h"
#include "headway/serving.h"

namespace headway {

// The part that every operation has in common. A call without a value (attention_scores) has none.
struct Call {
  std::string_view operation;
  ConstTensorView query, key;
  std::optional<ConstTensorView> value = {};
  std::optional<ConstTensorView> cu_seqlens_q = {};  // both for packed sequences, or neither
  std::optional<ConstTensorView> cu_seqlens_k = {};
  // Keys in pages: key and value above are the pages, and of packed sequences cu_seqlens_q alone is given.
  const PagedKeys* pages = nullptr;
  const AttentionOptions& options;
};

// A Problem with inputs and options but no outputs: what explain() plans.
Problem inputs_problem(const Call& call, Pass pass);

ForwardProblem forward_problem(const Call& call, TensorView out, const AttentionOutputs& outputs);
BackwardProblem backward_problem(const Call& call, ConstTensorView grad_out, ConstTensorView out, ConstTensorView lse,
                                 const AttentionGradients& gradients);
ScoresProblem scores_problem(const Call& call, TensorView scores, Stage stage);

}  // namespace headway
