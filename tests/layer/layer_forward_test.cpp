// What the layer computes, against the textbook loops of layer_support.h.
#include <thread>

#include "layer_support.h"

namespace headway::test {
namespace {

// Rounding happens after each projection, after attention and at the end; sums have tens of terms.
double tolerance(DType dtype) { return 32 * unit_roundoff(dtype); }

TEST(Layer, agrees_with_the_textbook_for_every_shape_and_type) {
  for (const DType dtype : float_types) {
    for (const auto& [name, config] : config_zoo(dtype)) {
      const MultiHeadAttention layer = random_layer(config);
      const Inputs in = random_inputs(layer.config(), 2, 3, 5);
      const Tensor y = layer.infer(in.queries, in.keys, in.values);
      EXPECT_EQ(y.sizes(), (Dims{2, 3, config.model_dim}));
      EXPECT_EQ(y.dtype(), dtype);
      expect_close(numbers(y), textbook(layer, in).y, tolerance(dtype), name + std::string(" ") + headway::name(dtype));
    }
  }
}

TEST(Layer, self_attention_is_one_tensor_three_times) {
  const MultiHeadAttention layer = random_layer({.model_dim = 8, .heads = 2, .bias = true, .dtype = DType::f64});
  const Tensor x = random_tensor({2, 4, 8}, DType::f64, 7);
  const Inputs copies{x.clone(), x.clone(), x.clone()};
  expect_close(numbers(layer.infer(x, x, x)), textbook(layer, copies).y, 1e-14, "y");
}

TEST(Layer, masks_reach_attention) {
  const MultiHeadAttention layer = random_layer({.model_dim = 6, .heads = 2, .dtype = DType::f64});
  const Inputs in = random_inputs(layer.config(), 2, 3, 5);
  const Tensor lens = Tensor::of<std::int64_t>({2}, {4, 2});
  const Tensor y = layer.infer(in.queries, in.keys, in.values, {.causal = Causal::top_left, .valid_lens = lens});
  const std::int64_t valid[] = {4, 2};
  const TextbookResult expected =
      textbook(layer, in, [&](std::int64_t b, std::int64_t i, std::int64_t j) { return j < valid[b] && j <= i; });
  expect_close(numbers(y), expected.y, 1e-14, "y");
}

TEST(Layer, a_row_with_no_key_gives_the_output_bias) {
  const MultiHeadAttention layer = random_layer({.model_dim = 6, .heads = 2, .bias = true, .dtype = DType::f64});
  const Inputs in = random_inputs(layer.config(), 1, 2, 3);
  const Tensor none = Tensor::of<std::int32_t>({1}, {0});
  const Tensor y = layer.infer(in.queries, in.keys, in.values, {.valid_lens = none});
  EXPECT_TRUE(same_bits(y.view().select(0, 0).select(0, 1), layer.parameter("b_o")));
}

TEST(Layer, returns_weights_and_lse_on_request_without_changing_the_output) {
  for (const DType dtype : float_types) {
    const MultiHeadAttention layer = random_layer({.model_dim = 8, .heads = 4, .kv_heads = 2, .dtype = dtype});
    const Inputs in = random_inputs(layer.config(), 2, 3, 5);
    Tensor weights({2, 4, 3, 5}, dtype);
    Tensor lse({2, 4, 3}, dtype == DType::f64 ? DType::f64 : DType::f32);
    const Tensor y = layer.infer(in.queries, in.keys, in.values, {}, {.lse = lse, .weights = weights});
    expect_close(numbers(weights), textbook(layer, in).weights, tolerance(dtype), "weights");
    EXPECT_GT(largest(numbers(lse)), 0.0);
    EXPECT_TRUE(same_bits(y, layer.infer(in.queries, in.keys, in.values)));
  }
}

TEST(Layer, forward_gives_the_same_bits_as_infer) {
  const Tensor lens = Tensor::of<std::int64_t>({2}, {4, 2});
  const AttentionOptions options{.valid_lens = lens, .dropout = 0.25, .seed = 11};
  for (const DType dtype : float_types) {
    for (const auto& [name, config] : config_zoo(dtype)) {
      MultiHeadAttention layer = random_layer(config);
      const Inputs in = random_inputs(layer.config(), 2, 3, 5);
      Tensor weights({2, config.heads, 3, 5}, dtype),
          lse({2, config.heads, 3}, dtype == DType::f64 ? dtype : DType::f32);
      Tensor weights_again = weights.clone(), lse_again = lse.clone();
      const Tensor inferred = layer.infer(in.queries, in.keys, in.values, options, {.lse = lse, .weights = weights});
      const Tensor y =
          layer.forward(in.queries, in.keys, in.values, options, {.lse = lse_again, .weights = weights_again});
      EXPECT_TRUE(same_bits(y, inferred)) << name;
      EXPECT_TRUE(same_bits(weights, weights_again)) << name;
      EXPECT_TRUE(same_bits(lse, lse_again)) << name;
      EXPECT_TRUE(same_bits(y, layer.forward(in.queries, in.keys, in.values, options))) << name;
    }
  }
}

TEST(Layer, progress_grows_from_projection_to_projection_and_may_stop_the_pass) {
  for (const Engine engine : {Engine::automatic, Engine::reference}) {
    MultiHeadAttention layer = random_layer({.model_dim = 12, .heads = 3, .bias = true});
    const Inputs in = random_inputs(layer.config(), 2, 3, 5);
    std::vector<double> shares;
    const AttentionOptions options{.engine = engine, .progress = [&](double share) {
                                     shares.push_back(share);
                                     return true;
                                   }};
    const Tensor y = layer.forward(in.queries, in.keys, in.values, options);
    EXPECT_GE(shares.size(), 5u);  // four projections and attention
    EXPECT_TRUE(std::is_sorted(shares.begin(), shares.end()));
    EXPECT_DOUBLE_EQ(shares.back(), 1);
    EXPECT_TRUE(same_bits(y, layer.infer(in.queries, in.keys, in.values, {.engine = engine})));
    shares.clear();
    layer.backward(y);
    EXPECT_GE(shares.size(), 5u);
    EXPECT_TRUE(std::is_sorted(shares.begin(), shares.end()));
    EXPECT_DOUBLE_EQ(shares.back(), 1);

    int calls = 0;
    const AttentionOptions stopped{.engine = engine, .progress = [&](double) { return ++calls < 2; }};
    try {
      layer.infer(in.queries, in.keys, in.values, stopped);
      ADD_FAILURE() << "not cancelled";
    } catch (const Cancelled& cancelled) {
      EXPECT_EQ(std::string(cancelled.what()).rfind("MultiHeadAttention::infer: cancelled", 0), 0u) << cancelled.what();
    }
  }
}

TEST(Layer, inputs_without_a_batch_are_a_batch_of_one) {
  const MultiHeadAttention layer = random_layer({.model_dim = 6, .heads = 2, .bias = true});
  const Inputs in = random_inputs(layer.config(), 1, 3, 5);
  const auto row = [](const Tensor& x) { return x.view().select(0, 0); };
  Tensor weights({2, 3, 5}), lse({2, 3});
  const Tensor y = layer.infer(row(in.queries), row(in.keys), row(in.values), {}, {.lse = lse, .weights = weights});
  Tensor batch_weights({1, 2, 3, 5}), batch_lse({1, 2, 3});
  const Tensor batch_y = layer.infer(in.queries, in.keys, in.values, {}, {.lse = batch_lse, .weights = batch_weights});
  EXPECT_TRUE(same_bits(y, row(batch_y)));
  EXPECT_TRUE(same_bits(weights, row(batch_weights)));
  EXPECT_TRUE(same_bits(lse, row(batch_lse)));
}

TEST(Layer, valid_lens_without_a_batch_may_lack_its_batch_axis_too) {
  const MultiHeadAttention layer = random_layer({.model_dim = 6, .heads = 2});
  const Tensor x = random_tensor({3, 6}, DType::f32, 5);
  const Tensor per_row = Tensor::of<std::int64_t>({3}, {1, 2, 3}),
               with_batch = Tensor::of<std::int64_t>({1, 3}, {1, 2, 3});
  const Tensor causal = layer.infer(x, x, x, {.causal = Causal::square});
  EXPECT_TRUE(same_bits(layer.infer(x, x, x, {.valid_lens = per_row}), causal));
  EXPECT_TRUE(same_bits(layer.infer(x, x, x, {.valid_lens = with_batch}), causal));
  const Tensor two = Tensor::of<std::int64_t>({}, {2}), two_with_batch = Tensor::of<std::int64_t>({1}, {2});
  EXPECT_TRUE(
      same_bits(layer.infer(x, x, x, {.valid_lens = two}), layer.infer(x, x, x, {.valid_lens = two_with_batch})));
}

TEST(Layer, any_strides_give_the_same_bits) {
  MultiHeadAttention layer = random_layer({.model_dim = 6, .heads = 2, .key_dim = 4, .bias = true});
  const Inputs in = random_inputs(layer.config(), 2, 3, 5);
  const Tensor expected = layer.infer(in.queries, in.keys, in.values);

  // Queries stored [E,S,B], keys every second column of a wider tensor, values back to front.
  Tensor queries({6, 3, 2});
  const TensorView queries_view = queries.view().permute({2, 1, 0});
  copy(in.queries, queries_view);
  Tensor keys({2, 5, 8});
  const TensorView keys_view = keys.view().unflatten(2, {4, 2}).select(3, 0);
  copy(in.keys, keys_view);
  Tensor values({2, 5, 6});
  const TensorView values_view = values.view().flip(0).flip(1).flip(2);
  copy(in.values, values_view);

  EXPECT_TRUE(same_bits(layer.infer(queries_view, keys_view, values_view), expected));
  const Tensor dy = random_tensor({2, 3, 6}, DType::f32, 9);
  layer.forward(queries_view, keys_view, values_view);
  const Gradients strided = layer.backward(dy);
  layer.forward(in.queries, in.keys, in.values);
  const Gradients plain = layer.backward(dy);
  EXPECT_TRUE(same_bits(strided.keys, plain.keys));
  EXPECT_TRUE(same_bits(strided.parameters.at("W_q"), plain.parameters.at("W_q")));
}

TEST(Layer, a_batch_item_does_not_depend_on_its_neighbours) {
  for (const DType dtype : float_types) {
    const MultiHeadAttention layer = random_layer({.model_dim = 8, .heads = 2, .bias = true, .dtype = dtype});
    const Inputs in = random_inputs(layer.config(), 4, 3, 5);
    const Tensor together = layer.infer(in.queries, in.keys, in.values);
    for (std::int64_t b = 0; b < 4; ++b) {
      const auto item = [&](const Tensor& x) { return x.view().select(0, b); };
      const Tensor alone = layer.infer(item(in.queries), item(in.keys), item(in.values));
      EXPECT_TRUE(same_bits(alone, item(together)));
    }
  }
}

TEST(Layer, keys_that_may_not_be_seen_may_hold_anything) {
  MultiHeadAttention layer = random_layer({.model_dim = 6, .heads = 2, .bias = true});
  Inputs clean = random_inputs(layer.config(), 2, 3, 5);
  Inputs dirty = random_inputs(layer.config(), 2, 3, 5);
  for (const std::int64_t position : {3, 4}) {
    for (std::int64_t e = 0; e < 6; ++e) {
      dirty.keys.at<float>({1, position, e}) = std::numeric_limits<float>::quiet_NaN();
      dirty.values.at<float>({1, position, e}) = std::numeric_limits<float>::infinity();
    }
  }
  const Tensor lens = Tensor::of<std::int64_t>({2}, {5, 3});
  const Tensor dy = random_tensor({2, 3, 6}, DType::f32, 9);
  EXPECT_TRUE(same_bits(layer.forward(clean.queries, clean.keys, clean.values, {.valid_lens = lens}),
                        layer.infer(dirty.queries, dirty.keys, dirty.values, {.valid_lens = lens})));
  const Gradients expected = layer.backward(dy);
  layer.forward(dirty.queries, dirty.keys, dirty.values, {.valid_lens = lens});
  const Gradients found = layer.backward(dy);
  EXPECT_TRUE(same_bits(found.queries, expected.queries));
  EXPECT_TRUE(same_bits(found.keys, expected.keys));
  EXPECT_TRUE(same_bits(found.values, expected.values));
  for (const auto& [name, gradient] : expected.parameters) {
    EXPECT_TRUE(same_bits(found.parameters.at(name), gradient)) << name;
  }
}

TEST(Layer, empty_batches_and_sequences_are_legal) {
  MultiHeadAttention layer = random_layer({.model_dim = 6, .heads = 2, .bias = true});
  for (const auto& [batch, query_len, key_len] : {std::array<std::int64_t, 3>{0, 3, 5}, {2, 0, 5}, {2, 3, 0}}) {
    const Inputs in = random_inputs(layer.config(), batch, query_len, key_len);
    const Tensor y = layer.forward(in.queries, in.keys, in.values);
    EXPECT_EQ(y.sizes(), (Dims{batch, query_len, 6}));
    const Gradients gradients = layer.backward(y);
    EXPECT_EQ(gradients.keys.sizes(), in.keys.sizes());
    EXPECT_EQ(largest(numbers(gradients.parameters.at("W_q"))), 0.0);
  }
}

TEST(Layer, dropout_is_a_function_of_the_seed) {
  const MultiHeadAttention layer = random_layer({.model_dim = 6, .heads = 2});
  const Inputs in = random_inputs(layer.config(), 2, 3, 5);
  const auto with_seed = [&](std::uint64_t seed) {
    return layer.infer(in.queries, in.keys, in.values, {.dropout = 0.5, .seed = seed});
  };
  EXPECT_TRUE(same_bits(with_seed(1), with_seed(1)));
  EXPECT_FALSE(same_bits(with_seed(1), with_seed(2)));
  EXPECT_FALSE(same_bits(with_seed(1), layer.infer(in.queries, in.keys, in.values)));
}

TEST(Layer, several_threads_may_infer_at_once) {
  const MultiHeadAttention layer = random_layer({.model_dim = 16, .heads = 4, .bias = true});
  const Inputs in = random_inputs(layer.config(), 2, 8, 9);
  const Tensor expected = layer.infer(in.queries, in.keys, in.values);
  std::vector<int> equal(4, 0);
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < equal.size(); ++t) {
    threads.emplace_back([&, t] {
      for (int repeat = 0; repeat < 20; ++repeat) {
        equal[t] += same_bits(layer.infer(in.queries, in.keys, in.values), expected);
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(equal, std::vector<int>(4, 20));
}

TEST(Layer, infer_leaves_what_forward_remembers_alone) {
  MultiHeadAttention layer = random_layer({.model_dim = 6, .heads = 2});
  const Inputs in = random_inputs(layer.config(), 2, 3, 5);
  const Inputs other = random_inputs(layer.config(), 1, 2, 2, 900);
  const Tensor dy = random_tensor({2, 3, 6}, DType::f32, 9);
  layer.forward(in.queries, in.keys, in.values);
  const Gradients expected = layer.backward(dy);
  layer.infer(other.queries, other.keys, other.values);
  EXPECT_TRUE(same_bits(layer.backward(dy).queries, expected.queries));
}

TEST(Layer, moves_with_everything_it_remembers) {
  MultiHeadAttention layer = random_layer({.model_dim = 6, .heads = 2});
  const Inputs in = random_inputs(layer.config(), 2, 3, 5);
  const Tensor dy = random_tensor({2, 3, 6}, DType::f32, 9);
  layer.forward(in.queries, in.keys, in.values);
  const Gradients expected = layer.backward(dy);
  MultiHeadAttention moved = std::move(layer);
  EXPECT_TRUE(same_bits(moved.backward(dy).keys, expected.keys));
}

}  // namespace
}  // namespace headway::test
