// The public attention functions: build the Problem, choose an engine, run.
#include "headway/attention.h"

#include "core/engine.h"
#include "core/out_of_memory.h"
#include "core/validate.h"

namespace headway {
void attention(ConstTensorView query, ConstTensorView key, ConstTensorView value, TensorView out,
               const AttentionOptions& options, const AttentionOutputs& outputs) try {
  run(forward_problem({.operation = "attention", .query = query, .key = key, .value = value, .options = options}, out,
                      outputs),
      &EngineBase::forward);
} catch (...) {
  throw_own_error("attention");
}

void attention_backward(ConstTensorView grad_out, ConstTensorView query, ConstTensorView key, ConstTensorView value,
                        ConstTensorView out, ConstTensorView lse, const AttentionGradients& gradients,
                        const AttentionOptions& options) try {
  run(backward_problem(
          {.operation = "attention_backward", .query = query, .key = key, .value = value, .options = options}, grad_out,
          out, lse, gradients),
      &EngineBase::backward);
} catch (...) {
  throw_own_error("attention_backward");
}

void attention_varlen(ConstTensorView query, ConstTensorView key, ConstTensorView value, ConstTensorView cu_seqlens_q,
                      ConstTensorView cu_seqlens_k, TensorView out, const AttentionOptions& options,
                      const AttentionOutputs& outputs) try {
  run(forward_problem({.operation = "attention_varlen",
                       .query = query,
                       .key = key,
                       .value = value,
                       .cu_seqlens_q = cu_seqlens_q,
                       .cu_seqlens_k = cu_seqlens_k,
                       .options = options},
                      out, outputs),
      &EngineBase::forward);
} catch (...) {
  throw_own_error("attention_varlen");
}

void attention_varlen_backward(ConstTensorView grad_out, ConstTensorView query, ConstTensorView key,
                               ConstTensorView value, ConstTensorView out, ConstTensorView lse,
                               ConstTensorView cu_seqlens_q, ConstTensorView cu_seqlens_k,
                               const AttentionGradients& gradients, const AttentionOptions& options) try {
  run(backward_problem({.operation = "attention_varlen_backward",
                        .query = query,
                        .key = key,
                        .value = value,
                        .cu_seqlens_q = cu_seqlens_q,
                        .cu_seqlens_k = cu_seqlens_k,
                        .options = options},
                       grad_out, out, lse, gradients),
      &EngineBase::backward);
} catch (...) {
  throw_own_error("attention_varlen_backward");
}

void attention_scores(ConstTensorView query, ConstTensorView key, TensorView scores, Stage stage,
                      const AttentionOptions& options) try {
  run(scores_problem({.operation = "attention_scores", .query = query, .key = key, .options = options}, scores, stage),
      &EngineBase::scores);
} catch (...) {
  throw_own_error("attention_scores");
}

}  // namespace headway
