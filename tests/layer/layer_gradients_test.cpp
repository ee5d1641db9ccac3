// Every gradient of the layer, against finite differences of its output and across element types.
#include "layer_support.h"

namespace headway::test {
namespace {

// sum(dy * y): backward returns its gradient.
double objective(const MultiHeadAttention& layer, const Inputs& in, const AttentionOptions& options, const Tensor& dy) {
  const std::vector<double> y = numbers(layer.infer(in.queries, in.keys, in.values, options));
  const std::vector<double> weights = numbers(dy);
  double sum = 0;
  for (std::size_t i = 0; i < y.size(); ++i) {
    sum += y[i] * weights[i];
  }
  return sum;
}

// The central difference of evaluate() in each element of `variable`.
template <class Evaluate>
std::vector<double> finite_differences(TensorView variable, const Evaluate& evaluate) {
  constexpr double step = 1e-5;
  std::vector<double> result;
  for (std::int64_t e = 0; e < variable.elements(); ++e) {
    double& element = variable.as<double>()[e];
    const double before = element;
    element = before + step;
    const double above = evaluate();
    element = before - step;
    const double below = evaluate();
    element = before;
    result.push_back((above - below) / (2 * step));
  }
  return result;
}

void expect_true_gradients(const std::string& what, const MultiHeadAttentionConfig& config,
                           const AttentionOptions& options, std::int64_t query_len = 3, std::int64_t key_len = 4) {
  SCOPED_TRACE(what);
  MultiHeadAttention layer = random_layer(config);
  Inputs in = random_inputs(layer.config(), 2, query_len, key_len);
  const Tensor dy = random_tensor({2, query_len, config.model_dim}, DType::f64, 50);
  layer.forward(in.queries, in.keys, in.values, options);
  const Gradients gradients = layer.backward(dy);

  const auto evaluate = [&] { return objective(layer, in, options, dy); };
  constexpr double tolerance = 1e-8;
  expect_close(numbers(gradients.queries), finite_differences(in.queries, evaluate), tolerance, "queries");
  expect_close(numbers(gradients.keys), finite_differences(in.keys, evaluate), tolerance, "keys");
  expect_close(numbers(gradients.values), finite_differences(in.values, evaluate), tolerance, "values");
  EXPECT_EQ(gradients.parameters.size(), layer.parameters().size());
  for (auto& [name, view] : layer.parameters()) {
    ASSERT_TRUE(gradients.parameters.contains(name)) << name;
    EXPECT_EQ(gradients.parameters.at(name).sizes(), view.sizes()) << name;
    expect_close(numbers(gradients.parameters.at(name)), finite_differences(view, evaluate), tolerance, name);
  }
}

TEST(LayerGradients, match_finite_differences_for_every_shape) {
  for (const auto& [name, config] : config_zoo(DType::f64)) {
    expect_true_gradients(name, config, {});
  }
}

TEST(LayerGradients, match_finite_differences_under_masks_and_dropout) {
  const Tensor lens = Tensor::of<std::int64_t>({2}, {3, 1});
  const Tensor row_lens = Tensor::of<std::int64_t>({2, 3}, {1, 0, 4, 2, 3, 1});
  const Tensor query_lens = Tensor::of<std::int64_t>({2}, {2, 3});
  const Tensor bias = random_tensor({2, 1, 3, 4}, DType::f64, 60);
  const Tensor sinks = random_tensor({4}, DType::f64, 61);
  const MultiHeadAttentionConfig config{.model_dim = 8, .heads = 4, .kv_heads = 2, .bias = true, .dtype = DType::f64};
  expect_true_gradients("valid_lens", config, {.valid_lens = lens});
  expect_true_gradients("valid_lens by row", config, {.valid_lens = row_lens});
  expect_true_gradients("query_lens", config, {.query_lens = query_lens});
  expect_true_gradients("causal", config, {.causal = Causal::bottom_right});
  expect_true_gradients("window", config, {.causal = Causal::top_left, .window = Window{1, 0}});
  expect_true_gradients("dropout", config, {.dropout = 0.3, .seed = 5});
  expect_true_gradients("softcap, scale, bias and sinks", config,
                        {.bias = bias, .scale = 0.7, .softcap = 1.5, .sinks = sinks});
  expect_true_gradients("everything", config,
                        {.bias = bias, .causal = Causal::bottom_right, .valid_lens = lens, .dropout = 0.3, .seed = 5});
}

TEST(LayerGradients, of_self_attention_add_up_to_the_gradient_of_its_input) {
  MultiHeadAttention layer = random_layer({.model_dim = 6, .heads = 2, .bias = true, .dtype = DType::f64});
  Tensor x = random_tensor({2, 3, 6}, DType::f64, 3);
  const Tensor dy = random_tensor({2, 3, 6}, DType::f64, 4);
  layer.forward(x, x, x, {.causal = Causal::square});
  const Gradients gradients = layer.backward(dy);
  std::vector<double> sum = numbers(gradients.queries);
  const std::vector<double> keys = numbers(gradients.keys), values = numbers(gradients.values);
  for (std::size_t i = 0; i < sum.size(); ++i) {
    sum[i] += keys[i] + values[i];
  }
  const std::vector<double> weights = numbers(dy);
  const std::vector<double> expected = finite_differences(x, [&] {
    const std::vector<double> y = numbers(layer.infer(x, x, x, {.causal = Causal::square}));
    double total = 0;
    for (std::size_t i = 0; i < y.size(); ++i) {
      total += y[i] * weights[i];
    }
    return total;
  });
  expect_close(sum, expected, 1e-8, "x");
}

TEST(LayerGradients, of_bias_and_sinks_go_where_the_caller_says) {
  MultiHeadAttention layer = random_layer({.model_dim = 6, .heads = 2, .dtype = DType::f64});
  const Inputs in = random_inputs(layer.config(), 2, 3, 4);
  Tensor bias = random_tensor({2, 3, 4}, DType::f64, 60);  // [H,Sq,Sk], one for all of the batch
  Tensor sinks = random_tensor({2}, DType::f64, 61);
  const AttentionOptions options{.bias = bias, .sinks = sinks};
  const Tensor dy = random_tensor({2, 3, 6}, DType::f64, 50);
  layer.forward(in.queries, in.keys, in.values, options);
  Tensor dbias({2, 3, 4}, DType::f64), dsinks({2}, DType::f64);
  layer.backward(dy, {.bias = dbias, .sinks = dsinks});
  const auto evaluate = [&] { return objective(layer, in, options, dy); };
  expect_close(numbers(dbias), finite_differences(bias, evaluate), 1e-8, "bias");
  expect_close(numbers(dsinks), finite_differences(sinks, evaluate), 1e-8, "sinks");
}

TEST(LayerGradients, without_a_batch_have_the_inputs_shapes) {
  MultiHeadAttention layer = random_layer({.model_dim = 6, .heads = 2, .key_dim = 5, .bias = true});
  const Inputs in = random_inputs(layer.config(), 1, 3, 4);
  const Tensor dy = random_tensor({1, 3, 6}, DType::f32, 50);
  layer.forward(in.queries, in.keys, in.values);
  const Gradients batched = layer.backward(dy);
  const auto row = [](const Tensor& x) { return x.view().select(0, 0); };
  layer.forward(row(in.queries), row(in.keys), row(in.values));
  const Gradients gradients = layer.backward(row(dy));
  EXPECT_EQ(gradients.keys.sizes(), (Dims{4, 5}));
  EXPECT_TRUE(same_bits(gradients.queries, row(batched.queries)));
  EXPECT_TRUE(same_bits(gradients.keys, row(batched.keys)));
  EXPECT_TRUE(same_bits(gradients.values, row(batched.values)));
  EXPECT_TRUE(same_bits(gradients.parameters.at("W_k"), batched.parameters.at("W_k")));
}

// The same layer with its parameters as float64 numbers.
MultiHeadAttention in_float64(const MultiHeadAttention& layer) {
  MultiHeadAttentionConfig config = layer.config();
  config.dtype = DType::f64;
  MultiHeadAttention result(config);
  for (auto& [name, view] : result.parameters()) {
    copy(layer.parameter(name), view);
  }
  return result;
}

TEST(LayerGradients, of_every_type_agree_with_float64) {
  for (const DType dtype : float_types) {
    for (const auto& [name, config] : config_zoo(dtype)) {
      SCOPED_TRACE(name + std::string(" ") + headway::name(dtype));
      MultiHeadAttention layer = random_layer(config);
      MultiHeadAttention exact = in_float64(layer);
      const Inputs in = random_inputs(layer.config(), 2, 3, 4);
      const Inputs wide{convert(in.queries, DType::f64), convert(in.keys, DType::f64), convert(in.values, DType::f64)};
      const Tensor dy = random_tensor({2, 3, config.model_dim}, dtype, 50);
      layer.forward(in.queries, in.keys, in.values);
      exact.forward(wide.queries, wide.keys, wide.values);
      const Gradients found = layer.backward(dy);
      const Gradients expected = exact.backward(convert(dy, DType::f64));
      const double tolerance = 64 * unit_roundoff(dtype);
      EXPECT_EQ(found.queries.dtype(), dtype);
      expect_close(numbers(found.queries), numbers(expected.queries), tolerance, "queries");
      expect_close(numbers(found.keys), numbers(expected.keys), tolerance, "keys");
      expect_close(numbers(found.values), numbers(expected.values), tolerance, "values");
      for (const auto& [parameter, gradient] : expected.parameters) {
        expect_close(numbers(found.parameters.at(parameter)), numbers(gradient), tolerance, parameter);
      }
    }
  }
}

TEST(LayerGradients, are_the_same_bits_each_time) {
  MultiHeadAttention layer = random_layer({.model_dim = 8, .heads = 4, .kv_heads = 2, .bias = true});
  const Inputs in = random_inputs(layer.config(), 2, 5, 7);
  const Tensor dy = random_tensor({2, 5, 8}, DType::f32, 50);
  layer.forward(in.queries, in.keys, in.values);
  const Gradients first = layer.backward(dy);
  const Gradients second = layer.backward(dy);
  EXPECT_TRUE(same_bits(first.keys, second.keys));
  EXPECT_TRUE(same_bits(first.parameters.at("W_v"), second.parameters.at("W_v")));
}

TEST(LayerGradients, train_the_layer) {
  MultiHeadAttention layer({.model_dim = 8, .heads = 2, .bias = true, .seed = 3});
  const Tensor x = random_tensor({4, 5, 8}, DType::f32, 1);
  const Tensor target = random_tensor({4, 5, 8}, DType::f32, 2);
  const auto step = [&] {  // returns the mean squared error before the step
    Tensor y = layer.forward(x, x, x);
    double loss = 0;
    for (std::int64_t e = 0; e < y.elements(); ++e) {
      const float error = y.as<float>()[e] - target.as<float>()[e];
      loss += double{error} * error / static_cast<double>(y.elements());
      y.as<float>()[e] = 2 * error / static_cast<float>(y.elements());
    }
    const Gradients gradients = layer.backward(y);
    for (auto& [name, parameter] : layer.parameters()) {
      for (std::int64_t e = 0; e < parameter.elements(); ++e) {
        parameter.as<float>()[e] -= gradients.parameters.at(name).as<float>()[e];
      }
    }
    return loss;
  };
  const double before = step();
  double after = before;
  for (int i = 0; i < 200; ++i) {
    after = step();
  }
  EXPECT_LT(after, 0.7 * before);
}

}  // namespace
}  // namespace headway::test
