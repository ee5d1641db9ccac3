// Gradient descent: the textbook's numbers, every type, and errors before anything changes.
#include "headway/optimizer.h"

#include "layer_support.h"

namespace headway::test {
namespace {

// The parameter after some steps down x^2, whose gradient is 2 x.
template <class Optimizer>
double down_a_square(Optimizer optimizer, int steps, DType dtype = DType::f64) {
  Tensor x = convert(Tensor::of<double>({1}, {1.0}), dtype);
  for (int step = 0; step < steps; ++step) {
    NamedTensors gradients;
    gradients["x"] = convert(Tensor::of<double>({1}, {2 * numbers(x)[0]}), dtype);
    optimizer.step({{"x", x}}, gradients);
  }
  return numbers(x)[0];
}

TEST(Optimizers, step_as_their_definitions_say) {
  EXPECT_DOUBLE_EQ(down_a_square(Sgd({.learning_rate = 0.1}), 2), 0.8 * 0.8);
  EXPECT_DOUBLE_EQ(down_a_square(Sgd({.learning_rate = 0.1, .weight_decay = 1}), 1), 1 - 0.1 * 3);
  // The second step goes along 0.5 * 2 + 1.6.
  EXPECT_DOUBLE_EQ(down_a_square(Sgd({.learning_rate = 0.1, .momentum = 0.5}), 2), 0.8 - 0.1 * 2.6);
  // Adam's first step has the length of its rate, whatever the gradient is.
  EXPECT_NEAR(down_a_square(Adam({.learning_rate = 0.1}), 1), 0.9, 1e-8);
  EXPECT_NEAR(down_a_square(Adam({.learning_rate = 0.1, .weight_decay = 0.5}), 1), 0.9 - 0.05, 1e-8);
  EXPECT_NEAR(down_a_square(Adam({.learning_rate = 0.05}), 500), 0, 1e-3);
}

TEST(Optimizers, take_every_float_type) {
  for (const DType dtype : float_types) {
    EXPECT_NEAR(down_a_square(Sgd({.learning_rate = 0.25}), 1, dtype), 0.5, 1e-12) << dtype;
    EXPECT_NEAR(down_a_square(Adam({.learning_rate = 0.5}), 1, dtype), 0.5, 1e-2) << dtype;
  }
}

TEST(Optimizers, train_a_layer_whose_parameters_may_be_columns_of_one_matrix) {
  MultiHeadAttention layer({.model_dim = 8, .heads = 2, .bias = true, .seed = 2});
  const Tensor x = random_tensor({1, 5, 8}, DType::f32, 1);
  Adam adam({.learning_rate = 1e-2});
  double first = 0, last = 0;
  for (int step = 0; step < 200; ++step) {
    const Tensor y = layer.forward(x, x, x);
    last = 0;
    for (const double value : numbers(y)) last += value * value;
    first = step == 0 ? last : first;
    adam.step(layer, layer.backward(y));
  }
  EXPECT_LT(last, 0.01 * first);
}

TEST(Optimizers, refuse_what_does_not_fit_before_anything_changes) {
  Tensor a = Tensor::of<float>({2}, {1, 2}), b = Tensor::of<float>({1}, {3});
  NamedTensors gradients;
  gradients["a"] = Tensor::of<float>({2}, {1, 1});
  Sgd sgd;
  EXPECT_THROW(sgd.step({{"a", a}, {"b", b}}, gradients), InvalidArgument);
  gradients["b"] = Tensor::of<float>({2}, {1, 1});
  EXPECT_THROW(sgd.step({{"a", a}, {"b", b}}, gradients), InvalidArgument);
  gradients["b"] = Tensor::of<double>({1}, {1});
  EXPECT_THROW(Adam().step({{"a", a}, {"b", b}}, gradients), TypeMismatch);
  EXPECT_EQ(numbers(a), (std::vector<double>{1, 2}));
  EXPECT_THROW(Sgd({.learning_rate = -1}), InvalidArgument);
  EXPECT_THROW(Sgd({.momentum = 1}), InvalidArgument);
  EXPECT_THROW(Adam({.beta2 = std::numeric_limits<double>::quiet_NaN()}), InvalidArgument);
}

}  // namespace
}  // namespace headway::test
