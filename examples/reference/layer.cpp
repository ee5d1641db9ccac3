#include "examples.h"

using namespace headway;

namespace {

void example_Initializer() { std::cout << name(Initializer::torch_linear) << '\n'; }  // torch_linear

void example_MultiHeadAttention() {
  MultiHeadAttention layer({.model_dim = 64, .heads = 8, .kv_heads = 2, .bias = true, .seed = 1});
  std::cout << layer.config().head_dim << ' ' << layer.device() << '\n';  // 8 cpu
  for (const auto& [name, parameter] : layer.parameters()) {
    std::cout << name << parameter.sizes() << ' ';
  }
  std::cout << '\n';  // W_q(64, 64) W_k(64, 16) W_v(64, 16) W_o(64, 64) b_q(64,) b_k(16,) b_v(16,) b_o(64,)

  const Tensor x({2, 10, 64});
  const Tensor y = layer.forward(x, x, x, {.causal = Causal::square});
  const Gradients gradients = layer.backward(y);  // as if y were the gradient of a loss
  std::cout << gradients.queries.sizes() << ' ' << gradients.parameters.at("W_k").sizes()
            << '\n';  // (2, 10, 64) (64, 16)

  // One step of gradient descent on one parameter, in place.
  const TensorView weight = layer.parameter("W_k");
  for (std::int64_t e = 0; e < weight.elements(); ++e) {
    weight.as<float>()[e] -= 0.1f * gradients.parameters.at("W_k").as<float>()[e];
  }

  // For inference: const, remembers nothing, several threads may call it at once.
  const Tensor memory({2, 30, 64});
  std::cout << layer.infer(x, memory, memory).sizes() << '\n';  // (2, 10, 64)

  layer.save("layer.safetensors", true);
  std::cout << MultiHeadAttention::load("layer.safetensors").config().kv_heads << '\n';  // 2
  layer.to(Device{});                                                                    // or {DeviceType::cuda, 0}
}

void example_OptionGradients() {
  MultiHeadAttention layer({.model_dim = 16, .heads = 2});
  const Tensor x({1, 5, 16}), bias({2, 5, 5});  // one bias for each head, which a model may learn
  const Tensor y = layer.forward(x, x, x, {.bias = bias});
  Tensor dbias({2, 5, 5});
  layer.backward(y, {.bias = dbias});
  std::cout << dbias.sizes() << '\n';  // (2, 5, 5)
}

}  // namespace

void layer_examples() {
  example_Initializer();
  example_MultiHeadAttention();
  example_OptionGradients();
}
