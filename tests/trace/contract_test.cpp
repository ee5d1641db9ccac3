// The last numbers are attention's, and the layer's, whatever the options.
#include <gtest/gtest.h>

#include <cmath>

#include "headway/headway.h"
#include "support/inputs.h"

namespace headway::test {
namespace {

Array sum(Array a, const Array& b) {
  for (std::size_t n = 0; n < a.values.size(); ++n) a.values[n] += b.values[n];
  return a;
}

// The trace within the bounds of float64, and attention within its own type's of the trace.
void expect_same(const Call& call) {
  const Trace found = trace(call.q, call.k, call.v, call.options);
  const Spec spec = call.spec();
  const Forward exact = forward(spec);
  const Array own = error_bound(exact.out, Kind::out, DType::f64);
  const Array result = read(found.result());
  EXPECT_TRUE(within(result.reshaped(exact.out.value.sizes()), exact.out.value, own));
  const Array weights = read(found.step("weights").numbers);
  EXPECT_TRUE(within(weights.reshaped(exact.weights.value.sizes()), exact.weights.value,
                     error_bound(exact.weights, Kind::weights, DType::f64)));
  const Results attended = call.run();
  EXPECT_EQ(found.result().sizes(), attended.out.sizes());
  EXPECT_TRUE(within(read(attended.out).reshaped(exact.out.value.sizes()), result.reshaped(exact.out.value.sizes()),
                     sum(error_bound(exact.out, Kind::out, call.q.dtype()), own)));
}

TEST(TraceContract, agrees_with_attention_over_every_option) {
  const Shape shape;  // 4 heads share 2
  for (const DType type : float_types) {
    const Inputs inputs = random_inputs(shape, type);
    for (const OptionSet& set : all_kinds(shape)) {
      SCOPED_TRACE(set.name);
      SCOPED_TRACE(name(type));
      expect_same(inputs.call(set.options));
    }
  }
}

TEST(TraceContract, agrees_with_attention_without_heads_or_batch) {
  const Inputs inputs = random_inputs({.batch = 3, .heads = 1, .kv_heads = 1});
  const auto without = [](const Tensor& x, int axes) {
    const ConstTensorView heads = x.view().select(1, 0);
    return axes == 1 ? heads : heads.select(0, 1);
  };
  for (const int axes : {1, 2}) {
    Call call{without(inputs.q, axes), without(inputs.k, axes), without(inputs.v, axes), {}, {}};
    expect_same(call);
    call.options.causal = Causal::bottom_right;
    expect_same(call);
  }
}

TEST(TraceContract, takes_empty_axes) {
  for (const Shape& shape : {Shape{.keys = 0}, Shape{.queries = 0}, Shape{.head_dim = 0}, Shape{.value_dim = 0},
                             Shape{.batch = 0}, Shape{.heads = 0, .kv_heads = 0}})
    expect_same(random_inputs(shape).call());
}

TEST(TraceContract, what_forbidden_positions_hold_never_shows) {
  Inputs inputs = random_inputs({.batch = 1, .heads = 1, .kv_heads = 1, .queries = 4, .keys = 4});
  for (std::int64_t d = 0; d < inputs.k.size(3); ++d) inputs.k.at<float>({0, 0, 3, d}) = NAN;
  for (std::int64_t d = 0; d < inputs.v.size(3); ++d) inputs.v.at<float>({0, 0, 3, d}) = NAN;
  const Trace found = trace(inputs.q, inputs.k, inputs.v, {.causal = Causal::square});
  for (std::int64_t i = 0; i < 4; ++i) EXPECT_EQ(std::isnan(get(found.result(), {0, 0, i, 0})), i == 3) << i;
}

// ---- Heads side by side, and layers ----

Tensor random_rows(const Dims& sizes, DType type, std::uint64_t seed) {
  Random random(seed);
  return normal(sizes, type, random);
}

TEST(TraceContract, heads_side_by_side_are_split_and_joined) {
  const Tensor q = random_rows({2, 3, 8}, DType::f64, 1), k = random_rows({2, 5, 4}, DType::f64, 2);
  const Tensor v = random_rows({2, 5, 6}, DType::f64, 3);
  TraceRequest request;
  request.heads = 4;
  request.kv_heads = 2;
  const Trace found = trace(q, k, v, {}, request);
  const auto split = [](auto x, std::int64_t heads) {
    return x.unflatten(2, {heads, x.size(2) / heads}).transpose(1, 2);
  };
  Tensor out({2, 3, 12}, DType::f64);
  attention(split(q.view(), 4), split(k.view(), 2), split(v.view(), 2), split(out.view(), 4));
  ASSERT_EQ(found.result().sizes(), out.sizes());
  EXPECT_TRUE(within(read(found.result()), read(out), Array(out.sizes(), 1e-14L)));
}

TEST(TraceContract, agrees_with_the_layer) {
  for (const bool batched : {true, false}) {
    const MultiHeadAttention layer({.model_dim = 12,
                                    .heads = 4,
                                    .kv_heads = 2,
                                    .head_dim = 5,
                                    .key_dim = 7,
                                    .value_dim = 6,
                                    .bias = true,
                                    .dtype = DType::f64,
                                    .initializer = Initializer::torch_linear,
                                    .seed = 9});
    const Tensor q = random_rows({2, 3, 12}, DType::f64, 1), k = random_rows({2, 5, 7}, DType::f64, 2);
    const Tensor v = random_rows({2, 5, 6}, DType::f64, 3), lens = Tensor::of<std::int64_t>({2}, {4, 0});
    const Tensor row_lens = Tensor::of<std::int64_t>({3}, {0, 2, 5});
    const auto part = [&](const Tensor& x) { return batched ? x.view() : x.view().select(0, 1); };
    const AttentionOptions options{.valid_lens = batched ? lens.view() : row_lens.view(), .dropout = 0.3, .seed = 5};
    const Trace found = trace(layer, part(q), part(k), part(v), options);
    const Tensor y = layer.infer(part(q), part(k), part(v), options);
    ASSERT_EQ(found.result().sizes(), y.sizes());
    EXPECT_EQ(found.steps.back().name, "output");
    EXPECT_TRUE(within(read(found.result()), read(y), Array(y.sizes(), 1e-14L)));
  }
}

TEST(TraceContract, a_layer_of_f32_differs_by_its_rounding_only) {
  const MultiHeadAttention layer({.model_dim = 8, .heads = 2, .seed = 3});
  const Tensor x = random_rows({4, 8}, DType::f32, 1);
  const Trace found = trace(layer, x, x, x, {.causal = Causal::square});
  const Tensor y = layer.infer(x, x, x, {.causal = Causal::square});
  EXPECT_TRUE(within(read(found.result()), read(y), Array(y.sizes(), 1e-5L)));
  EXPECT_EQ(found.steps.front().name, "input");
}

}  // namespace
}  // namespace headway::test
