// A layer learns to copy each token's left neighbour.
#include <headway/headway.h>

#include <cstdio>
#include <random>

using namespace headway;

int main() {
  const std::int64_t tokens = 8, width = 16;
  MultiHeadAttention layer({.model_dim = width, .heads = 2, .bias = true, .seed = 1});
  Adam adam({.learning_rate = 3e-3});
  std::mt19937 generator(0);
  std::normal_distribution<float> normal;
  Tensor x({1, tokens, width}), dy(x.sizes());
  for (std::int64_t e = 0; e < x.elements(); ++e) x.as<float>()[e] = normal(generator);
  double loss = 0;
  for (int step = 0; step < 500; ++step) {
    const Tensor y = layer.forward(x, x, x);
    loss = 0;
    for (std::int64_t e = 0; e < y.elements(); ++e) {  // of half the squared error
      const float error = y.as<float>()[e] - x.as<float>()[e < width ? e : e - width];
      dy.as<float>()[e] = error;
      loss += 0.5 * error * error / static_cast<double>(y.elements());
    }
    adam.step(layer, layer.backward(dy));
  }
  std::printf("loss after 500 steps: %.4f\n", loss);
  return loss < 0.05 ? 0 : 1;
}
