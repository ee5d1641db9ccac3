#include "examples.h"

using namespace headway;

namespace {

void example_linear() {
  const Tensor x = Tensor::of<float>({2, 2}, {1, 2, 3, 4}), weight = Tensor::of<float>({2, 1}, {10, 1});
  const Tensor bias = Tensor::of<float>({1}, {100});
  const Tensor y = linear(x, weight, bias);
  std::cout << y.at<float>({0, 0}) << ' ' << y.at<float>({1, 0}) << '\n';  // 112 134
}

void example_linear_backward() {
  const Tensor x = Tensor::of<float>({2, 2}, {1, 2, 3, 4}), weight = Tensor::of<float>({2, 1}, {10, 1});
  const Tensor dy = Tensor::of<float>({2, 1}, {1, 1});  // of the sum of y
  Tensor dx({2, 2}), dweight({2, 1});
  linear_backward(dy, x, weight, {.dx = dx, .dweight = dweight});
  std::cout << dx.at<float>({0, 0}) << ' ' << dweight.at<float>({0, 0}) << '\n';  // 10 4
}

}  // namespace

void linear_examples() {
  example_linear();
  example_linear_backward();
}
