#include "examples.h"

using namespace headway;

namespace {

void example_rope() {
  const Tensor x = Tensor::of<double>({2, 2}, {1, 0, 1, 0});
  const Tensor positions = Tensor::of<std::int64_t>({2}, {0, 1});
  const Tensor y = rope(x, positions);
  std::cout << y.at<double>({1, 0}) << ' ' << y.at<double>({1, 1}) << '\n';  // 0.540302 0.841471
}

void example_rope_backward() {
  const Tensor x = Tensor::of<double>({1, 4}, {1, 2, 3, 4}), positions = Tensor::of<std::int64_t>({1}, {7});
  const RopeConfig config{.base = 500.0, .interleaved = true};
  const Tensor back = rope_backward(rope(x, positions, config), positions, config);
  std::cout << (std::abs(back.at<double>({0, 2}) - 3) < 1e-12) << '\n';  // true
}

void example_rope_frequencies() {
  const RopeConfig config{.scaling = RopeScaling::linear, .factor = 2};
  std::cout << rope_frequencies(4, config).frequencies[1] << '\n';  // 0.005
}

}  // namespace

void rope_examples() {
  example_rope();
  example_rope_backward();
  example_rope_frequencies();
}
