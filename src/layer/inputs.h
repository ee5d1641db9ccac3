// Checks what a caller passes to the layer, and adds the batch axis if the caller left it out.
#pragma once

#include <string_view>

#include "headway/layer.h"
#include "layer/state.h"

namespace headway {

// [S,...] as [1,S,...], for callers without a batch.
template <class View>
View with_batch(const View& view, bool batched) {
  return batched ? view : view.unsqueeze(0);
}

// Rank, type, width, lengths and storage of the three inputs. `operation` begins every error text.
LayerInputs checked_inputs(std::string_view operation, const MultiHeadAttention& layer, ConstTensorView queries,
                           ConstTensorView keys, ConstTensorView values);

// The options and outputs as attention expects them for [B,H,S,hd]. Attention checks their contents.
AttentionOptions with_batch(AttentionOptions options, bool batched);
AttentionOutputs checked_outputs(std::string_view operation, const MultiHeadAttention& layer, const LayerInputs& inputs,
                                 const AttentionOutputs& outputs);
void check_option_gradients(const MultiHeadAttention& layer, const LayerInputs& inputs,
                            const OptionGradients& gradients);

// grad_output in the shape and type of y; [B,Sq,model_dim].
ConstTensorView checked_grad_output(const MultiHeadAttention& layer, const LayerInputs& inputs,
                                    ConstTensorView grad_output);

// The caller's shape of a [B,S,width] tensor.
Dims callers_sizes(const LayerInputs& inputs, std::int64_t length, std::int64_t width);

}  // namespace headway
