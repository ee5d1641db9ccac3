// The layer's own checks; attention checks the options.
#include "layer/inputs.h"

#include <cstdint>

#include "core/overlap.h"
#include "core/text.h"

namespace headway {
namespace {

template <class... Parts>
[[noreturn]] void refuse(std::string_view operation, const Parts&... parts) {
  throw InvalidArgument(text(operation, ": ", parts...));
}

// Type, device and alignment: what reading an element relies on.
void check_storage(std::string_view operation, const char* name, ConstTensorView view,
                   const MultiHeadAttention& layer) {
  const DType dtype = layer.config().dtype;
  if (view.dtype() != dtype) {
    throw TypeMismatch(
        text(operation, ": ", name, " has type ", view.dtype(), ", the layer's parameters have ", dtype));
  }
  if (view.device() != layer.device()) {
    refuse(operation, name, " is on ", view.device(), ", the layer's parameters are on ", layer.device());
  }
  if (reinterpret_cast<std::uintptr_t>(view.data()) % size_of(dtype) != 0) {
    refuse(operation, name, " must be aligned to its element's ", size_of(dtype), " bytes, found address ",
           view.data());
  }
}

void check_width(std::string_view operation, const char* name, ConstTensorView view, const char* field,
                 std::int64_t width) {
  if (view.sizes().back() != width) {
    refuse(operation, name, " has shape ", view.sizes(), ", expected the last axis to be ", field, " ", width);
  }
}

void check_ranks(std::string_view operation, ConstTensorView queries, ConstTensorView keys, ConstTensorView values) {
  const int rank = queries.rank();
  if (rank != 2 && rank != 3) {
    refuse(operation, "queries must have 3 axes [batch, length, model_dim], or 2 without batch, found shape ",
           queries.sizes());
  }
  if (keys.rank() != rank) {
    refuse(operation, "keys has shape ", keys.sizes(), ", queries has ", queries.sizes(), ": expected as many axes");
  }
  if (values.rank() != rank) {
    refuse(operation, "values has shape ", values.sizes(), ", queries has ", queries.sizes(),
           ": expected as many axes");
  }
}

void check_lengths(std::string_view operation, const LayerInputs& inputs) {
  const auto& [queries, keys, values, batched] = inputs;
  if (keys.size(0) != queries.size(0)) {
    refuse(operation, "keys has batch ", keys.size(0), ", queries has ", queries.size(0));
  }
  if (values.size(0) != queries.size(0)) {
    refuse(operation, "values has batch ", values.size(0), ", queries has ", queries.size(0));
  }
  if (values.size(1) != keys.size(1)) {
    refuse(operation, "values has length ", values.size(1), ", keys has ", keys.size(1));
  }
}

void check_sizes(std::string_view operation, const char* name, ConstTensorView view, const Dims& expected) {
  if (view.sizes() != expected) {
    refuse(operation, name, " has shape ", view.sizes(), ", expected ", expected);
  }
}

// Attention sees only the projections, so that no output overlaps the layer's inputs or parameters is checked here.
void check_disjoint(std::string_view operation, const char* name, const std::optional<TensorView>& output,
                    const MultiHeadAttention& layer, const LayerInputs& inputs) {
  if (!output) {
    return;
  }
  const auto check = [&](const std::string& other_name, ConstTensorView other) {
    if (share_memory(*output, other)) {
      refuse(operation, name, " overlaps ", other_name, " in memory");
    }
  };
  check("queries", inputs.queries);
  check("keys", inputs.keys);
  check("values", inputs.values);
  for (const auto& [parameter_name, parameter] : layer.parameters()) {
    check(parameter_name, parameter);
  }
}

// `sizes` without its batch axis if the caller's tensors have none.
Dims callers(const LayerInputs& inputs, const Dims& sizes) {
  return inputs.batched ? sizes : Dims(std::span(sizes.begin() + 1, sizes.end()));
}

}  // namespace

LayerInputs checked_inputs(std::string_view operation, const MultiHeadAttention& layer, ConstTensorView queries,
                           ConstTensorView keys, ConstTensorView values) {
  const MultiHeadAttentionConfig& config = layer.config();
  check_storage(operation, "queries", queries, layer);
  check_storage(operation, "keys", keys, layer);
  check_storage(operation, "values", values, layer);
  check_ranks(operation, queries, keys, values);
  check_width(operation, "queries", queries, "model_dim", config.model_dim);
  check_width(operation, "keys", keys, "key_dim", config.key_dim);
  check_width(operation, "values", values, "value_dim", config.value_dim);
  const bool batched = queries.rank() == 3;
  const LayerInputs inputs{with_batch(queries, batched), with_batch(keys, batched), with_batch(values, batched),
                           batched};
  check_lengths(operation, inputs);
  return inputs;
}

AttentionOptions with_batch(AttentionOptions options, bool batched) {
  // [Sq] or a single number; [1] has its batch axis already.
  if (!batched && options.valid_lens && options.valid_lens->rank() < 2 && options.valid_lens->sizes() != Dims{1}) {
    options.valid_lens = options.valid_lens->unsqueeze(0);
  }
  return options;
}

AttentionOutputs checked_outputs(std::string_view operation, const MultiHeadAttention& layer, const LayerInputs& inputs,
                                 const AttentionOutputs& outputs) {
  const std::int64_t batch = inputs.queries.size(0), heads = layer.config().heads;
  const std::int64_t query_len = inputs.queries.size(1), key_len = inputs.keys.size(1);
  AttentionOutputs asked;
  if (outputs.lse) {
    check_sizes(operation, "lse", *outputs.lse, callers(inputs, {batch, heads, query_len}));
    asked.lse = with_batch(*outputs.lse, inputs.batched);
  }
  if (outputs.weights) {
    check_sizes(operation, "weights", *outputs.weights, callers(inputs, {batch, heads, query_len, key_len}));
    asked.weights = with_batch(*outputs.weights, inputs.batched);
  }
  check_disjoint(operation, "lse", asked.lse, layer, inputs);
  check_disjoint(operation, "weights", asked.weights, layer, inputs);
  return asked;
}

void check_option_gradients(const MultiHeadAttention& layer, const LayerInputs& inputs,
                            const OptionGradients& gradients) {
  check_disjoint("MultiHeadAttention::backward", "the bias gradient", gradients.bias, layer, inputs);
  check_disjoint("MultiHeadAttention::backward", "the sinks gradient", gradients.sinks, layer, inputs);
}

ConstTensorView checked_grad_output(const MultiHeadAttention& layer, const LayerInputs& inputs,
                                    ConstTensorView grad_output) {
  constexpr std::string_view operation = "MultiHeadAttention::backward";
  check_storage(operation, "grad_output", grad_output, layer);
  check_sizes(operation, "grad_output", grad_output,
              callers_sizes(inputs, inputs.queries.size(1), layer.config().model_dim));
  return with_batch(grad_output, inputs.batched);
}

Dims callers_sizes(const LayerInputs& inputs, std::int64_t length, std::int64_t width) {
  return callers(inputs, {inputs.queries.size(0), length, width});
}

}  // namespace headway
