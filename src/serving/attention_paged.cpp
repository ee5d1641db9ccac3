// Attention over a block table: build the Problem, choose an engine, run. Engines read pages through their sources of
// rows; everything else is as in attention.
#include "core/engine.h"
#include "core/out_of_memory.h"
#include "core/plan.h"
#include "core/validate.h"
#include "headway/serving.h"

namespace headway {
namespace {

using Packed = std::optional<ConstTensorView>;

Call paged_call(const char* operation, const ConstTensorView& query, const Packed& cu_seqlens_q, const PagedKeys& keys,
                const AttentionOptions& options) {
  return {.operation = operation,
          .query = query,
          .key = keys.key_pages,
          .value = keys.value_pages,
          .cu_seqlens_q = cu_seqlens_q,
          .pages = &keys,
          .options = options};
}

void attend(const ConstTensorView& query, const Packed& cu_seqlens_q, const PagedKeys& keys, const TensorView& out,
            const AttentionOptions& options, const AttentionOutputs& outputs) {
  run(forward_problem(paged_call("attention_paged", query, cu_seqlens_q, keys, options), out, outputs),
      &EngineBase::forward);
}

Tensor attend(const ConstTensorView& query, const Packed& cu_seqlens_q, const PagedKeys& keys,
              const AttentionOptions& options, const AttentionOutputs& outputs) {
  Dims sizes = query.sizes();
  if (sizes.size() > 0 && keys.value_pages.rank() > 0) {
    sizes[sizes.size() - 1] = keys.value_pages.size(-1);
  }
  Tensor out = Tensor::uninitialized(sizes, query.dtype(), query.device(), options.stream);
  attend(query, cu_seqlens_q, keys, out, options, outputs);
  return out;
}

Plan plan_of(const ConstTensorView& query, const Packed& cu_seqlens_q, const PagedKeys& keys,
             const AttentionOptions& options, const ExplainRequest& request) {
  if (request.backward || request.weights) {
    throw InvalidArgument(request.backward ? "explain_paged: keys in pages have no backward"
                                           : "explain_paged: sequences in pages have no weights of one shape");
  }
  Problem problem = inputs_problem(paged_call("explain_paged", query, cu_seqlens_q, keys, options), Pass::forward);
  problem.wants_lse = request.lse;
  Plan plan = choose(problem).plan;
  describe_problem(problem, plan);
  plan.operation = "attention_paged";
  return plan;
}

}  // namespace

void attention_paged(ConstTensorView query, const PagedKeys& keys, TensorView out, const AttentionOptions& options,
                     const AttentionOutputs& outputs) try {
  attend(query, {}, keys, out, options, outputs);
} catch (...) {
  throw_own_error("attention_paged");
}

Tensor attention_paged(ConstTensorView query, const PagedKeys& keys, const AttentionOptions& options,
                       const AttentionOutputs& outputs) try {
  return attend(query, {}, keys, options, outputs);
} catch (...) {
  throw_own_error("attention_paged");
}

void attention_paged(ConstTensorView query, ConstTensorView cu_seqlens_q, const PagedKeys& keys, TensorView out,
                     const AttentionOptions& options, const AttentionOutputs& outputs) try {
  attend(query, cu_seqlens_q, keys, out, options, outputs);
} catch (...) {
  throw_own_error("attention_paged");
}

Tensor attention_paged(ConstTensorView query, ConstTensorView cu_seqlens_q, const PagedKeys& keys,
                       const AttentionOptions& options, const AttentionOutputs& outputs) try {
  return attend(query, cu_seqlens_q, keys, options, outputs);
} catch (...) {
  throw_own_error("attention_paged");
}

Plan explain_paged(ConstTensorView query, const PagedKeys& keys, const AttentionOptions& options,
                   const ExplainRequest& request) try {
  return plan_of(query, {}, keys, options, request);
} catch (...) {
  throw_own_error("explain_paged");
}

Plan explain_paged(ConstTensorView query, ConstTensorView cu_seqlens_q, const PagedKeys& keys,
                   const AttentionOptions& options, const ExplainRequest& request) try {
  return plan_of(query, cu_seqlens_q, keys, options, request);
} catch (...) {
  throw_own_error("explain_paged");
}

}  // namespace headway
