// Every call that the contract refuses: the class of the error, the operation that its text starts with, and the values
// that it names.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "support/inputs.h"

namespace headway::test {
namespace {

using Parts = std::vector<std::string>;

// A legal call that each test spoils in one way.
struct Legal {
  Tensor q{{2, 6, 5, 8}}, k{{2, 3, 7, 8}}, v{{2, 3, 7, 4}}, out{{2, 6, 5, 4}}, lse{{2, 6, 5}};
  AttentionOptions options;
  AttentionOutputs outputs;

  void operator()() { attention(q, k, v, out, options, outputs); }

  template <class Exception>
  testing::AssertionResult is(const Parts& parts) {
    return throws<Exception>("attention", parts, [&] { (*this)(); });
  }
};

TEST(Errors, the_legal_call_is_legal) { EXPECT_NO_THROW(Legal{}()); }

TEST(Errors, a_number_that_no_enumerator_has) {
  Legal causal;
  causal.options.causal = static_cast<Causal>(77);
  EXPECT_TRUE(causal.is<InvalidArgument>({"causal is 77", "0 to 3"}));
  Legal engine;
  engine.options.engine = static_cast<Engine>(77);
  EXPECT_TRUE(engine.is<InvalidArgument>({"engine is 77", "0 to 3"}));
  Tensor scores({2, 6, 5, 7});
  EXPECT_TRUE(throws<InvalidArgument>("attention_scores", {"stage is 9", "0 to 3"}, [&] {
    const Legal legal;
    attention_scores(legal.q, legal.k, scores, static_cast<Stage>(9));
  }));
}

TEST(Errors, different_head_dims_are_named_with_both_numbers) {
  const Tensor q({1, 1, 2, 64}), k({1, 1, 2, 80}), v({1, 1, 2, 64});
  Tensor out({1, 1, 2, 64});
  try {
    attention(q, k, v, out);
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_STREQ(error.what(), "attention: key has head_dim 80, query has 64");
  }
}

TEST(Errors, shapes_that_do_not_fit_are_named) {
  const auto spoiled = [](auto spoil) {
    Legal call;
    spoil(call);
    return call;
  };
  EXPECT_TRUE(spoiled([](Legal& c) { c.k = Tensor({3, 3, 7, 8}); }).is<InvalidArgument>({"key", "3", "2"}));
  EXPECT_TRUE(spoiled([](Legal& c) { c.v = Tensor({3, 3, 7, 4}); }).is<InvalidArgument>({"value", "3", "2"}));
  EXPECT_TRUE(spoiled([](Legal& c) { c.v = Tensor({2, 3, 9, 4}); }).is<InvalidArgument>({"value", "9", "7"}));
  EXPECT_TRUE(spoiled([](Legal& c) { c.v = Tensor({2, 2, 7, 4}); }).is<InvalidArgument>({"value", "2", "3"}));
  EXPECT_TRUE(spoiled([](Legal& c) { c.k = Tensor({2, 7, 8}); }).is<InvalidArgument>({"key"}));
  EXPECT_TRUE(spoiled([](Legal& c) { c.q = Tensor({2, 2, 6, 5, 8}); }).is<InvalidArgument>({"query", "5"}));
  EXPECT_TRUE(spoiled([](Legal& c) { c.q = Tensor({8}); }).is<InvalidArgument>({"query", "8"}));
  EXPECT_TRUE(spoiled([](Legal& c) { c.out = Tensor({2, 6, 5, 8}); }).is<InvalidArgument>({"out", "(2, 6, 5, 8)"}));
  EXPECT_TRUE(spoiled([](Legal& c) { c.out = Tensor({6, 5, 4}); }).is<InvalidArgument>({"out"}));
}

TEST(Errors, more_rows_than_can_be_counted_are_refused_although_they_have_no_elements) {
  const std::int64_t many = std::int64_t{1} << 40;
  const ConstTensorView q(nullptr, DType::f32, {many, many, 1, 0}), k(nullptr, DType::f32, {many, many, 0, 0});
  const TensorView out(nullptr, DType::f32, {many, many, 1, 0});
  EXPECT_TRUE(
      throws<InvalidArgument>("attention", {"2^63 rows", std::to_string(many)}, [&] { attention(q, k, k, out); }));
}

TEST(Errors, kv_heads_that_do_not_divide_the_heads_are_named) {
  Legal call;
  call.k = Tensor({2, 4, 7, 8});
  call.v = Tensor({2, 4, 7, 4});
  EXPECT_TRUE(call.is<InvalidArgument>({"4", "6"}));
  call.k = Tensor({2, 0, 7, 8});
  call.v = Tensor({2, 0, 7, 4});
  EXPECT_TRUE(call.is<InvalidArgument>({"0", "6"}));
}

TEST(Errors, mixed_types_are_named) {
  Legal call;
  call.k = Tensor({2, 3, 7, 8}, DType::bf16);
  EXPECT_TRUE(call.is<TypeMismatch>({"bf16", "f32"}));
  call = Legal();
  call.v = Tensor({2, 3, 7, 4}, DType::f64);
  EXPECT_TRUE(call.is<TypeMismatch>({"f64", "f32"}));
  call = Legal();
  call.out = Tensor({2, 6, 5, 4}, DType::f16);
  EXPECT_TRUE(call.is<TypeMismatch>({"out", "f16", "f32"}));
}

TEST(Errors, inputs_that_are_not_floating_are_refused) {
  for (DType type : {DType::i32, DType::i64, DType::b8}) {
    Legal call;
    call.q = Tensor({2, 6, 5, 8}, type);
    call.k = Tensor({2, 3, 7, 8}, type);
    call.v = Tensor({2, 3, 7, 4}, type);
    call.out = Tensor({2, 6, 5, 4}, type);
    EXPECT_TRUE(call.is<TypeMismatch>({name(type)}));
  }
}

TEST(Errors, a_mask_must_be_bool_and_broadcast) {
  for (DType type : {DType::i32, DType::i64, DType::f32}) {
    Legal call;
    const Tensor mask({5, 7}, type);
    call.options.mask = mask;
    EXPECT_TRUE(call.is<TypeMismatch>({"mask", name(type), "bool"}));
  }
  for (const Dims& sizes : {Dims{5, 6}, Dims{7, 5}, Dims{3, 1, 1}, Dims{1, 2, 6, 5, 7}, Dims{0}}) {
    Legal call;
    const Tensor mask(sizes, DType::b8);
    call.options.mask = mask;
    EXPECT_TRUE(call.is<InvalidArgument>({"mask"})) << sizes;
  }
}

TEST(Errors, a_bias_must_be_floating_and_broadcast) {
  for (DType type : {DType::i32, DType::b8}) {
    Legal call;
    const Tensor bias({5, 7}, type);
    call.options.bias = bias;
    EXPECT_TRUE(call.is<TypeMismatch>({"bias", name(type)}));
  }
  Legal call;
  const Tensor bias({2, 6, 5, 6});
  call.options.bias = bias;
  EXPECT_TRUE(call.is<InvalidArgument>({"bias", "(2, 6, 5, 6)"}));
}

TEST(Errors, plain_causal_needs_a_square_and_names_the_two_choices) {
  Legal call;
  call.options.causal = Causal::square;
  EXPECT_TRUE(call.is<InvalidArgument>({"top_left", "bottom_right", "5", "7"}));
}

TEST(Errors, a_negative_window_is_named) {
  Legal call;
  call.options.window = Window{-1, 0};
  EXPECT_TRUE(call.is<InvalidArgument>({"window", "-1"}));
  call.options.window = Window{{}, -7};
  EXPECT_TRUE(call.is<InvalidArgument>({"window", "-7"}));
}

TEST(Errors, a_valid_length_outside_of_the_keys_is_named_with_its_place) {
  Legal call;
  Tensor lens = Tensor::of<std::int64_t>({2}, {7, 8});
  call.options.valid_lens = lens;
  EXPECT_TRUE(call.is<InvalidArgument>({"valid_lens", "8", "1", "7"}));
  lens.at<std::int64_t>({1}) = -3;
  EXPECT_TRUE(call.is<InvalidArgument>({"valid_lens", "-3"}));
  Tensor rows({2, 5}, DType::i32);
  rows.at<std::int32_t>({1, 4}) = 99;
  call.options.valid_lens = rows;
  EXPECT_TRUE(call.is<InvalidArgument>({"valid_lens", "99", "1", "4"}));
}

// Where adding anything to them overflows.
TEST(Errors, lengths_at_the_ends_of_64_bits_are_refused_and_windows_there_are_wide) {
  constexpr std::int64_t lowest = std::numeric_limits<std::int64_t>::min();
  constexpr std::int64_t highest = std::numeric_limits<std::int64_t>::max();
  for (const std::int64_t length : {lowest, lowest + 1, highest}) {
    const Tensor lens = Tensor::of<std::int64_t>({2}, {1, length});
    const Tensor rows = Tensor::of<std::int64_t>({2, 5}, {1, 1, 1, 1, 1, 1, 1, 1, 1, length});
    for (const Causal causal : {Causal::none, Causal::top_left, Causal::bottom_right}) {
      Legal call;
      call.options.causal = causal;
      call.options.valid_lens = lens;
      EXPECT_TRUE(call.is<InvalidArgument>({"valid_lens[1]", std::to_string(length)}));
      call.options.valid_lens = rows;
      EXPECT_TRUE(call.is<InvalidArgument>({"valid_lens[1, 4]", std::to_string(length)}));
      call.options.valid_lens = {};
      call.options.query_lens = lens;
      EXPECT_TRUE(call.is<InvalidArgument>({"query_lens[1]", std::to_string(length)}));
    }
    const Tensor starts = Tensor::of<std::int64_t>({3}, {0, length, 5}), packed({5, 6, 8});
    Tensor out({5, 6, 8});
    EXPECT_TRUE(throws<InvalidArgument>("attention_varlen", {"cu_seqlens_q[1]", std::to_string(length)},
                                        [&] { attention_varlen(packed, packed, packed, starts, starts, out); }));
  }
  for (const Causal causal : {Causal::none, Causal::top_left, Causal::bottom_right}) {
    Legal call, unlimited;
    call.options = {.causal = causal, .window = Window{highest, highest}};
    call();
    unlimited.options = {.causal = causal};
    unlimited();
    EXPECT_EQ(read(call.out.view()).values, read(unlimited.out.view()).values);
  }
}

TEST(Errors, lengths_are_integers_of_the_right_shape) {
  Legal call;
  const Tensor floating({2}), three({3}, DType::i64), wide({2, 7}, DType::i64), flags({2}, DType::b8);
  call.options.valid_lens = floating;
  EXPECT_TRUE(call.is<TypeMismatch>({"valid_lens", "f32"}));
  call.options.valid_lens = flags;
  EXPECT_TRUE(call.is<TypeMismatch>({"valid_lens", "bool"}));
  call.options.valid_lens = three;
  EXPECT_TRUE(call.is<InvalidArgument>({"valid_lens", "3"}));
  call.options.valid_lens = wide;
  EXPECT_TRUE(call.is<InvalidArgument>({"valid_lens", "(2, 7)"}));
  call.options.valid_lens = {};
  call.options.query_lens = floating;
  EXPECT_TRUE(call.is<TypeMismatch>({"query_lens", "f32"}));
  call.options.query_lens = three;
  EXPECT_TRUE(call.is<InvalidArgument>({"query_lens", "3"}));
}

TEST(Errors, a_query_length_outside_of_the_queries_is_named) {
  Legal call;
  const Tensor above = Tensor::of<std::int32_t>({2}, {5, 6}), below = Tensor::of<std::int32_t>({2}, {-1, 5});
  call.options.query_lens = above;
  EXPECT_TRUE(call.is<InvalidArgument>({"query_lens", "6", "5"}));
  call.options.query_lens = below;
  EXPECT_TRUE(call.is<InvalidArgument>({"query_lens", "-1"}));
}

TEST(Errors, numbers_outside_of_their_range_are_named) {
  const auto with = [](auto set) {
    Legal call;
    set(call.options);
    return call;
  };
  for (const double bad : {NAN, INFINITY, -INFINITY}) {
    EXPECT_TRUE(with([&](AttentionOptions& o) { o.scale = bad; }).is<InvalidArgument>({"scale"}));
    EXPECT_TRUE(with([&](AttentionOptions& o) { o.softcap = bad; }).is<InvalidArgument>({"softcap"}));
    EXPECT_TRUE(with([&](AttentionOptions& o) { o.dropout = bad, o.seed = 1; }).is<InvalidArgument>({"dropout"}));
  }
  EXPECT_TRUE(with([](AttentionOptions& o) { o.scale = INFINITY; }).is<InvalidArgument>({"inf"}));
  EXPECT_TRUE(with([](AttentionOptions& o) { o.softcap = 0; }).is<InvalidArgument>({"softcap", "0"}));
  EXPECT_TRUE(with([](AttentionOptions& o) { o.softcap = -2.5; }).is<InvalidArgument>({"softcap", "-2.5"}));
  EXPECT_TRUE(with([](AttentionOptions& o) { o.dropout = 1.5, o.seed = 1; }).is<InvalidArgument>({"dropout", "1.5"}));
  EXPECT_TRUE(
      with([](AttentionOptions& o) { o.dropout = -0.25, o.seed = 1; }).is<InvalidArgument>({"dropout", "-0.25"}));
  EXPECT_TRUE(with([](AttentionOptions& o) { o.dropout = 0.5; }).is<InvalidArgument>({"dropout", "0.5", "seed"}));
}

TEST(Errors, slopes_and_sinks_are_floating_and_one_per_head) {
  const Tensor three({3}), integers({6}, DType::i32), two_axes({1, 6});
  Legal call;
  call.options.alibi_slopes = three;
  EXPECT_TRUE(call.is<InvalidArgument>({"alibi_slopes", "3", "6"}));
  call.options.alibi_slopes = integers;
  EXPECT_TRUE(call.is<TypeMismatch>({"alibi_slopes", "i32"}));
  call.options.alibi_slopes = {};
  call.options.sinks = three;
  EXPECT_TRUE(call.is<InvalidArgument>({"sinks", "3", "6"}));
  call.options.sinks = two_axes;
  EXPECT_TRUE(call.is<InvalidArgument>({"sinks", "(1, 6)"}));
  call.options.sinks = integers;
  EXPECT_TRUE(call.is<TypeMismatch>({"sinks", "i32"}));
}

TEST(Errors, optional_outputs_have_their_shape_and_type) {
  Tensor short_lse({2, 6, 4}), wide_lse({2, 6, 5}, DType::f64), weights({2, 6, 5, 8}), half({2, 6, 5, 7}, DType::f16);
  Legal call;
  call.outputs.lse = short_lse;
  EXPECT_TRUE(call.is<InvalidArgument>({"lse", "(2, 6, 4)"}));
  call.outputs.lse = wide_lse;
  EXPECT_TRUE(call.is<TypeMismatch>({"lse", "f64", "f32"}));
  call.outputs = {};
  call.outputs.weights = weights;
  EXPECT_TRUE(call.is<InvalidArgument>({"weights", "(2, 6, 5, 8)"}));
  call.outputs.weights = half;
  EXPECT_TRUE(call.is<TypeMismatch>({"weights", "f16", "f32"}));
}

TEST(Errors, an_engine_that_is_not_there_is_unsupported) {
  const std::vector<Engine> there = engines();
  for (Engine engine : {Engine::reference, Engine::cpu, Engine::cuda}) {
    if (std::find(there.begin(), there.end(), engine) != there.end()) continue;
    Legal call;
    call.options.engine = engine;
    EXPECT_TRUE(call.is<Unsupported>({name(engine)}));
  }
}

TEST(Errors, a_refused_call_writes_nothing) {
  Legal call;
  call.out = filled({2, 6, 5, 4}, DType::f32, 42);
  call.options.softcap = -1;
  EXPECT_THROW(call(), InvalidArgument);
  EXPECT_TRUE(same_bits(call.out, filled({2, 6, 5, 4}, DType::f32, 42)));
}

TEST(Errors, sizes_past_two_to_the_63_bytes_are_refused) {
  const Tensor one({1, 1, 1, 1});
  const auto run = [&] {
    const std::int64_t large = std::int64_t{1} << 31;
    const ConstTensorView huge = one.view().expand({1, large, large, 1});
    Tensor out({1, 1});
    attention(huge, huge, huge, out);
  };
  EXPECT_THROW(run(), InvalidArgument);
}

TEST(Errors, every_operation_names_itself) {
  Legal call;
  Tensor scores({2, 6, 5, 7}), bad_k({2, 3, 7, 9});
  const Tensor starts_q = Tensor::of<std::int64_t>({2}, {0, 5}), starts_k = Tensor::of<std::int64_t>({2}, {0, 7});
  EXPECT_TRUE(
      throws<InvalidArgument>("attention_scores", {"9", "8"}, [&] { attention_scores(call.q, bad_k, scores); }));
  EXPECT_TRUE(throws<InvalidArgument>("explain", {"9", "8"}, [&] { explain(call.q, bad_k, call.v); }));
  EXPECT_TRUE(
      throws<InvalidArgument>("explain", {"9", "8"}, [&] { explain(call.q, bad_k, call.v, {}, {.backward = true}); }));
  Tensor dq({2, 6, 5, 8});
  EXPECT_TRUE(throws<InvalidArgument>("attention_backward", {"9", "8"}, [&] {
    attention_backward(call.out, call.q, bad_k, call.v, call.out, call.lse,
                       {.dq = dq, .dk = {}, .dv = {}, .dbias = {}, .dsinks = {}});
  }));
  Tensor q({5, 6, 8}), k({7, 3, 9}), v({7, 3, 4}), out({5, 6, 4}), lse({6, 5}), dq3({5, 6, 8});
  EXPECT_TRUE(throws<InvalidArgument>("attention_varlen", {"9", "8"},
                                      [&] { attention_varlen(q, k, v, starts_q, starts_k, out); }));
  EXPECT_TRUE(throws<InvalidArgument>("attention_varlen_backward", {"9", "8"}, [&] {
    attention_varlen_backward(out, q, k, v, out, lse, starts_q, starts_k,
                              {.dq = dq3, .dk = {}, .dv = {}, .dbias = {}, .dsinks = {}});
  }));
}

TEST(Errors, scores_have_the_matrix_s_shape_and_type) {
  Legal call;
  Tensor narrow({2, 6, 5, 6}), half({2, 6, 5, 7}, DType::f16);
  EXPECT_TRUE(
      throws<InvalidArgument>("attention_scores", {"(2, 6, 5, 6)"}, [&] { attention_scores(call.q, call.k, narrow); }));
  EXPECT_TRUE(
      throws<TypeMismatch>("attention_scores", {"f16", "f32"}, [&] { attention_scores(call.q, call.k, half); }));
}

}  // namespace
}  // namespace headway::test
