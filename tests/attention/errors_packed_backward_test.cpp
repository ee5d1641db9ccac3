// The errors of packed calls and of backward calls.
#include <gtest/gtest.h>

#include "support/inputs.h"

namespace headway::test {
namespace {

testing::AssertionResult packed_with(const Tensor& starts_q, const Tensor& starts_k, bool type_error,
                                     const std::vector<std::string>& parts) {
  const Tensor q({5, 6, 8}), k({7, 3, 8}), v({7, 3, 4});
  Tensor out({5, 6, 4});
  const auto run = [&] { attention_varlen(q, k, v, starts_q, starts_k, out); };
  if (type_error) return throws<TypeMismatch>("attention_varlen", parts, run);
  return throws<InvalidArgument>("attention_varlen", parts, run);
}

Tensor starts(std::initializer_list<std::int64_t> values) {
  return Tensor::of<std::int64_t>({static_cast<std::int64_t>(values.size())}, values);
}

TEST(PackedErrors, sequence_starts_are_checked) {
  const Tensor q = starts({0, 2, 5}), k = starts({0, 3, 7});
  EXPECT_TRUE(packed_with(starts({1, 2, 5}), k, false, {"cu_seqlens_q", "1"}));
  EXPECT_TRUE(packed_with(starts({0, 6, 5}), k, false, {"cu_seqlens_q", "6", "5"}));
  EXPECT_TRUE(packed_with(starts({0, 2, 4}), k, false, {"cu_seqlens_q", "4", "5"}));
  EXPECT_TRUE(packed_with(starts({0, 2, 9}), k, false, {"cu_seqlens_q", "9", "5"}));
  EXPECT_TRUE(packed_with(q, starts({0, -1, 7}), false, {"cu_seqlens_k", "-1"}));
  EXPECT_TRUE(packed_with(q, starts({0, 7}), false, {"cu_seqlens"}));
  EXPECT_TRUE(packed_with(starts({}), starts({}), false, {"cu_seqlens"}));
  EXPECT_TRUE(packed_with(Tensor({1, 3}, DType::i64), k, false, {"cu_seqlens_q", "(1, 3)"}));
  EXPECT_TRUE(packed_with(Tensor({3}, DType::f32), k, true, {"cu_seqlens_q", "f32"}));
  EXPECT_TRUE(packed_with(q, Tensor({3}, DType::b8), true, {"cu_seqlens_k", "bool"}));
}

TEST(PackedErrors, plain_causal_needs_every_sequence_square) {
  const Tensor q({5, 1, 4}), starts_q = starts({0, 2, 5}), starts_k = starts({0, 3, 5});
  Tensor out({5, 1, 4});
  EXPECT_TRUE(throws<InvalidArgument>("attention_varlen", {"top_left", "bottom_right"}, [&] {
    attention_varlen(q, q, q, starts_q, starts_k, out, {.causal = Causal::square});
  }));
}

// A legal backward call that each test spoils.
struct LegalBackward {
  Tensor q{{2, 4, 5, 8}}, k{{2, 2, 7, 8}}, v{{2, 2, 7, 3}}, out{{2, 4, 5, 3}}, grad_out{{2, 4, 5, 3}}, lse{{2, 4, 5}};
  Tensor dq{{2, 4, 5, 8}}, dk{{2, 2, 7, 8}}, dv{{2, 2, 7, 3}};
  AttentionOptions options;
  std::optional<TensorView> dbias, dsinks;

  void operator()() {
    attention_backward(grad_out, q, k, v, out, lse, {.dq = dq, .dk = dk, .dv = dv, .dbias = dbias, .dsinks = dsinks},
                       options);
  }

