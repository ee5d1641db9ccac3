// The smallest useful programs: attention over your own memory, what ran, and a layer that learns.
#include <headway/headway.h>

#include <iostream>
#include <vector>

using namespace headway;

// Attention on memory you already have. Here one buffer holds q, k and v side by side, as many models store them.
void attention_on_your_memory() {
  const std::int64_t batch = 2, seq = 16, heads = 4, head_dim = 8;
  std::vector<float> qkv(static_cast<std::size_t>(batch * seq * 3 * heads * head_dim), 0.5f);
  std::vector<float> out(static_cast<std::size_t>(batch * seq * heads * head_dim));

  // [B,S,3,H,D] in memory; attention wants [B,H,S,D]. These are views: no element moves.
  const ConstTensorView packed(qkv, {batch, seq, 3, heads, head_dim});
  const ConstTensorView q = packed.select(2, 0).transpose(1, 2);
  const ConstTensorView k = packed.select(2, 1).transpose(1, 2);
  const ConstTensorView v = packed.select(2, 2).transpose(1, 2);
  const TensorView result = TensorView(out, {batch, seq, heads, head_dim}).transpose(1, 2);

  const AttentionOptions options{.causal = Causal::square, .window = Window{.left = 8}};
  attention(q, k, v, result, options);
  std::cout << "out[0] = " << out[0] << "\n\n" << explain(q, k, v, options) << "\n";
}

// One step of gradient descent towards `target`; returns the mean squared error before it.
double train_step(MultiHeadAttention& layer, Sgd& sgd, const Tensor& x, const Tensor& target) {
  const Tensor y = layer.forward(x, x, x, {.causal = Causal::square});
  const auto count = static_cast<float>(y.elements());
  Tensor dy(y.sizes());
  double loss = 0;
  for (std::int64_t e = 0; e < y.elements(); ++e) {
    const float error = y.as<float>()[e] - target.as<float>()[e];
    loss += error * error / count;
    dy.as<float>()[e] = 2 * error / count;
  }
  sgd.step(layer, layer.backward(dy));
  return loss;
}

int main() {
  attention_on_your_memory();

  MultiHeadAttention layer({.model_dim = 4, .heads = 2, .bias = true, .seed = 1});
  const Tensor x = Tensor::of<float>({1, 3, 4}, {1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0});
  const Tensor target = Tensor::of<float>({1, 3, 4}, {0, 1, 0, 0, 0, 0, 1, 0, 1, 0, 0, 0});
  Sgd sgd({.learning_rate = 0.5});
  const double before = train_step(layer, sgd, x, target);
  double after = before;
  for (int step = 0; step < 300; ++step) {
    after = train_step(layer, sgd, x, target);
  }
  std::cout << "mean squared error: " << before << " before, " << after << " after 300 steps\n";
  return after < before / 10 ? 0 : 1;
}
