// Gradients where scores, factors or sums are large: what a rounded lse, a float's range or a long chain of additions
// would spoil.
#include <gtest/gtest.h>

#include <array>
#include <cmath>

#include "support/inputs.h"

namespace headway::test {
namespace {

class HostileGradients : public EngineTest {
 protected:
  static bool is_half(DType type) { return type == DType::bf16 || type == DType::f16; }
  static double unit(DType type) { return type == DType::bf16 ? 0x1p-8 : type == DType::f16 ? 0x1p-11 : 0x1p-13; }
};

bool all_finite(const Tensor& tensor) {
  for (Real value : read(tensor).values)
    if (!std::isfinite(value)) return false;
  return true;
}

bool all_finite(const GradientTensors& made) {
  return all_finite(made.dq) && all_finite(made.dk) && all_finite(made.dv) &&
         (!made.dbias || all_finite(*made.dbias)) && (!made.dsinks || all_finite(*made.dsinks));
}

// The sum over keys of dv(.., d) of each kv head: with grad_out 1 and no dropout, the sum of all weights.
std::vector<double> sums_of_weights(const Tensor& dv) {
  const Array values = read(dv);
  std::vector<double> sums;
  for (std::int64_t b = 0; b < dv.size(0); ++b)
    for (std::int64_t g = 0; g < dv.size(1); ++g) {
      Real sum = 0;
      for (std::int64_t j = 0; j < dv.size(2); ++j) sum += values(b, g, j, 0);
      sums.push_back(static_cast<double>(sum));
    }
  return sums;
}

TEST_P(HostileGradients, of_large_scores_keep_the_weights_of_a_row_at_a_sum_of_1) {
  for (DType type : float_types)
    for (const double scale : {1e2, 1e4, 1e6, 1e9, -1e30, 1e37}) {
      const bool many = GetParam() == Engine::cpu && (scale == 1e4 || scale == 1e37);
      const std::int64_t queries = many ? 140 : 20, keys = many ? 300 : 40;
      SCOPED_TRACE(std::string(name(type)) + " " + std::to_string(keys) + " keys, scale " + std::to_string(scale));
      const Inputs inputs = random_inputs(
          {.batch = 1, .heads = 2, .kv_heads = 1, .queries = queries, .keys = keys, .head_dim = 16, .value_dim = 8},
          type);
      Random random(4);
      const Tensor bias = normal({1, 1, queries, keys}, DType::f32, random, std::abs(scale));
      const AttentionOptions kinds[] = {
          {.scale = scale}, {.causal = Causal::bottom_right, .scale = scale}, {.bias = bias, .scale = scale}};
      for (const AttentionOptions& options : kinds) {
        const Call call = inputs.call(on_engine(options));
        const Tensor grad_out = filled(call.out_sizes(), type, 1.0);
        const GradientTensors made = call.gradients(grad_out);
        EXPECT_TRUE(all_finite(made)) << (options.bias ? "bias" : "");
        for (double sum : sums_of_weights(made.dv))
          EXPECT_NEAR(sum / (2 * static_cast<double>(queries)), 1, 2 * unit(type));
      }
    }
}

TEST_P(HostileGradients, of_large_scores_that_are_equal_share_the_weights_equally) {
  for (DType type : float_types)
    for (const double value : {3.0, 100.0, 1e4, 6e4, 1e9, 1e18}) {
      if (type == DType::f16 && value > 65504) continue;
      SCOPED_TRACE(std::string(name(type)) + " " + std::to_string(value));
      for (const std::int64_t dim : {1, 16, 128}) {
        const std::int64_t keys = 150, queries = 3;
        const Tensor q = filled({1, 1, queries, dim}, type, value), k = filled({1, 1, keys, dim}, type, value);
        Random random(4);
        const Tensor v = normal({1, 1, keys, 4}, type, random);
        const Call call{q, k, v, on_engine(), {}};
        const Tensor grad_out = filled({1, 1, queries, 4}, type, 1.0);
        const GradientTensors made = call.gradients(grad_out);
        for (Real dv : read(made.dv).values)
          EXPECT_NEAR(static_cast<double>(dv) * keys / queries, 1, is_half(type) ? 2 * unit(type) : 1e-3);
      }
    }
}

// 128 equal products err alike, so what is packed must not be rounded.
TEST_P(HostileGradients, of_scores_of_many_equal_products_are_as_accurate_as_their_lse) {
  for (DType type : {DType::f32, DType::f16}) {
    const Tensor q = filled({1, 1, 8, 128}, type, 32);
    Tensor k = filled({1, 1, 100, 128}, type, 32);
    for (std::int64_t j = 50; j < 100; ++j)
      for (std::int64_t d = 0; d < 3; ++d) set(k, {0, 0, j, d}, 31);
    Random random(4);
    const Tensor v = normal({1, 1, 100, 128}, type, random);
    const Call call{q, k, v, on_engine(), {}};
    const Tensor grad_out = normal(call.out_sizes(), type, random);
    const GradientTensors made = call.gradients(grad_out);
    const Array exact = backward(call.spec(), read(grad_out)).dv.value, actual = read(made.dv);
    for (std::size_t n = 0; n < exact.values.size(); ++n)
      EXPECT_NEAR(static_cast<double>(actual.values[n]), static_cast<double>(exact.values[n]),
                  1e-3 * std::abs(static_cast<double>(exact.values[n])) + 1e-6);
  }
}

TEST_P(HostileGradients, of_large_scores_take_sinks_and_dropout_like_small_ones) {
  const Tensor sinks = Tensor::of<float>({2}, {1e6f, -3e5f});
  for (DType type : float_types) {
    SCOPED_TRACE(name(type));
    const Inputs inputs = random_inputs(
        {.batch = 1, .heads = 2, .kv_heads = 2, .queries = 9, .keys = 70, .head_dim = 8, .value_dim = 8}, type);
    AttentionOptions options{.scale = 3e5, .sinks = sinks};
    Random random(4);
    const Tensor grad_out = normal({1, 2, 9, 8}, type, random);
    for (const double dropout : {0.0, 0.5}) {
      options.dropout = dropout;
      options.seed = 5;
      const Call call = inputs.call(on_engine(options));
      GradientTensors made = call.gradients(grad_out);
      EXPECT_TRUE(all_finite(made));
      expect_backward(call, grad_out, made);
    }
  }
}

TEST_P(HostileGradients, of_large_scores_do_not_depend_on_how_another_kernel_rounded_their_lse) {
  for (DType type : {DType::f32, DType::bf16, DType::f16}) {
    const Inputs inputs = random_inputs(
        {.batch = 1, .heads = 2, .kv_heads = 1, .queries = 20, .keys = 40, .head_dim = 16, .value_dim = 8}, type);
    const Call call = inputs.call(on_engine({.scale = 1e7}));
    Random random(4);
    const Tensor grad_out = normal(call.out_sizes(), type, random);
    Results results = call.run();
    const GradientTensors made = call.gradients(grad_out, results);
    for (std::int64_t n = 0; n < results.lse.elements(); ++n)
      results.lse.as<float>()[n] = std::nextafter(results.lse.as<float>()[n], n % 2 == 0 ? 0.0f : INFINITY);
    EXPECT_TRUE(same_bits(call.gradients(grad_out, results), made)) << name(type);
  }
}

// As in attention over keys that lie on several machines: out and lse are the whole row's.
TEST_P(HostileGradients, of_large_scores_of_a_part_of_the_keys_use_the_lse_of_the_whole_row) {
  const std::int64_t keys = 60;
  const Tensor q = filled({1, 1, 5, 4}, DType::f32, 50);
  Tensor k = filled({1, 1, keys, 4}, DType::f32, 50);
  for (std::int64_t j = 0; j < keys; ++j) set(k, {0, 0, j, 0}, 50 + 0.02 * static_cast<double>(j % 7));
  Random random(4);
  const Tensor v = normal({1, 1, keys, 4}, DType::f32, random), grad_out = normal({1, 1, 5, 4}, DType::f32, random);
  const Call whole{q, k, v, on_engine(), {}};
  const Results results = whole.run();
  EXPECT_GT(get(results.lse, {0, 0, 0}), 4500);
  const Array dv = read(whole.gradients(grad_out, results).dv);
  const ConstTensorView first_k = k.view().slice(2, 0, 20), first_v = v.view().slice(2, 0, 20);
  const Call part{q, first_k, first_v, on_engine(), {}};
  const Array part_dv = read(part.gradients(grad_out, results).dv);
  for (std::int64_t j = 0; j < 20; ++j)
    for (std::int64_t d = 0; d < 4; ++d)
      EXPECT_NEAR(static_cast<double>(part_dv(0, 0, j, d)), static_cast<double>(dv(0, 0, j, d)),
                  0.01 * std::abs(static_cast<double>(dv(0, 0, j, d))));
}

TEST_P(HostileGradients, of_large_scores_of_one_row_change_no_bit_of_another) {
  const std::int64_t dim = GetParam() == Engine::reference ? 8 : 64;
  for (DType type : float_types) {
    SCOPED_TRACE(name(type));
    Inputs inputs = random_inputs(
        {.batch = 1, .heads = 2, .kv_heads = 2, .queries = 40, .keys = 200, .head_dim = dim, .value_dim = dim}, type);
    const Call call = inputs.call(on_engine({.causal = Causal::bottom_right}));
    Random random(4);
    const Tensor grad_out = normal(call.out_sizes(), type, random);
    const GradientTensors before = call.gradients(grad_out);
    for (std::int64_t d = 0; d < dim; ++d) set(inputs.q, {0, 1, 20, d}, 8000 * get(inputs.q, {0, 1, 20, d}));
    const GradientTensors after = call.gradients(grad_out);
    const auto row = [](const Tensor& tensor, std::int64_t h, std::int64_t i) {
      return tensor.view().select(0, 0).select(0, h).select(0, i);
    };
    for (std::int64_t i = 0; i < 40; ++i) EXPECT_EQ(same_bits(row(before.dq, 1, i), row(after.dq, 1, i)), i != 20) << i;
    for (std::int64_t j = 0; j < 200; ++j) {  // row 20 sees keys up to 180
      EXPECT_TRUE(same_bits(row(before.dk, 0, j), row(after.dk, 0, j))) << j;
      EXPECT_TRUE(j <= 180 || same_bits(row(before.dk, 1, j), row(after.dk, 1, j))) << j;
      EXPECT_TRUE(j <= 180 || same_bits(row(before.dv, 1, j), row(after.dv, 1, j))) << j;
    }
  }
}

// ---- Numbers that a pair may not see ----

constexpr double odd_numbers[] = {NAN, INFINITY, 1e-39, 1e-25, 1e-20, 1e7, 1e30};

// Rows below 6 do not see key 9; the keys from 12 on are not seen by row 8.
struct PartlyHidden {
  Inputs inputs;
  Tensor mask, grad_out;