  template <class Exception>
  testing::AssertionResult is(const std::vector<std::string>& parts) {
    return throws<Exception>("attention_backward", parts, [&] { (*this)(); });
  }
};

TEST(BackwardErrors, the_legal_call_is_legal) { EXPECT_NO_THROW(LegalBackward{}()); }

TEST(BackwardErrors, shapes_that_do_not_fit_are_named) {
  const auto spoiled = [](auto spoil) {
    LegalBackward call;
    spoil(call);
    return call;
  };
  EXPECT_TRUE(spoiled([](LegalBackward& c) {
                c.grad_out = Tensor({2, 4, 5, 8});
              }).is<InvalidArgument>({"grad_out", "(2, 4, 5, 8)"}));
  EXPECT_TRUE(spoiled([](LegalBackward& c) {
                c.out = Tensor({2, 4, 6, 3});
              }).is<InvalidArgument>({"out", "(2, 4, 6, 3)"}));
  EXPECT_TRUE(spoiled([](LegalBackward& c) { c.lse = Tensor({2, 4, 7}); }).is<InvalidArgument>({"lse", "(2, 4, 7)"}));
  EXPECT_TRUE(spoiled([](LegalBackward& c) {
                c.dq = Tensor({2, 4, 5, 7});
              }).is<InvalidArgument>({"dq", "(2, 4, 5, 7)"}));
  EXPECT_TRUE(spoiled([](LegalBackward& c) {
                c.dk = Tensor({2, 4, 7, 8});
              }).is<InvalidArgument>({"dk", "(2, 4, 7, 8)"}));
  EXPECT_TRUE(spoiled([](LegalBackward& c) {
                c.dv = Tensor({2, 2, 7, 8});
              }).is<InvalidArgument>({"dv", "(2, 2, 7, 8)"}));
}

TEST(BackwardErrors, types_that_do_not_fit_are_named) {
  const auto spoiled = [](auto spoil) {
    LegalBackward call;
    spoil(call);
    return call;
  };
  EXPECT_TRUE(spoiled([](LegalBackward& c) {
                c.grad_out = Tensor({2, 4, 5, 3}, DType::f16);
              }).is<TypeMismatch>({"grad_out", "f16"}));
  EXPECT_TRUE(spoiled([](LegalBackward& c) {
                c.lse = Tensor({2, 4, 5}, DType::f64);
              }).is<TypeMismatch>({"lse", "f64"}));
  EXPECT_TRUE(spoiled([](LegalBackward& c) {
                c.dk = Tensor({2, 2, 7, 8}, DType::f64);
              }).is<TypeMismatch>({"dk", "f64"}));
}

TEST(BackwardErrors, gradients_of_inputs_that_were_not_given_are_refused) {
  Tensor dbias({5, 7}), dsinks({4});
  LegalBackward call;
  call.dbias = dbias;
  EXPECT_TRUE(call.is<InvalidArgument>({"dbias"}));
  call.dbias = {};
  call.dsinks = dsinks;
  EXPECT_TRUE(call.is<InvalidArgument>({"dsinks"}));
}

TEST(BackwardErrors, a_bias_gradient_has_the_bias_s_own_shape) {
  const Tensor bias({5, 7}), sinks({4});
  Tensor dbias({2, 4, 5, 7}), dsinks({3}), integers({5, 7}, DType::i32);
  LegalBackward call;
  call.options.bias = bias;
  call.options.sinks = sinks;
  call.dbias = dbias;
  EXPECT_TRUE(call.is<InvalidArgument>({"dbias", "(2, 4, 5, 7)", "(5, 7)"}));
  call.dbias = integers;
  EXPECT_TRUE(call.is<TypeMismatch>({"dbias", "i32"}));
  call.dbias = {};
  call.dsinks = dsinks;
  EXPECT_TRUE(call.is<InvalidArgument>({"dsinks", "3", "4"}));
}

TEST(BackwardErrors, a_gradient_may_not_overlap_an_input_or_another_gradient) {
  LegalBackward call;
  const auto run = [&](TensorView dk) {
    attention_backward(call.grad_out, call.q, call.k, call.v, call.out, call.lse,
                       {.dq = call.dq, .dk = dk, .dv = call.dv, .dbias = {}, .dsinks = {}});
  };
  EXPECT_TRUE(throws<InvalidArgument>("attention_backward", {"dk"}, [&] { run(call.k); }));
  const TensorView inside_dq(call.dq.as<float>(), {2, 2, 7, 8});
  EXPECT_TRUE(throws<InvalidArgument>("attention_backward", {"dk"}, [&] { run(inside_dq); }));
  const TensorView repeated(call.dk.as<float>(), {2, 2, 7, 8}, {0, 56, 8, 1});
  EXPECT_TRUE(throws<InvalidArgument>("attention_backward", {"dk"}, [&] { run(repeated); }));
}

}  // namespace
}  // namespace headway::test
