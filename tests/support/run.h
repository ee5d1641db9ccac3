// The public functions as a test calls them: with tensors in host memory, whatever memory the engine reads. For the
// CUDA engine the tensors are copied to the device and back; 64-bit lengths and spans go there, 32-bit ones stay on
// the host, so that both ways are tested.
#pragma once

#include "headway/analysis.h"
#include "headway/attention.h"
#include "headway/serving.h"

namespace headway::test {

void run_attention(ConstTensorView query, ConstTensorView key, ConstTensorView value, TensorView out,
                   AttentionOptions options = {}, AttentionOutputs outputs = {});
void run_attention_backward(ConstTensorView grad_out, ConstTensorView query, ConstTensorView key, ConstTensorView value,
                            ConstTensorView out, ConstTensorView lse, AttentionGradients gradients,
                            AttentionOptions options = {});
void run_attention_varlen(ConstTensorView query, ConstTensorView key, ConstTensorView value,
                          ConstTensorView cu_seqlens_q, ConstTensorView cu_seqlens_k, TensorView out,
                          AttentionOptions options = {}, AttentionOutputs outputs = {});
void run_attention_varlen_backward(ConstTensorView grad_out, ConstTensorView query, ConstTensorView key,
                                   ConstTensorView value, ConstTensorView out, ConstTensorView lse,
                                   ConstTensorView cu_seqlens_q, ConstTensorView cu_seqlens_k,
                                   AttentionGradients gradients, AttentionOptions options = {});
// With packed queries where cu_seqlens_q is given.
void run_attention_paged(ConstTensorView query, std::optional<ConstTensorView> cu_seqlens_q, PagedKeys keys,
                         TensorView out, AttentionOptions options = {}, AttentionOutputs outputs = {});
void run_attention_scores(ConstTensorView query, ConstTensorView key, TensorView scores, Stage stage = Stage::weights,
                          AttentionOptions options = {});
// Results are in host memory always; a lse of ours goes to the device, as attention leaves it there.
Analysis run_analyze(ConstTensorView query, ConstTensorView key, AttentionOptions options = {},
                     const AnalysisRequest& request = {});
Tensor run_weights_in(ConstTensorView query, ConstTensorView key, const Rectangle& rectangle,
                      AttentionOptions options = {}, std::optional<ConstTensorView> lse = {});
void run_mean_weights(ConstTensorView query, ConstTensorView key, ConstTensorView lse, TensorView mean,
                      AttentionOptions options = {});
TileMap run_tile_map(ConstTensorView query, ConstTensorView key, ConstTensorView lse, std::int64_t batch,
                     std::int64_t head, const Rectangle& rectangle, std::int64_t row_cell, std::int64_t key_cell,
                     AttentionOptions options = {});

}  // namespace headway::test
