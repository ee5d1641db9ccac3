// Each row of the contract's table of edge cases, forward and backward.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cfenv>
#include <cmath>
#include <limits>

#include "support/inputs.h"
#include "support/run.h"

namespace headway::test {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double nan = std::numeric_limits<double>::quiet_NaN();

bool all_zero(ConstTensorView view) {
  for (Real value : read(view).values)
    if (value != 0) return false;
  return true;
}

bool all_equal(ConstTensorView view, double expected) {
  for (Real value : read(view).values)
    if (value != static_cast<Real>(expected)) return false;
  return true;
}

bool all_finite(ConstTensorView view) {
  for (Real value : read(view).values)
    if (!std::isfinite(value)) return false;
  return true;
}

bool all_zero(const GradientTensors& gradients) {
  return all_zero(gradients.dq) && all_zero(gradients.dk) && all_zero(gradients.dv) &&
         (!gradients.dbias || all_zero(*gradients.dbias)) && (!gradients.dsinks || all_zero(*gradients.dsinks));
}

class EdgeCases : public EngineTest {
 protected:
  Tensor ones_like_out(const Call& call) const { return filled(call.out_sizes(), call.q.dtype(), 1); }
};

TEST_P(EdgeCases, a_row_with_no_key_gives_zero) {
  for (DType type : float_types) {
    const Inputs inputs = random_inputs({}, type);
    const Tensor mask({1, 1, 1, 7}, DType::b8);
    const Call call = inputs.call(on_engine({.mask = mask}));
    const Results results = call.run(true);
    EXPECT_TRUE(all_zero(results.out));
    EXPECT_TRUE(all_zero(*results.weights));
    EXPECT_TRUE(all_equal(results.lse, -infinity));
    EXPECT_TRUE(all_zero(call.gradients(ones_like_out(call), results)));
  }
}

TEST_P(EdgeCases, a_row_with_no_key_gives_zero_whatever_its_query_and_gradient_hold) {
  Inputs inputs = random_inputs({});
  const Tensor bias = filled({7}, DType::f32, -infinity), sinks = filled({4}, DType::f32, 0.5);
  inputs.q = filled({2, 4, 5, 8}, DType::f32, nan);
  const Call call = inputs.call(on_engine({.bias = bias, .sinks = sinks}));
  const Results results = call.run(true);
  EXPECT_TRUE(all_zero(results.out));
  EXPECT_TRUE(all_equal(results.lse, 0.5));
  EXPECT_TRUE(all_zero(call.gradients(filled(call.out_sizes(), DType::f32, nan), results)));
}

TEST_P(EdgeCases, a_row_with_no_key_but_a_sink_has_the_sink_as_its_lse) {
  const Inputs inputs = random_inputs({});
  const Tensor lens({2}, DType::i64), sinks = Tensor::of<float>({4}, {0.25f, -3, 7, 0});
  const Call call = inputs.call(on_engine({.valid_lens = lens, .sinks = sinks}));
  const Results results = call.run(true);
  EXPECT_TRUE(all_zero(results.out));
  EXPECT_TRUE(all_zero(*results.weights));
  for (std::int64_t h = 0; h < 4; ++h) EXPECT_EQ(results.lse.at<float>({1, h, 3}), sinks.at<float>({h}));
  EXPECT_TRUE(all_zero(call.gradients(ones_like_out(call), results)));
}

TEST_P(EdgeCases, only_the_rows_without_keys_are_zero) {
  const Inputs inputs = random_inputs({.queries = 7, .keys = 4});
  // bottom_right: offset -3, so rows 0 to 2 see nothing.
  const Call call = inputs.call(on_engine({.causal = Causal::bottom_right}));
  const Results results = call.run(true);
  expect_contract(call);
  for (std::int64_t i = 0; i < 7; ++i) EXPECT_EQ(std::isinf(results.lse.at<float>({0, 0, i})), i < 3);
}

TEST_P(EdgeCases, padding_rows_are_zero_and_their_grad_out_is_never_read) {
  for (const bool with_sink : {false, true}) {
    Inputs inputs = random_inputs({});
    const Tensor lens = Tensor::of<std::int64_t>({2}, {3, 0}), sinks = filled({4}, DType::f32, 1);
    AttentionOptions options = on_engine({.query_lens = lens});
    if (with_sink) options.sinks = sinks;
    const Call call = inputs.call(options);
    Random random(8);
    Tensor grad_out = normal(call.out_sizes(), DType::f32, random);
    const Results clean = call.run(true);
    const GradientTensors clean_gradients = call.gradients(grad_out, clean);
    expect_forward(call, clean);
    const ConstTensorView padding = static_cast<const Tensor&>(clean.out).view().slice(2, 3, 5);
    EXPECT_TRUE(all_zero(padding));
    EXPECT_EQ(clean.lse.at<float>({0, 1, 3}), -infinity);
    EXPECT_EQ(clean.lse.at<float>({1, 1, 0}), -infinity);
    EXPECT_TRUE(all_zero(clean.weights->view().slice(2, 3, 5)));
    EXPECT_TRUE(all_zero(clean_gradients.dq.view().slice(2, 3, 5)));
    for (std::int64_t n = 0; n < grad_out.elements(); ++n) {
      const Dims index = index_of(n, grad_out.sizes());
      if (index[0] == 1 || index[2] >= 3) grad_out.at<float>(index) = NAN;
    }
    for (std::int64_t n = 0; n < inputs.q.elements(); ++n) {
      const Dims index = index_of(n, inputs.q.sizes());
      if (index[0] == 1 || index[2] >= 3) inputs.q.at<float>(index) = NAN;
    }
    EXPECT_TRUE(same_bits(call.run(true), clean));
    EXPECT_TRUE(same_bits(call.gradients(grad_out, clean), clean_gradients));
  }
}

TEST_P(EdgeCases, every_dimension_may_be_zero) {
  const Shape whole{.batch = 2, .heads = 2, .kv_heads = 2, .queries = 3, .keys = 4, .head_dim = 5, .value_dim = 6};
  std::vector<Shape> shapes(6, whole);
  shapes[0].batch = 0;
  shapes[1].heads = shapes[1].kv_heads = 0;
  shapes[2].queries = 0;
  shapes[3].keys = 0;
  shapes[4].head_dim = 0;
  shapes[5].value_dim = 0;
  for (DType type : float_types)
    for (const Shape& shape : shapes) expect_contract(random_inputs(shape, type).call(on_engine()));
}

TEST_P(EdgeCases, no_keys_at_all_is_a_row_with_no_key_allowed) {
  const Inputs inputs = random_inputs({.keys = 0});
  const Results results = inputs.call(on_engine()).run();
  EXPECT_TRUE(all_zero(results.out));
  EXPECT_TRUE(all_equal(results.lse, -infinity));
}

TEST_P(EdgeCases, no_features_make_every_score_zero) {
  const Inputs inputs = random_inputs({.head_dim = 0}, DType::f64);
  const Results results = inputs.call(on_engine()).run();
  for (Real lse : read(results.lse).values) EXPECT_NEAR(static_cast<double>(lse), std::log(7.0), 1e-15);
}

TEST_P(EdgeCases, packs_may_be_empty_or_hold_empty_sequences) {
  Random random(1);
  const Tensor q = normal({4, 2, 3}, DType::f32, random), k = normal({5, 2, 3}, DType::f32, random);
  expect_contract({q, k, k, on_engine(), Packing{{0, 0, 4, 4}, {0, 3, 3, 5}}});
  const Tensor none({0, 2, 3});
  expect_contract({none, none, none, on_engine(), Packing{{0}, {0}}});
  expect_contract({none, k, k, on_engine(), Packing{{0, 0}, {0, 5}}});
}

TEST_P(EdgeCases, scale_zero_gives_the_mean_of_the_allowed_values) {
  const Inputs inputs = random_inputs({.queries = 3, .keys = 4}, DType::f64);
  const Results results = inputs.call(on_engine({.scale = 0.0})).run();
  for (std::int64_t d = 0; d < 6; ++d) {
    double mean = 0;
    for (std::int64_t j = 0; j < 4; ++j) mean += inputs.v.at<double>({1, 1, j, d}) / 4;
    EXPECT_NEAR(results.out.at<double>({1, 3, 2, d}), mean, 1e-15);
  }
}

TEST_P(EdgeCases, a_negative_scale_is_the_scale_of_the_negated_query) {
  Inputs inputs = random_inputs({});
  const Results minus = inputs.call(on_engine({.scale = -0.25})).run();
  for (std::int64_t n = 0; n < inputs.q.elements(); ++n) inputs.q.as<float>()[n] *= -1;
  EXPECT_TRUE(same_bits(inputs.call(on_engine({.scale = 0.25})).run(), minus));
}

TEST_P(EdgeCases, denormals_are_kept_and_the_environment_is_not_changed) {
  const double denormal = std::numeric_limits<float>::denorm_min() * 100.0;
  Tensor q({1, 1, 1, 1}), k({1, 1, 2, 1}), v = filled({1, 1, 2, 1}, DType::f32, denormal), out({1, 1, 1, 1});
  const int rounding = std::fegetround();
  run_attention(q, k, v, out, on_engine());
  EXPECT_EQ(out.at<float>({0, 0, 0, 0}), static_cast<float>(denormal));
  EXPECT_EQ(std::fegetround(), rounding);
  volatile float smallest = std::numeric_limits<float>::min();
  EXPECT_GT(smallest / 2, 0.0f) << "denormals are flushed after the call";
  for (DType type : {DType::bf16, DType::f16, DType::f64}) {
    const double tiny = type == DType::f16 ? 0x3p-24 : type == DType::bf16 ? 0x3p-133 : 0x3p-1074;
    const Tensor q1({1, 1}, type), v1 = filled({1, 1}, type, tiny);
    Tensor out1({1, 1}, type);
    run_attention(q1, q1, v1, out1, on_engine());
    EXPECT_EQ(get(out1, {0, 0}), tiny);
  }
}

TEST_P(EdgeCases, denormal_queries_and_keys_still_score) {
  // q is denormal, the scale makes up for it: p = 1/4, 3/4.
  const double denormal = 0x1p-140;
  const Tensor q = filled({1, 1}, DType::f32, denormal);
  const Tensor k = Tensor::of<float>({2, 1}, {0, 0x1p100f}), v = Tensor::of<float>({2, 1}, {4, 8});
  Tensor out({1, 1});
  run_attention(q, k, v, out, on_engine({.scale = 0x1p40 * std::log(3.0)}));
  EXPECT_NEAR(out.at<float>({0, 0}), 7.0f, 1e-5);
}

TEST_P(EdgeCases, large_values_never_overflow_inside) {
  for (DType type : {DType::f32, DType::f64, DType::bf16}) {
    Inputs inputs = random_inputs({.queries = 6, .keys = 300}, type);
    for (std::int64_t n = 0; n < inputs.v.elements(); ++n) {
      const Dims index = index_of(n, inputs.v.sizes());
      set(inputs.v, index, n % 3 == 0 ? -1e18 : 1e18);
    }
    const Call call = inputs.call(on_engine());
    const Results results = call.run(true);
    expect_forward(call, results);
    GradientTensors gradients = call.gradients(ones_like_out(call), results);
    EXPECT_TRUE(all_finite(gradients.dq) && all_finite(gradients.dk) && all_finite(gradients.dv));
  }
}

TEST_P(EdgeCases, masks_softcap_and_bias_never_turn_a_finite_row_into_nan) {
  for (DType type : float_types) {
    const Inputs inputs = random_inputs({}, type);
    // Every score hugely negative; and beyond the range of the call's own type.
    const Tensor lowest = filled({7}, DType::f32, -3.4e38), lower = filled({7}, DType::f64, -1e300);
    const Tensor slopes = filled({4}, DType::f32, 1e30);
    const Tensor alternating = Tensor::of<float>({7}, {-3e38f, 0, -3e38f, 3e38f, 1e-30f, -1e10f, 0});
    const std::pair<const char*, AttentionOptions> kinds[] = {
        {"lowest bias", {.bias = lowest}},
        {"bias below the type's range", {.bias = lower}},
        {"alternating bias", {.bias = alternating}},
        {"tiny softcap", {.softcap = 1e-30}},
        {"large softcap", {.softcap = 1e30}},
        {"steep alibi", {.alibi_slopes = slopes}},
        {"lowest bias and steep alibi", {.bias = lowest, .alibi_slopes = slopes}},
    };
    for (const auto& [kind, options] : kinds) {
      SCOPED_TRACE(std::string(kind) + " " + name(type));
      const Call call = inputs.call(on_engine(options));
      const Results results = call.run(true);
      EXPECT_TRUE(all_finite(results.out));
      EXPECT_TRUE(all_finite(*results.weights));
      const GradientTensors gradients = call.gradients(ones_like_out(call), results);
      EXPECT_TRUE(all_finite(gradients.dq) && all_finite(gradients.dk) && all_finite(gradients.dv));
    }
  }
}

TEST_P(EdgeCases, large_scores_do_not_overflow_the_exponential) {
  for (DType type : float_types) {
    const Inputs inputs = random_inputs({}, type);
    expect_contract(inputs.call(on_engine({.scale = 400.0})));
    const Tensor sinks = Tensor::of<float>({4}, {200, -200, 90, 0});
    expect_contract(inputs.call(on_engine({.scale = 100.0, .sinks = sinks})));
  }
}

TEST_P(EdgeCases, a_bias_of_minus_infinity_equals_a_false_mask_bit_for_bit) {
  const Shape shape{};
  for (DType type : float_types) {
    const Inputs inputs = random_inputs(shape, type);
    Random random(12);
    Tensor mask({2, 1, 5, 7}, DType::b8), bias({2, 1, 5, 7}, DType::f32), zero({2, 1, 5, 7}, DType::f32);
    fill_bool(mask, random, 0.5);
    for (std::int64_t n = 0; n < mask.elements(); ++n) bias.as<float>()[n] = mask.as<bool>()[n] ? 0.0f : -INFINITY;
    const Call masked = inputs.call(on_engine({.mask = mask, .bias = zero}));
    const Call biased = inputs.call(on_engine({.bias = bias}));
    const Results results = masked.run(true);
    EXPECT_TRUE(same_bits(biased.run(true), results));
    const Tensor grad_out = normal(masked.out_sizes(), type, random);
    EXPECT_TRUE(same_bits(biased.gradients(grad_out, results), masked.gradients(grad_out, results)));
    const Call mask_only = inputs.call(on_engine({.mask = mask}));
    EXPECT_TRUE(same_bits(mask_only.run(true), results));
    const GradientTensors a = mask_only.gradients(grad_out, results), b = biased.gradients(grad_out, results);
    EXPECT_TRUE(same_bits(a.dq, b.dq) && same_bits(a.dk, b.dk) && same_bits(a.dv, b.dv));
  }
}

TEST_P(EdgeCases, plus_infinity_and_nan_in_an_allowed_bias_make_the_row_nan) {
  for (const float bad : {INFINITY, NAN}) {
    const Inputs inputs = random_inputs({});
    Tensor bias({5, 7}), mask = filled({5, 7}, DType::b8, 1);
    bias.at<float>({2, 3}) = bad;
    const Call call = inputs.call(on_engine({.mask = mask, .bias = bias}));
    const Results results = call.run();
    for (std::int64_t i = 0; i < 5; ++i) EXPECT_EQ(std::isnan(results.out.at<float>({1, 2, i, 4})), i == 2);
    mask.at<bool>({2, 3}) = false;
    const Tensor plain({5, 7});
    EXPECT_TRUE(same_bits(call.run(), inputs.call(on_engine({.mask = mask, .bias = plain})).run()));
  }
}

TEST_P(EdgeCases, dropout_of_one_gives_zeros_forward_and_backward) {
  const Inputs inputs = random_inputs({});
  const Call call = inputs.call(on_engine({.dropout = 1.0, .seed = 5}));
  const Results results = call.run(true);
  EXPECT_TRUE(all_zero(results.out));
  expect_forward(call, results);  // weights and lse are those before dropout
  EXPECT_TRUE(all_zero(call.gradients(ones_like_out(call), results)));
}

TEST_P(EdgeCases, key_counts_past_32_bits_work_through_zero_strides) {
  const std::int64_t huge = std::int64_t{1} << 33;
  const Tensor one_key = filled({1, 1, 1, 4}, DType::f32, 0.5), q = filled({1, 1, 2, 4}, DType::f32, 1);
  const ConstTensorView keys = one_key.view().expand({1, 1, huge, 4});
  Tensor out({1, 1, 2, 4}), lse({1, 1, 2});
  run_attention(q, keys, keys, out, on_engine({.causal = Causal::bottom_right, .window = Window{3, 0}}),
                {.lse = lse, .weights = {}});
  EXPECT_TRUE(all_equal(out, 0.5));
  EXPECT_NEAR(lse.at<float>({0, 0, 0}), 1 + std::log(4.0), 1e-6);  // scale 1/2, <q,k> 2, four keys
}

TEST_P(EdgeCases, strides_past_32_bits_reach_the_right_elements) {
  constexpr std::int64_t stride = (std::int64_t{1} << 32) + 8;
  constexpr std::size_t bytes = (stride + 64) * sizeof(float);
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) GTEST_SKIP() << "no address space for 16 GiB";
  const TensorView far(static_cast<float*>(memory), {1, 1, 2, 4}, {0, 0, stride, 1});
  Random random(2);
  fill_normal(far, random);
  const Tensor near = convert(far, DType::f32), q = normal({1, 1, 3, 4}, DType::f32, random);
  EXPECT_TRUE(same_bits(Call{q, far, far, on_engine(), {}}.run(), Call{q, near, near, on_engine(), {}}.run()));
  munmap(memory, bytes);
}

ON_EVERY_ENGINE(EdgeCases);

}  // namespace
}  // namespace headway::test
