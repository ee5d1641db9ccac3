// The state of a layer: its parameters, and what forward keeps for backward.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "headway/layer.h"
#include "layer/parameters.h"

namespace headway {

// The inputs of one call, with the batch axis added if the user left it out.
struct LayerInputs {
  ConstTensorView queries, keys, values;  // [B,Sq,model_dim], [B,Sk,key_dim], [B,Sk,value_dim]
  bool batched = true;                    // whether the user gave B
};

// What the forward pass computes on its way to y.
struct Activations {
  std::vector<Tensor> memory;  // of q, k and v
  TensorView q, k, v;          // [B,Sq,H*hd], [B,Sk,Hkv*hd] twice
  Tensor context;              // attention's output, heads side by side: [B,Sq,H*hd]
};

struct Remembered {
  LayerInputs inputs;
  AttentionOptions options;
  Activations activations;
  Tensor lse;  // [B,H,Sq]
};

struct MultiHeadAttention::State {
  MultiHeadAttentionConfig config;  // resolved
  Device device;                    // of the parameters
  Parameters parameters;
  std::optional<Remembered> remembered;
};

}  // namespace headway
