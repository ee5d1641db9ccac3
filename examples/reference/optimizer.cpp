#include "examples.h"

using namespace headway;

namespace {

void example_Sgd() {
  Tensor x = Tensor::of<double>({1}, {1});
  NamedTensors gradients;
  gradients["x"] = Tensor::of<double>({1}, {2});  // of x^2
  Sgd sgd({.learning_rate = 0.25});
  sgd.step({{"x", x}}, gradients);
  std::cout << x.at<double>({0}) << '\n';  // 0.5
}

void example_Adam() {
  MultiHeadAttention layer({.model_dim = 8, .heads = 2});
  const Tensor x = Tensor::of<float>({1, 1, 8}, {1, 2, 3, 4, 5, 6, 7, 8});
  Adam adam({.learning_rate = 1e-2});
  for (int step = 0; step < 300; ++step) {
    const Tensor y = layer.forward(x, x, x);
    adam.step(layer, layer.backward(y));  // down the sum of y^2 / 2
  }
  std::cout << (std::abs(layer.forward(x, x, x).at<float>({0, 0, 0})) < 0.01f) << '\n';  // true
}

}  // namespace

void optimizer_examples() {
  example_Sgd();
  example_Adam();
}
