// The errors of traces, word for word.
#include <gtest/gtest.h>

#include "headway/headway.h"
#include "support/inputs.h"

namespace headway::test {
namespace {

TEST(TraceErrors, large_inputs_are_refused_with_the_limit) {
  const Tensor q({1, 4, 100, 8}), k({1, 4, 100, 8});
  EXPECT_TRUE(throws<InvalidArgument>("trace", {"scores would have shape (1, 4, 100, 100)", "at most 16384"},
                                      [&] { trace(q, k, k); }));
  const Tensor wide({2, 10000});
  EXPECT_TRUE(
      throws<InvalidArgument>("trace", {"query would have shape (2, 10000)"}, [&] { trace(wide, wide, wide); }));
  // An axis of 0 does not make a long one short.
  const Tensor empty({0, 1, 1 << 20, 1});
  EXPECT_TRUE(throws<InvalidArgument>("trace", {"at most 16384"}, [&] { trace(empty, empty, empty); }));
  const Tensor most({1, 1, 128, 4});
  EXPECT_EQ(trace(most, most, most).step("scores").numbers.elements(), trace_limit);
}

TEST(TraceErrors, attention_s_own_checks_come_first) {
  const Tensor q({2, 4}), k({3, 5}), wide({2, 4}, DType::f64);
  EXPECT_TRUE(throws<InvalidArgument>("trace", {"key has head_dim 5, query has 4"}, [&] { trace(q, k, k); }));
  EXPECT_TRUE(throws<TypeMismatch>("trace", {"key has type f64", "f32"}, [&] { trace(q, wide, wide); }));
  EXPECT_TRUE(throws<InvalidArgument>("trace", {"softcap"}, [&] { trace(q, q, q, {.softcap = -1.0}); }));
  EXPECT_TRUE(throws<InvalidArgument>("trace", {"dropout"}, [&] { trace(q, q, q, {.dropout = 0.5}); }));
}

TEST(TraceErrors, memory_on_a_device_is_not_read) {
  const ConstTensorView elsewhere(reinterpret_cast<const void*>(64), DType::f32, {2, 4}, Device{DeviceType::cuda, 0});
  EXPECT_TRUE(throws<Unsupported>("trace", {"query is on cuda:0"}, [&] { trace(elsewhere, elsewhere, elsewhere); }));
}

TEST(TraceErrors, heads_and_weights_must_fit) {
  const Tensor x({2, 6}), four({1, 1, 2, 6}), weight({6, 4}), wrong({5, 4}), bias({3}), list({4});
  const auto with = [&](std::int64_t heads, std::map<std::string, ConstTensorView> weights = {}) {
    return [&, heads, weights] {
      TraceRequest request;
      request.heads = heads;
      request.weights = weights;
      trace(x, x, x, {}, request);
    };
  };
  const auto refused = [&](const char* part, auto run) { EXPECT_TRUE(throws<InvalidArgument>("trace", {part}, run)); };
  refused("query has width 6, expected a multiple of its 4 heads", with(4));
  refused("found heads -1", with(-1));
  refused("W_q has shape (5, 4), expected 6 rows", with(1, {{"W_q", wrong}}));
  refused("b_q is given, but W_q is not", with(1, {{"b_q", bias}}));
  refused("b_v has shape (3,), expected (4,)", with(1, {{"W_v", weight}, {"b_v", bias}}));
  refused("W_k has shape (4,), expected [in, out]", with(1, {{"W_k", list}}));
  refused("found W_x", with(1, {{"W_x", weight}}));
  refused("key has head_dim 6, query has 4", with(1, {{"W_q", weight}}));
  refused("must have 3 axes", [&] {
    TraceRequest request;
    request.heads = 2;
    trace(four, four, four, {}, request);
  });
}

TEST(TraceErrors, numbers_must_be_aligned_to_their_type) {
  alignas(8) const std::uint8_t bytes[40] = {};
  const ConstTensorView askew(bytes + 1, DType::f32, {2, 4});
  TraceRequest request;
  request.heads = 2;
  EXPECT_TRUE(throws<InvalidArgument>("trace", {"query", "aligned"}, [&] { trace(askew, askew, askew); }));
  EXPECT_TRUE(throws<InvalidArgument>("trace", {"query", "aligned"}, [&] { trace(askew, askew, askew, {}, request); }));
}

TEST(TraceErrors, tokens_must_be_as_many_as_positions) {
  const Tensor q({2, 4}), k({3, 4});
  TraceRequest request;
  request.key_tokens = {"a", "b"};
  EXPECT_TRUE(
      throws<InvalidArgument>("trace", {"key_tokens has 2 entries, expected 3"}, [&] { trace(q, k, k, {}, request); }));
  request.key_tokens = {};
  request.query_tokens = {"a"};
  EXPECT_TRUE(throws<InvalidArgument>("trace", {"query_tokens has 1 entries, expected 2"},
                                      [&] { trace(q, k, k, {}, request); }));
}

TEST(TraceErrors, an_unknown_step_is_answered_with_those_there_are) {
  const Tensor x({2, 4});
  const Trace found = trace(x, x, x);
  EXPECT_TRUE(throws<InvalidArgument>("Trace::step", {"scores", "found soup"}, [&] { found.step("soup"); }));
}

}  // namespace
}  // namespace headway::test