  PartlyHidden(DType type, std::int64_t queries, std::int64_t keys, std::int64_t dim)
      : inputs(random_inputs({.batch = 1,
                              .heads = 2,
                              .kv_heads = 2,
                              .queries = queries,
                              .keys = keys,
                              .head_dim = dim,
                              .value_dim = dim},
                             type)),
        mask({queries, keys}, DType::b8) {
    Random random(6);
    grad_out = normal({1, 2, queries, dim}, type, random);
    for (std::int64_t n = 0; n < queries * keys; ++n)
      mask.as<bool>()[n] = !(n / keys < 6 && n % keys == 9) && !(n / keys == 8 && n % keys >= 12);
  }
};

// body(hidden, odd) for every type and odd number; larger ones go other ways through the fast engines.
template <class Body>
void each_partly_hidden(Engine engine, const Body& body) {
  for (DType type : float_types)
    for (const double odd : odd_numbers)
      for (const auto& [queries, keys, dim] : {std::array<std::int64_t, 3>{12, 16, 8}, {20, 140, 130}}) {
        if (type == DType::f16 && std::isfinite(odd) && odd > 65504) continue;
        if (engine == Engine::reference && dim > 8) continue;
        SCOPED_TRACE(std::string(name(type)) + " " + std::to_string(odd) + " D " + std::to_string(dim));
        PartlyHidden hidden(type, queries, keys, dim);
        body(hidden, odd);
      }
}

void poison_row(Tensor& tensor, std::int64_t row, double value) {
  for (std::int64_t h = 0; h < tensor.size(1); ++h)
    for (std::int64_t d = 0; d < tensor.size(3); ++d) set(tensor, {0, h, row, d}, value);
}

TEST_P(HostileGradients, of_rows_that_do_not_see_a_key_ignore_odd_numbers_in_it) {
  each_partly_hidden(GetParam(), [&](PartlyHidden& hidden, double odd) {
    const Call call = hidden.inputs.call(on_engine({.mask = hidden.mask}));
    const Results results = call.run();
    const GradientTensors before = call.gradients(hidden.grad_out, results);
    poison_row(hidden.inputs.k, 9, odd);
    poison_row(hidden.inputs.v, 9, odd);
    const GradientTensors after = call.gradients(hidden.grad_out, results);
    const auto blind_rows = [](const Tensor& tensor) { return tensor.view().slice(2, 0, 6); };
    EXPECT_TRUE(same_bits(blind_rows(before.dq), blind_rows(after.dq)));
  });
}

TEST_P(HostileGradients, of_keys_that_a_row_does_not_see_ignore_odd_numbers_in_it) {
  each_partly_hidden(GetParam(), [&](PartlyHidden& hidden, double odd) {
    const Call call = hidden.inputs.call(on_engine({.mask = hidden.mask}));
    const Results results = call.run();
    const GradientTensors before = call.gradients(hidden.grad_out, results);
    poison_row(hidden.inputs.q, 8, odd);
    poison_row(hidden.grad_out, 8, odd);
    const GradientTensors after = call.gradients(hidden.grad_out, results);
    const auto hidden_keys = [](const Tensor& tensor) { return tensor.view().slice(2, 12, tensor.size(2)); };
    EXPECT_TRUE(same_bits(hidden_keys(before.dk), hidden_keys(after.dk)));
    EXPECT_TRUE(same_bits(hidden_keys(before.dv), hidden_keys(after.dv)));
    for (std::int64_t i = 0; i < hidden.grad_out.size(2); ++i) {
      const auto row = [&](const Tensor& tensor) { return tensor.view().slice(2, i, i + 1); };
      EXPECT_TRUE(i == 8 || same_bits(row(before.dq), row(after.dq))) << i;
    }
  });
}

// Its tiles go another way then.
TEST_P(HostileGradients, of_a_row_do_not_depend_on_odd_numbers_in_another) {
  const std::int64_t dim = GetParam() == Engine::reference ? 8 : 128;
  for (DType type : float_types)
    for (const double odd : odd_numbers) {
      if (type == DType::f16 && std::isfinite(odd) && odd > 65504) continue;
      SCOPED_TRACE(std::string(name(type)) + " " + std::to_string(odd));
      Inputs inputs = random_inputs(
          {.batch = 1, .heads = 1, .kv_heads = 1, .queries = 64, .keys = 160, .head_dim = dim, .value_dim = dim}, type);
      const Call call = inputs.call(on_engine());
      Random random(6);
      Tensor grad_out = normal(call.out_sizes(), type, random);
      const Results results = call.run();
      const GradientTensors before = call.gradients(grad_out, results);
      poison_row(inputs.q, 8, odd);
      poison_row(grad_out, 8, odd);
      const GradientTensors after = call.gradients(grad_out, results);
      for (std::int64_t i = 0; i < 64; ++i) {
        const auto row = [&](const Tensor& tensor) { return tensor.view().slice(2, i, i + 1); };
        EXPECT_TRUE(i == 8 || same_bits(row(before.dq), row(after.dq))) << i;
      }
    }
}

// ---- Factors beyond a float's range ----

TEST_P(HostileGradients, are_within_the_bounds_for_a_softcap_of_any_size) {
  for (DType type : float_types)
    for (const double softcap : {1e-300, 1e-40, 1e-30, 1e30, 1e39, 1e300}) {
      SCOPED_TRACE(std::string(name(type)) + " " + std::to_string(std::log10(softcap)));
      const Inputs inputs = random_inputs({}, type);
      Call call = inputs.call(on_engine({.softcap = softcap}));
      Call reference = call;
      reference.options.engine = Engine::reference;
      Random random(4);
      const Tensor grad_out = normal(call.out_sizes(), type, random);
      GradientTensors made = call.gradients(grad_out, reference.run());
      expect_backward(call, grad_out, made);
    }
}

// Tiny keys and large queries, whose scores are ordinary.
TEST_P(HostileGradients, are_within_the_bounds_for_a_large_softcap_beside_tiny_keys) {
  Random random(4);
  const Tensor q = normal({1, 1, 5, 4}, DType::f32, random, 1e9), k = normal({1, 1, 7, 4}, DType::f32, random, 1e-9);
  const Tensor v = normal({1, 1, 7, 4}, DType::f32, random), grad_out = normal({1, 1, 5, 4}, DType::f32, random);
  const Call call{q, k, v, on_engine({.softcap = 1e39}), {}};
  Call reference = call;
  reference.options.engine = Engine::reference;
  GradientTensors made = call.gradients(grad_out, reference.run());
  expect_backward(call, grad_out, made);
}

TEST_P(HostileGradients, are_within_the_bounds_for_a_scale_that_a_float_cannot_hold) {
  Random random(4);
  const Tensor q = normal({1, 1, 5, 4}, DType::f32, random, 1e-19), k = normal({1, 1, 7, 4}, DType::f32, random, 1e-19);
  const Tensor v = normal({1, 1, 7, 4}, DType::f32, random), grad_out = normal({1, 1, 5, 4}, DType::f32, random);
  for (const double scale : {1e38, -6e38, 0.0, 1e-300}) {
    SCOPED_TRACE(scale);
    const Call call{q, k, v, on_engine({.scale = scale}), {}};
    Call reference = call;
    reference.options.engine = Engine::reference;
    GradientTensors made = call.gradients(grad_out, reference.run());
    expect_backward(call, grad_out, made);
  }
}

// Their quotient is beyond a double's range, and 0 times it is 0.
TEST_P(HostileGradients, are_finite_for_scores_of_0_and_a_scale_far_beyond_the_softcap) {
  if (GetParam() == Engine::cuda) GTEST_SKIP() << "not tried on CUDA: docs/reliability.md";
  for (DType type : float_types) {
    SCOPED_TRACE(name(type));
    const Tensor q = filled({1, 1, 5, 16}, type, 0), k = filled({1, 1, 7, 16}, type, 0),
                 v = filled({1, 1, 7, 3}, type, 1);
    const Call call{q, k, v, on_engine({.scale = 1e300, .softcap = 1e-45}), {}};
    const GradientTensors made = call.gradients(filled({1, 1, 5, 3}, type, 1), call.run());
    each_index(made.dq.sizes(), [&](const Dims& at) { EXPECT_EQ(get(made.dq, at), 0); });
    each_index(made.dk.sizes(), [&](const Dims& at) { EXPECT_EQ(get(made.dk, at), 0); });
    each_index(made.dv.sizes(), [&](const Dims& at) { EXPECT_NEAR(get(made.dv, at), 5.0 / 7, 4e-3); });
  }
}

// ---- Long sums ----

// n equal terms, up to their sign, meet in one sum.
TEST_P(HostileGradients, do_not_drift_over_many_keys) {
  for (DType type : {DType::f32, DType::f64}) {
    const std::int64_t keys = GetParam() == Engine::reference ? 40000 : 100000;
    const Tensor q = filled({1, 1, 1, 1}, type, 1e-7), grad_out = filled({1, 1, 1, 1}, type, 0.7372913);
    Tensor k({1, 1, keys, 1}, type), v({1, 1, keys, 1}, type);
    for (std::int64_t j = 0; j < keys; ++j) {
      set(k, {0, 0, j, 0}, j % 2 == 0 ? 0.3771823 : -0.3771823);
      set(v, {0, 0, j, 0}, j % 2 == 0 ? 1.1239127 : -1.1239127);
    }
    const Call call{q, k, v, on_engine(), {}};
    GradientTensors made = call.gradients(grad_out);
    expect_backward(call, grad_out, made);
  }
}

TEST_P(HostileGradients, do_not_drift_over_many_rows) {
  for (DType type : {DType::f32, DType::f64}) {
    const std::int64_t rows = GetParam() == Engine::reference ? 20000 : 60000;
    const Tensor q = filled({1, 1, rows, 1}, type, 0.3771823), grad_out = filled({1, 1, rows, 1}, type, 0.7372913);
    Tensor k = filled({1, 1, 2, 1}, type, 1e-7), v = filled({1, 1, 2, 1}, type, 1.1239127);
    set(v, {0, 0, 1, 0}, -0.8771123);
    const Tensor bias = filled({1, 1, 1, 2}, type, 0.25), sinks = filled({1}, type, 0.125);
    const Call call{q, k, v, on_engine({.bias = bias, .sinks = sinks}), {}};
    GradientTensors made = call.gradients(grad_out);
    expect_backward(call, grad_out, made);
  }
}

ON_EVERY_HOST_ENGINE(HostileGradients);

}  // namespace
}  // namespace headway::test
