// The layer's errors: the operation, what was expected, what was found.
#include "layer_support.h"

namespace headway::test {
namespace {

constexpr std::int64_t huge = std::int64_t{1} << 40;

std::string construction_error(const MultiHeadAttentionConfig& config) {
  return error_text<InvalidArgument>([&] { MultiHeadAttention layer(config); });
}

TEST(LayerErrors, a_config_that_contradicts_itself_names_both_numbers) {
  EXPECT_EQ(construction_error({.model_dim = 10, .heads = 3}),
            "MultiHeadAttention: model_dim 10 is not divisible by heads 3");
  EXPECT_EQ(construction_error({.model_dim = 12, .heads = 6, .kv_heads = 4}),
            "MultiHeadAttention: heads 6 is not divisible by kv_heads 4");
  EXPECT_EQ(construction_error({.model_dim = 12, .heads = 2, .kv_heads = 4}),
            "MultiHeadAttention: heads 2 is not divisible by kv_heads 4");
  EXPECT_EQ(construction_error({}), "MultiHeadAttention: expected model_dim of 1 or more, found 0");
  EXPECT_EQ(construction_error({.model_dim = 4, .heads = 0}),
            "MultiHeadAttention: expected heads of 1 or more, found 0");
  EXPECT_EQ(construction_error({.model_dim = -4}), "MultiHeadAttention: expected model_dim of 1 or more, found -4");
  EXPECT_EQ(construction_error({.model_dim = 4, .kv_heads = -1}),
            "MultiHeadAttention: expected kv_heads of 0 or more, found -1");
  EXPECT_EQ(construction_error({.model_dim = 4, .head_dim = -1}),
            "MultiHeadAttention: expected head_dim of 0 or more, found -1");
  EXPECT_EQ(construction_error({.model_dim = 4, .key_dim = -1}),
            "MultiHeadAttention: expected key_dim of 0 or more, found -1");
  EXPECT_EQ(construction_error({.model_dim = 4, .value_dim = -1}),
            "MultiHeadAttention: expected value_dim of 0 or more, found -1");
}

TEST(LayerErrors, an_integer_layer_is_a_type_error) {
  const std::string found =
      error_text<TypeMismatch>([] { MultiHeadAttention layer({.model_dim = 4, .dtype = DType::i32}); });
  EXPECT_EQ(found, "MultiHeadAttention: expected a dtype of f32, f64, bf16 or f16, found i32");
}

TEST(LayerErrors, a_layer_that_was_moved_from_says_so) {
  const Tensor x({2, 3, 8});
  MultiHeadAttention layer({.model_dim = 8, .heads = 2});
  const MultiHeadAttention moved = std::move(layer);
  const std::string expected = "MultiHeadAttention: expected a layer with parameters, found one that was moved from";
  // NOLINTBEGIN(bugprone-use-after-move)
  EXPECT_EQ(error_text<InvalidArgument>([&] { (void)layer.forward(x, x, x); }), expected);
  EXPECT_EQ(error_text<InvalidArgument>([&] { (void)layer.infer(x, x, x); }), expected);
  EXPECT_EQ(error_text<InvalidArgument>([&] { (void)layer.backward(x); }), expected);
  EXPECT_EQ(error_text<InvalidArgument>([&] { (void)layer.config(); }), expected);
  EXPECT_EQ(error_text<InvalidArgument>([&] { (void)layer.parameter("W_q"); }), expected);
  EXPECT_EQ(error_text<InvalidArgument>([&] { layer.save("unused.safetensors"); }), expected);
  // NOLINTEND(bugprone-use-after-move)
  layer = MultiHeadAttention({.model_dim = 8, .heads = 2});
  EXPECT_NO_THROW((void)layer.forward(x, x, x));
}

TEST(LayerErrors, sizes_past_64_bits_are_refused_without_overflow) {
  EXPECT_EQ(construction_error({.model_dim = huge}),
            "MultiHeadAttention: W_q of shape (1099511627776, 1099511627776) has more than 2^63 bytes");
  EXPECT_EQ(construction_error({.model_dim = 4, .heads = huge, .head_dim = huge}),
            "MultiHeadAttention: heads 1099511627776 times head_dim 1099511627776 is more than 2^63");
  EXPECT_EQ(construction_error({.model_dim = 8, .key_dim = std::numeric_limits<std::int64_t>::max()}),
            "MultiHeadAttention: W_k of shape (9223372036854775807, 8) has more than 2^63 bytes");
}

// Before the projections run: nothing is reported.
TEST(LayerErrors, what_attention_would_refuse_is_refused_before_anything_is_computed) {
  const Tensor x({2, 3, 8});
  MultiHeadAttention layer({.model_dim = 8, .heads = 2});
  int reports = 0;
  AttentionOptions options;
  options.progress = [&](double) { return ++reports > 0; };
  options.engine = Engine::cuda;
  const std::string reason = ": the requested engine cannot run this (cuda: ";
  const auto starts_with = [](const std::string& text, const std::string& start) { return text.rfind(start, 0) == 0; };
  EXPECT_TRUE(starts_with(error_text<Unsupported>([&] { layer.forward(x, x, x, options); }),
                          "MultiHeadAttention::forward" + reason));
  EXPECT_TRUE(starts_with(error_text<Unsupported>([&] { layer.infer(x, x, x, options); }),
                          "MultiHeadAttention::infer" + reason));
  EXPECT_EQ(reports, 0);

  options.engine = Engine::cpu;
  layer.forward(x, x, x, options);
  reports = 0;
  Tensor dbias({3, 3}), dsinks({2});
  EXPECT_EQ(error_text<InvalidArgument>([&] { layer.backward(x, {.bias = dbias}); }),
            "MultiHeadAttention::backward: dbias was asked for, but the call has no bias");
  EXPECT_EQ(error_text<InvalidArgument>([&] { layer.backward(x, {.sinks = dsinks}); }),
            "MultiHeadAttention::backward: dsinks was asked for, but the call has no sinks");
  EXPECT_EQ(reports, 0);
}

TEST(LayerErrors, a_layer_too_large_for_memory_is_out_of_memory_and_the_next_one_works) {
  const std::string found =
      error_text<OutOfMemory>([] { MultiHeadAttention layer({.model_dim = std::int64_t{1} << 25}); });
  EXPECT_EQ(found, "MultiHeadAttention: could not allocate W_q of shape (33554432, 33554432) f32");
  EXPECT_NO_THROW(MultiHeadAttention({.model_dim = 4}));
}

// Calls both forward and infer, which must refuse alike.
template <class Error>
void expect_refused(MultiHeadAttention& layer, ConstTensorView queries, ConstTensorView keys, ConstTensorView values,
                    const std::string& expected, const AttentionOptions& options = {},
                    const AttentionOutputs& outputs = {}) {
  EXPECT_EQ(error_text<Error>([&] { layer.forward(queries, keys, values, options, outputs); }),
            "MultiHeadAttention::forward: " + expected);
  EXPECT_EQ(error_text<Error>([&] { layer.infer(queries, keys, values, options, outputs); }),
            "MultiHeadAttention::infer: " + expected);
}

TEST(LayerErrors, inputs_of_other_widths_ranks_and_lengths_are_refused) {
  MultiHeadAttention layer({.model_dim = 8, .heads = 2, .key_dim = 6, .value_dim = 4});
  const Tensor queries({2, 3, 8}), keys({2, 5, 6}), values({2, 5, 4});
  using E = InvalidArgument;
  expect_refused<E>(layer, Tensor({2, 3, 7}), keys, values,
                    "queries has shape (2, 3, 7), expected the last axis to be model_dim 8");
  expect_refused<E>(layer, queries, Tensor({2, 5, 8}), values,
                    "keys has shape (2, 5, 8), expected the last axis to be key_dim 6");
  expect_refused<E>(layer, queries, keys, Tensor({2, 5, 8}),
                    "values has shape (2, 5, 8), expected the last axis to be value_dim 4");
  expect_refused<E>(layer, Tensor({8}), keys, values,
                    "queries must have 3 axes [batch, length, model_dim], or 2 without batch, found shape (8,)");
  expect_refused<E>(
      layer, Tensor({1, 2, 3, 8}), keys, values,
      "queries must have 3 axes [batch, length, model_dim], or 2 without batch, found shape (1, 2, 3, 8)");
  expect_refused<E>(layer, queries, Tensor({5, 6}), values,
                    "keys has shape (5, 6), queries has (2, 3, 8): expected as many axes");
  expect_refused<E>(layer, queries, keys, Tensor({5, 4}),
                    "values has shape (5, 4), queries has (2, 3, 8): expected as many axes");
  expect_refused<E>(layer, queries, Tensor({1, 5, 6}), values, "keys has batch 1, queries has 2");
  expect_refused<E>(layer, queries, keys, Tensor({3, 5, 4}), "values has batch 3, queries has 2");
  expect_refused<E>(layer, queries, keys, Tensor({2, 4, 4}), "values has length 4, keys has 5");
}

TEST(LayerErrors, inputs_of_another_type_or_device_are_refused) {
  MultiHeadAttention layer({.model_dim = 8, .heads = 2});
  const Tensor x({2, 3, 8}), wide({2, 3, 8}, DType::f64), integers({2, 3, 8}, DType::i64);
  expect_refused<TypeMismatch>(layer, x, wide, x, "keys has type f64, the layer's parameters have f32");
  expect_refused<TypeMismatch>(layer, integers, x, x, "queries has type i64, the layer's parameters have f32");
  const ConstTensorView on_gpu(x.data(), DType::f32, {2, 3, 8}, {DeviceType::cuda, 1});
  expect_refused<InvalidArgument>(layer, x, x, on_gpu, "values is on cuda:1, the layer's parameters are on cpu");
}

TEST(LayerErrors, a_device_that_is_not_there_is_refused_and_the_layer_stays) {
  MultiHeadAttention layer({.model_dim = 8, .heads = 2});
  const std::string found = error_text<Unsupported>([&] { layer.to({DeviceType::cuda, 99}); });
  EXPECT_EQ(found.rfind("tensor: ", 0), 0u) << found;
  EXPECT_NE(found.find("cuda:99"), std::string::npos) << found;
  EXPECT_EQ(layer.device(), Device{});
  const Tensor x({2, 3, 8});
  EXPECT_EQ(layer.infer(x, x, x).sizes(), x.sizes());
}

TEST(LayerErrors, misaligned_inputs_are_refused) {
  MultiHeadAttention layer({.model_dim = 8, .heads = 2});
  const Tensor x({3, 8});
  const ConstTensorView odd(static_cast<const char*>(x.data()) + 2, DType::f32, {2, 8});
  EXPECT_NE(error_text<InvalidArgument>([&] {
              layer.infer(odd, odd, odd);
            }).find("MultiHeadAttention::infer: queries must be aligned to its element's 4 bytes, found address"),
            std::string::npos);
}

TEST(LayerErrors, options_and_outputs_are_checked_before_anything_runs) {
  MultiHeadAttention layer({.model_dim = 8, .heads = 2});
  const Tensor x({2, 3, 8});
  const Tensor lens = Tensor::of<std::int64_t>({2}, {3, 4});
  using E = InvalidArgument;
  expect_refused<E>(layer, x, x, x, "valid_lens[1] is 4, expected 0 to 3", {.valid_lens = lens});
  expect_refused<E>(layer, x, x, x, "dropout 0.5 needs a seed, found none", {.dropout = 0.5});
  Tensor weights({2, 2, 3, 4}), lse({2, 3}), right({2, 2, 3, 3});
  expect_refused<E>(layer, x, x, x, "weights has shape (2, 2, 3, 4), expected (2, 2, 3, 3)", {}, {.weights = weights});
  expect_refused<E>(layer, x, x, x, "lse has shape (2, 3), expected (2, 2, 3)", {}, {.lse = lse});
  const ConstTensorView row = x.view().select(0, 0);
  expect_refused<E>(layer, row, row, row, "weights has shape (2, 2, 3, 3), expected (2, 3, 3)", {}, {.weights = right});
  Tensor wide({2, 2, 3, 3}, DType::f64);
  expect_refused<TypeMismatch>(layer, x, x, x, "weights has type f64, query has f32", {}, {.weights = wide});
}

TEST(LayerErrors, outputs_may_not_overlap_inputs_or_parameters) {
  MultiHeadAttention layer({.model_dim = 8, .heads = 2});
  Tensor x({2, 3, 8});
  const TensorView in_x(x.data(), DType::f32, {2, 2, 3, 3});
  expect_refused<InvalidArgument>(layer, x, x, x, "weights overlaps queries in memory", {}, {.weights = in_x});
  const TensorView in_w(layer.parameter("W_o").data(), DType::f32, {2, 2, 3});
  expect_refused<InvalidArgument>(layer, x, x, x, "lse overlaps W_o in memory", {}, {.lse = in_w});
}

TEST(LayerErrors, backward_needs_a_forward_that_succeeded) {
  MultiHeadAttention layer({.model_dim = 8, .heads = 2});
  const Tensor x({2, 3, 8}), wrong({2, 3, 7});
  const std::string expected = "MultiHeadAttention::backward: expected a forward before it, found none";
  const auto backward = [&] { layer.backward(x); };
  EXPECT_EQ(error_text<InvalidArgument>(backward), expected);
  layer.infer(x, x, x);
  EXPECT_EQ(error_text<InvalidArgument>(backward), expected);
  layer.forward(x, x, x);
  EXPECT_EQ(error_text<InvalidArgument>(backward), "no error");
  EXPECT_THROW(layer.forward(wrong, x, x), InvalidArgument);
  EXPECT_EQ(error_text<InvalidArgument>(backward), expected);
}

TEST(LayerErrors, a_grad_output_unlike_the_output_is_refused_and_the_next_one_works) {
  MultiHeadAttention layer({.model_dim = 8, .heads = 2});
  const Tensor x({2, 3, 8});
  layer.forward(x, x, x);
  EXPECT_EQ(error_text<InvalidArgument>([&] {
              layer.backward(Tensor({2, 4, 8}));
            }),
            "MultiHeadAttention::backward: grad_output has shape (2, 4, 8), expected (2, 3, 8)");
  EXPECT_EQ(error_text<InvalidArgument>([&] { layer.backward(x.view().select(0, 0)); }),
            "MultiHeadAttention::backward: grad_output has shape (3, 8), expected (2, 3, 8)");
  EXPECT_EQ(error_text<TypeMismatch>([&] {
              layer.backward(Tensor({2, 3, 8}, DType::f16));
            }),
            "MultiHeadAttention::backward: grad_output has type f16, the layer's parameters have f32");
  EXPECT_NO_THROW(layer.backward(x));
}

TEST(LayerErrors, inputs_too_large_to_project_are_errors_and_the_next_call_works) {
  MultiHeadAttention layer({.model_dim = 8, .heads = 2});
  const Tensor one({1, 1, 8});
  const ConstTensorView endless = one.view().expand({huge, 4, 8});
  EXPECT_THROW(layer.forward(endless, endless, endless), OutOfMemory);
  EXPECT_THROW(layer.infer(endless, endless, endless), OutOfMemory);
  // What fits into 2^63 bytes going in may not fit once projected.
  MultiHeadAttention wide({.model_dim = 1, .heads = 1, .head_dim = 1024});
  const Tensor narrow({1, 1, 1});
  const ConstTensorView almost = narrow.view().expand({huge, 1 << 20, 1});
  EXPECT_THROW(wide.infer(almost, almost, almost), InvalidArgument);
  EXPECT_NO_THROW(layer.forward(one, one, one));
}

TEST(LayerErrors, an_unknown_parameter_is_named_with_the_known_ones) {
  MultiHeadAttention layer({.model_dim = 8, .heads = 2});
  EXPECT_EQ(error_text<InvalidArgument>([&] { layer.parameter("b_q"); }),
            "MultiHeadAttention::parameter: expected one of W_q, W_k, W_v, W_o, found b_q");
}

TEST(LayerErrors, a_cancelled_forward_leaves_nothing_to_go_backward_from) {
  MultiHeadAttention layer({.model_dim = 8, .heads = 2});
  const Tensor x({2, 3, 8});
  EXPECT_THROW(layer.forward(x, x, x, {.progress = [](double) { return false; }}), Cancelled);
  EXPECT_THROW(layer.backward(x), InvalidArgument);
}

}  // namespace
}  // namespace headway::test
