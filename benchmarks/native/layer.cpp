// The layer of the C++ library, for a program in another language.
#include <headway/headway.h>

#include <optional>

#include "native.h"

using namespace headway;

extern "C" void* headway_layer_make(std::int64_t model_dim, std::int64_t heads) {
  return new MultiHeadAttention({.model_dim = model_dim, .heads = heads, .bias = true});
}

extern "C" void headway_layer_free(void* layer) { delete static_cast<MultiHeadAttention*>(layer); }

extern "C" void headway_layer_infer(void* layer, const float* x, std::int64_t batch, std::int64_t length,
                                    float* weights) {
  const auto& attention = *static_cast<const MultiHeadAttention*>(layer);
  const ConstTensorView input(x, {batch, length, attention.config().model_dim});
  AttentionOutputs outputs;
  if (weights) outputs.weights = TensorView(weights, {batch, attention.config().heads, length, length});
  attention.infer(input, input, input, {}, outputs);
}

extern "C" void headway_native_threads(int threads) { set_threads(threads); }
