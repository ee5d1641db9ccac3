// The public attention functions: build the Problem, choose an engine, run.
#include "headway/attention.h"

#include "core/engine.h"
#include "core/out_of_memory.h"
#include "core/text.h"
#include "core/validate.h"

namespace headway {
namespace {

// Memory for a result: the query's shape with the values' width.
Tensor memory_for_out(const ConstTensorView& query, const ConstTensorView& value, const AttentionOptions& options) {
  Dims sizes = query.sizes();
  if (sizes.size() > 0 && value.rank() > 0) {
    sizes[sizes.size() - 1] = value.size(-1);
  }
  return Tensor::uninitialized(sizes, query.dtype(), query.device(), options.stream);
}

}  // namespace

void attention(ConstTensorView query, ConstTensorView key, ConstTensorView value, TensorView out,
               const AttentionOptions& options, const AttentionOutputs& outputs) try {
  run(forward_problem({.operation = "attention", .query = query, .key = key, .value = value, .options = options}, out,
                      outputs),
      &EngineBase::forward);
} catch (...) {
  throw_own_error("attention");
}

Tensor attention(ConstTensorView query, ConstTensorView key, ConstTensorView value, const AttentionOptions& options,
                 const AttentionOutputs& outputs) try {
  Tensor out = memory_for_out(query, value, options);
  attention(query, key, value, out, options, outputs);
  return out;
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

Tensor attention_varlen(ConstTensorView query, ConstTensorView key, ConstTensorView value, ConstTensorView cu_seqlens_q,
                        ConstTensorView cu_seqlens_k, const AttentionOptions& options,
                        const AttentionOutputs& outputs) try {
  Tensor out = memory_for_out(query, value, options);
  attention_varlen(query, key, value, cu_seqlens_q, cu_seqlens_k, out, options, outputs);
  return out;
} catch (...) {
  throw_own_error("attention_varlen");
}

Tensor cu_seqlens(std::span<const std::int64_t> lengths) try {
  Tensor result({static_cast<std::int64_t>(lengths.size()) + 1}, DType::i64);
  auto* ends = result.as<std::int64_t>();
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    if (lengths[i] < 0 || __builtin_add_overflow(ends[i], lengths[i], &ends[i + 1])) {
      throw InvalidArgument(
          text("cu_seqlens: expected lengths of 0 or more whose sum is below 2^63, found ", lengths[i], " at ", i));
    }
  }
  return result;
} catch (...) {
  throw_own_error("cu_seqlens");
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
