// The C++ layer on a GPU, for benchmarks/gpu_layer.py: with the parameters of a torch.nn.MultiheadAttention, over a
// contiguous [B,S,width] tensor that is query, key and value.
#include <headway/headway.h>

#include <exception>
#include <memory>
#include <string>

using namespace headway;

namespace {

constexpr Device gpu{DeviceType::cuda, 0};

struct LayerParameters {
  const void *in_weight, *in_bias;    // [3 width, width], [3 width]
  const void *out_weight, *out_bias;  // [width, width], [width]
  std::int64_t width, heads;
  int dtype;  // a DType
  void* stream;
};

struct LayerCall {
  const void* x;
  const void* grad_out;  // null: forward alone, remembering nothing
  void* y;               // to copy the result to, or null
  std::int64_t batch, length;
  void* stream;
};

std::string last_error;
std::unique_ptr<MultiHeadAttention> layer;

template <class Action>
const char* error_of(const Action& action) {
  try {
    action();
    return nullptr;
  } catch (const std::exception& error) {
    last_error = error.what();
    return last_error.c_str();
  }
}

}  // namespace

// Makes the layer that headway_gpu_layer runs. Null, or what went wrong; so below.
extern "C" const char* headway_gpu_layer_make(const LayerParameters* from) {
  return error_of([&] {
    const auto dtype = static_cast<DType>(from->dtype);
    const std::int64_t width = from->width;
    layer = std::make_unique<MultiHeadAttention>(
        MultiHeadAttentionConfig{.model_dim = width, .heads = from->heads, .bias = true, .dtype = dtype});
    layer->to(gpu, from->stream);
    const ConstTensorView weights(from->in_weight, dtype, {3, width, width}, gpu),
        biases(from->in_bias, dtype, {3, width}, gpu);
    const char* letters[] = {"q", "k", "v"};
    for (int n = 0; n < 3; ++n) {
      copy(weights.select(0, n).transpose(0, 1), layer->parameter(std::string("W_") + letters[n]), from->stream);
      copy(biases.select(0, n), layer->parameter(std::string("b_") + letters[n]), from->stream);
    }
    copy(ConstTensorView(from->out_weight, dtype, {width, width}, gpu).transpose(0, 1), layer->parameter("W_o"),
         from->stream);
    copy(ConstTensorView(from->out_bias, dtype, {width}, gpu), layer->parameter("b_o"), from->stream);
  });
}

// Inference, or forward and backward.
extern "C" const char* headway_gpu_layer(const LayerCall* call) {
  return error_of([&] {
    const Dims sizes{call->batch, call->length, layer->config().model_dim};
    const DType dtype = layer->config().dtype;
    const ConstTensorView x(call->x, dtype, sizes, gpu);
    const AttentionOptions options{.stream = call->stream};
    Tensor y = call->grad_out == nullptr ? layer->infer(x, x, x, options) : layer->forward(x, x, x, options);
    if (call->grad_out != nullptr) {
      layer->backward(ConstTensorView(call->grad_out, dtype, sizes, gpu));
    }
    if (call->y != nullptr) {
      copy(y, TensorView(call->y, dtype, sizes, gpu), call->stream);
    }
  });
}
