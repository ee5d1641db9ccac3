#include "support/run.h"

#include <optional>

#include "support/device_mirror.h"

namespace headway::test {
namespace {

// Runs `call` on the views as they are, or on their copies in device memory. Every view may be changed.
class Mirrored {
 public:
  explicit Mirrored(AttentionOptions& options) : elsewhere_(options.engine == Engine::cuda) {
    add(static_cast<std::optional<ConstTensorView>&>(options.mask), options.bias, options.alibi_slopes, options.sinks);
    for (auto* lengths : {&options.valid_lens, &options.query_lens, &options.spans})
      if (*lengths && (*lengths)->dtype() == DType::i64) add(*lengths);
  }

  template <class... Views>
  Mirrored& add(Views&... views) {
    (add_one(views), ...);
    return *this;
  }

  template <class Call>
  void run(const Call& call) {
    if (!elsewhere_) return call();
    mirror_.place();
    call();
    mirror_.collect();
  }

 private:
  template <class View>
  void add_one(View& view) {
    mirror_.add(view);
  }
  template <class View>
  void add_one(std::optional<View>& view) {
    if (view) mirror_.add(*view);
  }

  bool elsewhere_;
  DeviceMirror mirror_;
};

// Shapes are checked against the longest sequence, which is known only where the boundaries can be read.
bool boundaries_may_move(const AttentionOptions& options) {
  return !options.mask && !options.mask.structured && !options.bias &&
         !(options.valid_lens && options.valid_lens->rank() == 2);
}

}  // namespace

void run_attention(ConstTensorView query, ConstTensorView key, ConstTensorView value, TensorView out,
                   AttentionOptions options, AttentionOutputs outputs) {
  Mirrored(options).add(query, key, value, out, outputs.lse, outputs.weights).run([&] {
    attention(query, key, value, out, options, outputs);
  });
}

void run_attention_backward(ConstTensorView grad_out, ConstTensorView query, ConstTensorView key, ConstTensorView value,
                            ConstTensorView out, ConstTensorView lse, AttentionGradients gradients,
                            AttentionOptions options) {
  Mirrored(options)
      .add(grad_out, query, key, value, out, lse, gradients.dq, gradients.dk, gradients.dv, gradients.dbias,
           gradients.dsinks)
      .run([&] { attention_backward(grad_out, query, key, value, out, lse, gradients, options); });
}

void run_attention_varlen(ConstTensorView query, ConstTensorView key, ConstTensorView value,
                          ConstTensorView cu_seqlens_q, ConstTensorView cu_seqlens_k, TensorView out,
                          AttentionOptions options, AttentionOutputs outputs) {
  Mirrored mirrored(options);
  if (boundaries_may_move(options)) mirrored.add(cu_seqlens_q, cu_seqlens_k);
  mirrored.add(query, key, value, out, outputs.lse, outputs.weights).run([&] {
    attention_varlen(query, key, value, cu_seqlens_q, cu_seqlens_k, out, options, outputs);
  });
}

void run_attention_varlen_backward(ConstTensorView grad_out, ConstTensorView query, ConstTensorView key,
                                   ConstTensorView value, ConstTensorView out, ConstTensorView lse,
                                   ConstTensorView cu_seqlens_q, ConstTensorView cu_seqlens_k,
                                   AttentionGradients gradients, AttentionOptions options) {
  Mirrored mirrored(options);
  if (boundaries_may_move(options)) mirrored.add(cu_seqlens_q, cu_seqlens_k);
  mirrored
      .add(grad_out, query, key, value, out, lse, gradients.dq, gradients.dk, gradients.dv, gradients.dbias,
           gradients.dsinks)
      .run([&] {
        attention_varlen_backward(grad_out, query, key, value, out, lse, cu_seqlens_q, cu_seqlens_k, gradients,
                                  options);
      });
}

void run_attention_paged(ConstTensorView query, std::optional<ConstTensorView> cu_seqlens_q, PagedKeys keys,
                         TensorView out, AttentionOptions options, AttentionOutputs outputs) {
  Mirrored mirrored(options);
  for (ConstTensorView* integers : {&keys.block_table, &keys.lengths})
    if (integers->dtype() == DType::i64) mirrored.add(*integers);
  if (cu_seqlens_q && cu_seqlens_q->dtype() == DType::i64) mirrored.add(*cu_seqlens_q);
  mirrored.add(query, keys.key_pages, keys.value_pages, keys.key_scales, keys.value_scales, out, outputs.lse).run([&] {
    if (cu_seqlens_q)
      attention_paged(query, *cu_seqlens_q, keys, out, options, outputs);
    else
      attention_paged(query, keys, out, options, outputs);
  });
}

void run_attention_scores(ConstTensorView query, ConstTensorView key, TensorView scores, Stage stage,
                          AttentionOptions options) {
  Mirrored(options).add(query, key, scores).run([&] { attention_scores(query, key, scores, stage, options); });
}

Analysis run_analyze(ConstTensorView query, ConstTensorView key, AttentionOptions options,
                     const AnalysisRequest& request) {
  Analysis found;
  Mirrored(options).add(query, key).run([&] { found = analyze(query, key, options, request); });
  return found;
}

Tensor run_weights_in(ConstTensorView query, ConstTensorView key, const Rectangle& rectangle, AttentionOptions options,
                      std::optional<ConstTensorView> lse) {
  Tensor found;
  Mirrored(options).add(query, key, lse).run([&] { found = weights_in(query, key, rectangle, options, lse); });
  return found;
}

void run_mean_weights(ConstTensorView query, ConstTensorView key, ConstTensorView lse, TensorView mean,
                      AttentionOptions options) {
  Mirrored(options).add(query, key, lse, mean).run([&] { mean_weights(query, key, lse, mean, options); });
}

TileMap run_tile_map(ConstTensorView query, ConstTensorView key, ConstTensorView lse, std::int64_t batch,
                     std::int64_t head, const Rectangle& rectangle, std::int64_t row_cell, std::int64_t key_cell,
                     AttentionOptions options) {
  TileMap found;
  Mirrored(options).add(query, key).run([&] {  // the lse stays where analyze leaves it
    found = tile_map(query, key, lse, batch, head, rectangle, row_cell, key_cell, options);
  });
  return found;
}

}  // namespace headway::test
