// Parameters: names, shapes, and draws that are a documented function of the seed.
#include <set>

#include "core/philox.h"
#include "layer_support.h"

namespace headway::test {
namespace {

TEST(LayerParameters, have_names_and_shapes_in_a_fixed_order) {
  const MultiHeadAttention layer(
      {.model_dim = 6, .heads = 4, .kv_heads = 2, .head_dim = 5, .key_dim = 7, .value_dim = 8, .bias = true});
  std::vector<std::pair<std::string, Dims>> found;
  for (const auto& [name, view] : layer.parameters()) {
    found.emplace_back(name, view.sizes());
  }
  const std::vector<std::pair<std::string, Dims>> expected = {{"W_q", {6, 20}}, {"W_k", {7, 10}}, {"W_v", {8, 10}},
                                                              {"W_o", {20, 6}}, {"b_q", {20}},    {"b_k", {10}},
                                                              {"b_v", {10}},    {"b_o", {6}}};
  EXPECT_EQ(found, expected);
}

TEST(LayerParameters, without_biases_are_four) {
  const MultiHeadAttention layer({.model_dim = 6, .heads = 2});
  EXPECT_EQ(layer.parameters().size(), 4u);
}

TEST(LayerParameters, the_config_says_what_its_zeros_stand_for) {
  const MultiHeadAttention layer({.model_dim = 12, .heads = 3});
  EXPECT_EQ(layer.config(),
            (MultiHeadAttentionConfig{
                .model_dim = 12, .heads = 3, .kv_heads = 3, .head_dim = 4, .key_dim = 12, .value_dim = 12}));
}

TEST(LayerParameters, can_be_written_by_name) {
  MultiHeadAttention layer({.model_dim = 4, .heads = 2});
  layer.parameter("W_k").at<float>({1, 2}) = 42.0f;
  EXPECT_EQ(std::as_const(layer).parameter("W_k").at<float>({1, 2}), 42.0f);
}

// u of include/headway/layer.h, word by word.
double documented_draw(std::uint64_t seed, std::uint32_t parameter, std::uint64_t e) {
  const auto words = Philox4x32::words(
      {static_cast<std::uint32_t>(e / 2), static_cast<std::uint32_t>(e / 2 >> 32), parameter, 0x48454144u}, seed);
  const std::uint64_t bits =
      e % 2 == 0 ? words[0] + (std::uint64_t{words[1]} << 32) : words[2] + (std::uint64_t{words[3]} << 32);
  return std::ldexp(static_cast<double>(bits / 2048), -53);
}

TEST(LayerParameters, are_the_documented_function_of_the_seed) {
  const std::uint64_t seed = 0x0123456789abcdefu;
  for (const DType dtype : float_types) {
    MultiHeadAttentionConfig config{
        .model_dim = 6, .heads = 2, .key_dim = 9, .bias = true, .dtype = dtype, .seed = seed};
    const auto expect_parameter = [&](const std::string& name, std::uint32_t number, const auto& value_of) {
      const MultiHeadAttention layer(config);
      const ConstTensorView parameter = layer.parameter(name);
      std::vector<double> expected;
      for (std::int64_t e = 0; e < parameter.elements(); ++e) {
        expected.push_back(value_of(documented_draw(seed, number, static_cast<std::uint64_t>(e))));
      }
      const Tensor exact = Tensor::of<double>(parameter.sizes(), expected);
      EXPECT_TRUE(same_bits(parameter, convert(exact, dtype))) << name << " " << headway::name(dtype);
    };
    const auto symmetric = [](double a) { return [a](double u) { return (2 * u - 1) * a; }; };
    config.initializer = Initializer::xavier_uniform;
    expect_parameter("W_k", 1, symmetric(std::sqrt(6.0 / 15)));
    expect_parameter("b_k", 5, [](double) { return 0.0; });
    config.initializer = Initializer::torch_linear;
    expect_parameter("W_k", 1, symmetric(1 / std::sqrt(9.0)));
    expect_parameter("b_o", 7, symmetric(1 / std::sqrt(6.0)));
    config.initializer = Initializer::uniform_01;
    expect_parameter("W_o", 3, [](double u) { return u; });
    expect_parameter("b_v", 6, [](double u) { return u; });
  }
}

// The first words of seed 0, written down once: a change to the draws changes everyone's models.
TEST(LayerParameters, never_change_between_versions) {
  const MultiHeadAttention layer({.model_dim = 2, .dtype = DType::f64, .initializer = Initializer::uniform_01});
  EXPECT_EQ(numbers(layer.parameter("W_q")), (std::vector<double>{0x1.92ec6d2df313fp-1, 0x1.a30de2b04bce0p-6,
                                                                  0x1.e6db89b178800p-8, 0x1.451879d6ab29ap-2}));
}

TEST(LayerParameters, differ_by_seed_and_by_parameter_and_repeat_for_the_same_seed) {
  const auto weights = [](std::uint64_t seed, const char* name) {
    const MultiHeadAttention layer({.model_dim = 8, .heads = 2, .seed = seed});
    return numbers(layer.parameter(name));
  };
  EXPECT_EQ(weights(1, "W_q"), weights(1, "W_q"));
  const std::uint64_t high_bit = (std::uint64_t{1} << 63) + 1;
  const std::set<std::vector<double>> different = {weights(1, "W_q"), weights(2, "W_q"), weights(high_bit, "W_q"),
                                                   weights(1, "W_k"), weights(1, "W_v"), weights(1, "W_o")};
  EXPECT_EQ(different.size(), 6u);
}

TEST(LayerParameters, biases_do_not_change_the_weights_draw) {
  const MultiHeadAttention plain({.model_dim = 8, .heads = 2, .seed = 5});
  const MultiHeadAttention with_bias({.model_dim = 8, .heads = 2, .bias = true, .seed = 5});
  EXPECT_TRUE(same_bits(plain.parameter("W_o"), with_bias.parameter("W_o")));
}

struct Moments {
  double mean = 0, deviation = 0, lowest = HUGE_VAL, highest = -HUGE_VAL;

