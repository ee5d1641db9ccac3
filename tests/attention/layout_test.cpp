// Views: what the strides say is read and written, and nothing else; and which outputs may share a buffer with an
// input.
#include <gtest/gtest.h>

#include "support/inputs.h"
#include "support/run.h"

namespace headway::test {
namespace {

const std::vector<Layout> input_layouts{Layout::contiguous, Layout::heads_inside, Layout::gaps,
                                        Layout::reversed,   Layout::misaligned,   Layout::repeated};

class Layouts : public EngineTest {};

TEST_P(Layouts, of_an_input_never_change_a_bit) {
  for (DType type : float_types)
    for (Layout layout : input_layouts) {
      SCOPED_TRACE(std::string(name(layout)) + " " + name(type));
      Random random(3);
      const Strided q = normal_strided({2, 4, 9, 10}, type, layout, random);
      const Strided k = normal_strided({2, 2, 13, 10}, type, layout, random);
      const Strided v = normal_strided({2, 2, 13, 7}, type, layout, random);
      const Strided grad_out = normal_strided({2, 4, 9, 7}, type, layout, random);
      const Tensor plain_q = convert(q.view(), type), plain_k = convert(k.view(), type),
                   plain_v = convert(v.view(), type);
      const Tensor plain_grad = convert(grad_out.view(), type);
      const AttentionOptions options = on_engine({.causal = Causal::bottom_right});
      const Call strided{q.view(), k.view(), v.view(), options, {}}, plain{plain_q, plain_k, plain_v, options, {}};
      const Results results = plain.run(true);
      EXPECT_TRUE(same_bits(strided.run(true), results));
      EXPECT_TRUE(same_bits(strided.gradients(grad_out.view(), results), plain.gradients(plain_grad, results)));
    }
}

TEST_P(Layouts, of_an_option_never_change_a_bit) {
  const Inputs inputs = random_inputs({.queries = 9, .keys = 13});
  for (Layout layout : input_layouts) {
    SCOPED_TRACE(name(layout));
    Random random(3);
    Strided mask({2, 4, 9, 13}, DType::b8, layout);
    fill_bool(mask.view(), random, 0.6);
    const Strided bias = normal_strided({2, 4, 9, 13}, DType::f64, layout, random);
    const Strided sinks = normal_strided({4}, DType::f32, layout, random);
    const Tensor plain_mask = convert(mask.view(), DType::b8), plain_bias = convert(bias.view(), DType::f64);
    const Tensor plain_sinks = convert(sinks.view(), DType::f32);
    const auto run = [&](ConstTensorView m, ConstTensorView b, ConstTensorView s) {
      return inputs.call(on_engine({.mask = m, .bias = b, .sinks = s})).run(true);
    };
    EXPECT_TRUE(same_bits(run(mask.view(), bias.view(), sinks.view()), run(plain_mask, plain_bias, plain_sinks)));
  }
}

TEST_P(Layouts, of_an_output_are_written_inside_and_nowhere_else) {
  const Inputs inputs = random_inputs({.queries = 9, .keys = 13});
  const Call call = inputs.call(on_engine());
  const Results expected = call.run(true);
  Random random(9);
  const Tensor grad_out = normal(call.out_sizes(), DType::f32, random);
  const GradientTensors expected_gradients = call.gradients(grad_out, expected);
  for (Layout layout : input_layouts) {
    if (layout == Layout::repeated) continue;
    SCOPED_TRACE(name(layout));
    Strided out(call.out_sizes(), DType::f32, layout), lse(call.lse_sizes(), DType::f32, layout);
    Strided weights(call.weights_sizes(), DType::f32, layout);
    call.forward(out.view(), {.lse = lse.view(), .weights = weights.view()});
    EXPECT_TRUE(same_bits(out.view(), expected.out) && same_bits(lse.view(), expected.lse) &&
                same_bits(weights.view(), *expected.weights));
    EXPECT_TRUE(out.surroundings_intact() && lse.surroundings_intact() && weights.surroundings_intact());
    Strided dq(call.q.sizes(), DType::f32, layout), dk(call.k.sizes(), DType::f32, layout),
        dv(call.v.sizes(), DType::f32, layout);
    call.backward(grad_out, out.view(), lse.view(), {dq.view(), dk.view(), dv.view(), {}, {}});
    EXPECT_TRUE(same_bits(dq.view(), expected_gradients.dq) && same_bits(dk.view(), expected_gradients.dk) &&
                same_bits(dv.view(), expected_gradients.dv));
    EXPECT_TRUE(dq.surroundings_intact() && dk.surroundings_intact() && dv.surroundings_intact());
  }
}

// One buffer [B,S,4,H,D] that holds q, k, v and room for out, as views [B,H,S,D].
TEST_P(Layouts, a_packed_qkv_buffer_is_three_views_and_out_may_be_its_fourth) {
  Random random(7);
  Tensor buffer = normal({2, 6, 4, 3, 8}, DType::f32, random);
  const auto part = [&](std::int64_t n) { return buffer.view().select(2, n).transpose(1, 2); };
  const Tensor q = convert(part(0), DType::f32), k = convert(part(1), DType::f32), v = convert(part(2), DType::f32);
  run_attention(part(0), part(1), part(2), part(3), on_engine());
  EXPECT_TRUE(same_bits(part(3), Call{q, k, v, on_engine(), {}}.run().out));
  EXPECT_TRUE(same_bits(part(0), q) && same_bits(part(1), k) && same_bits(part(2), v));
}

TEST_P(Layouts, interleaved_but_disjoint_elements_are_legal) {
  Random random(7);
  Tensor buffer = normal({5, 16}, DType::f32, random);
  const TensorView pairs = buffer.view().unflatten(1, {8, 2});
  const TensorView odd = pairs.select(2, 1), even = pairs.select(2, 0);
  const Tensor q = convert(odd, DType::f32);
  run_attention(odd, odd, odd, even, on_engine());
  EXPECT_TRUE(same_bits(even, Call{q, q, q, on_engine(), {}}.run().out));
}

TEST_P(Layouts, an_output_may_follow_an_input_without_a_gap) {
  Random random(7);
  Tensor buffer = normal({10, 4}, DType::f64, random);
  const TensorView first = buffer.view().slice(0, 0, 5), second = buffer.view().slice(0, 5, 10);
  EXPECT_NO_THROW(run_attention(first, first, first, second, on_engine()));
  EXPECT_NO_THROW(run_attention(second.flip(0), second, second, first.flip(0), on_engine()));
}

TEST_P(Layouts, an_output_axis_of_size_one_may_have_any_stride) {
  const Tensor q({1, 1, 3, 4});
  Tensor memory({12});
  const TensorView out(memory.as<float>(), {1, 1, 3, 4}, {0, 0, 4, 1});
  EXPECT_NO_THROW(run_attention(q, q, q, out, on_engine()));
}

ON_EVERY_ENGINE(Layouts);

class Overlap : public testing::Test {
 protected:
  static testing::AssertionResult refused(const std::function<void()>& run, const std::vector<std::string>& parts) {
    return throws<InvalidArgument>("attention", parts, run);
  }
  Tensor q{{1, 2, 6, 4}}, k{{1, 2, 6, 4}}, v{{1, 2, 6, 4}}, out{{1, 2, 6, 4}};
};

TEST_F(Overlap, of_out_with_an_input_is_refused) {
  EXPECT_TRUE(refused([&] { attention(q, k, v, q); }, {"out", "query"}));
  EXPECT_TRUE(refused([&] { attention(q, k, v, k); }, {"out", "key"}));
  EXPECT_TRUE(refused([&] { attention(q, k, v, v); }, {"out", "value"}));
  Tensor buffer({1, 2, 9, 4});
  const TensorView front = buffer.view().slice(2, 0, 6), back = buffer.view().slice(2, 3, 9);
  EXPECT_TRUE(refused([&] { attention(front, k, v, back); }, {"out", "query"}));
  EXPECT_TRUE(refused([&] { attention(front, k, v, back.flip(2)); }, {"out", "query"}));
}

TEST_F(Overlap, of_out_with_a_bias_or_sinks_is_refused) {
  const ConstTensorView bias(out.as<float>(), {6, 6}), sinks(out.as<float>() + 47, {1}, {0});
  EXPECT_TRUE(refused([&] { attention(q, k, v, out, {.bias = bias}); }, {"out", "bias"}));
  EXPECT_TRUE(refused([&] { attention(q, k, v, out, {.sinks = sinks.expand({2})}); }, {"out", "sinks"}));
}

TEST_F(Overlap, between_outputs_is_refused) {
  const TensorView lse(out.as<float>(), {1, 2, 6});
  EXPECT_TRUE(refused([&] { attention(q, k, v, out, {}, {.lse = lse, .weights = {}}); }, {"lse"}));
  Tensor large({200});
  const TensorView weights(large.as<float>(), {1, 2, 6, 6}), inside(large.as<float>() + 71, {1, 2, 6, 4});
  EXPECT_TRUE(refused([&] { attention(q, k, v, inside, {}, {.lse = {}, .weights = weights}); }, {"weights"}));
  EXPECT_TRUE(refused(
      [&] {
        attention(q, k, v, out, {}, {.lse = TensorView(q.as<float>(), {1, 2, 6}), .weights = {}});
      },
      {"lse"}));
}

TEST_F(Overlap, of_out_with_itself_is_refused) {
  EXPECT_TRUE(refused([&] { attention(q, k, v, TensorView(out.as<float>(), {1, 2, 6, 4}, {0, 0, 4, 1})); }, {"out"}));
  EXPECT_TRUE(refused([&] { attention(q, k, v, TensorView(out.as<float>(), {1, 2, 6, 4}, {48, 24, 4, 0})); }, {"out"}));
  EXPECT_TRUE(refused([&] { attention(q, k, v, TensorView(out.as<float>(), {1, 2, 6, 4}, {48, 4, 4, 1})); }, {"out"}));
}

TEST_F(Overlap, by_address_alone_is_not_overlap_when_nothing_is_stored) {
  const TensorView empty(q.as<float>(), {1, 2, 0, 4});
  EXPECT_NO_THROW(attention(empty, k, v, TensorView(k.as<float>(), {1, 2, 0, 4})));
}

}  // namespace
}  // namespace headway::test