  explicit Moments(const std::vector<double>& values) {
    const auto count = static_cast<double>(values.size());
    for (const double value : values) {
      mean += value / count;
      lowest = std::min(lowest, value);
      highest = std::max(highest, value);
    }
    for (const double value : values) {
      deviation += (value - mean) * (value - mean) / count;
    }
    deviation = std::sqrt(deviation);
  }
};

TEST(LayerParameters, fill_the_range_of_their_initializer) {
  for (const DType dtype : float_types) {
    for (const Initializer initializer :
         {Initializer::xavier_uniform, Initializer::torch_linear, Initializer::uniform_01}) {
      const MultiHeadAttention layer({.model_dim = 128,
                                      .heads = 2,
                                      .value_dim = 64,
                                      .bias = true,
                                      .dtype = dtype,
                                      .initializer = initializer,
                                      .seed = 9});
      const bool unit = initializer == Initializer::uniform_01;
      const double a = unit                                         ? 1.0
                       : initializer == Initializer::xavier_uniform ? std::sqrt(6.0 / (64 + 128))
                                                                    : 1.0 / std::sqrt(64.0);
      const double from = unit ? 0.0 : -a;
      const Moments found(numbers(layer.parameter("W_v")));  // 64 x 128 draws
      const double slack = a * (1 + unit_roundoff(dtype));
      EXPECT_GE(found.lowest, unit ? 0.0 : -slack);
      EXPECT_LE(found.highest, slack);
      EXPECT_LT(found.lowest, from + 0.01 * a);
      EXPECT_GT(found.highest, 0.99 * a);
      EXPECT_NEAR(found.mean, (from + a) / 2, 0.02 * a);
      EXPECT_NEAR(found.deviation, (a - from) / std::sqrt(12.0), 0.02 * a);
    }
  }
}

// bf16 has 8 bits: of 2^16 draws about 128 lie so close to 1 that rounding alone would reach it.
TEST(LayerParameters, uniform_01_never_reaches_1) {
  for (const DType dtype : float_types) {
    const MultiHeadAttention layer(
        {.model_dim = 256, .heads = 2, .dtype = dtype, .initializer = Initializer::uniform_01, .seed = 4});
    EXPECT_LT(largest(numbers(layer.parameter("W_q"))), 1.0);
  }
}

TEST(LayerParameters, biases_start_at_zero_with_xavier_and_are_drawn_otherwise) {
  for (const Initializer initializer :
       {Initializer::xavier_uniform, Initializer::torch_linear, Initializer::uniform_01}) {
    const MultiHeadAttention layer({.model_dim = 8, .heads = 2, .bias = true, .initializer = initializer});
    const double found = largest(numbers(layer.parameter("b_q")));
    EXPECT_EQ(found == 0.0, initializer == Initializer::xavier_uniform);
  }
}

TEST(LayerParameters, of_float64_use_all_53_bits) {
  const MultiHeadAttention layer({.model_dim = 16, .dtype = DType::f64, .initializer = Initializer::uniform_01});
  bool last_bit = false;
  for (const double value : numbers(layer.parameter("W_q"))) {
    last_bit = last_bit || std::fmod(std::ldexp(value, 53), 2.0) == 1.0;
  }
  EXPECT_TRUE(last_bit);
}

TEST(Layers, of_an_empty_config_are_refused_by_a_text_not_by_the_compiler) {
  EXPECT_THROW(MultiHeadAttention({}), InvalidArgument);
}

TEST(Gradients, of_a_name_that_is_not_there_name_those_that_are) {
  MultiHeadAttention layer({.model_dim = 4, .heads = 2});
  const Tensor x({1, 2, 4});
  layer.forward(x, x, x);
  try {
    layer.backward(x).parameters.at("W_x");
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_STREQ(error.what(), "tensors: there is none named 'W_x'; found W_k, W_o, W_q, W_v");
  }
}

}  // namespace
}  // namespace headway::test
