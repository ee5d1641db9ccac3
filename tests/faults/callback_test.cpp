// A progress callback is the caller's code in the middle of a call: it may call the library, throw, or stop the call at
// any report.
#include <gtest/gtest.h>

#include <functional>
#include <stdexcept>

#include "engines/cpu/scratch.h"
#include "support.h"

namespace headway::test {
namespace {

TEST(Scratch, in_use_is_never_handed_out_again) {
  cpu::CallScratch call;
  cpu::TaskScratch task;
  void* of_call = call.at_least(1000);
  void* of_task = task.at_least(1000);
  {
    cpu::CallScratch inner_call;
    cpu::TaskScratch inner_task;
    EXPECT_NE(inner_call.at_least(500), of_call);
    EXPECT_NE(inner_task.at_least(500), of_task);
  }
  cpu::CallScratch later_call;
  cpu::TaskScratch later_task;
  EXPECT_NE(later_call.at_least(500), of_call);
  EXPECT_NE(later_task.at_least(500), of_task);
  EXPECT_EQ(call.data(), of_call);
  EXPECT_EQ(task.data(), of_task);
}

// Calls of every kind, as large as the callback's caller wants.
void call_everything(std::int64_t keys) {
  const Tensor q = numbers({1, 4, 2, 32}, DType::f32, 7), k = numbers({1, 4, keys, 32}, DType::f32, 8);
  Tensor out(q.sizes()), lse({1, 4, 2}), dq(q.sizes()), dk(k.sizes()), dv(k.sizes());
  attention(q, k, k, out, {}, {.lse = lse});
  attention_backward(q, q, k, k, out, lse, {.dq = dq, .dk = dk, .dv = dv});
  MultiHeadAttention layer({.model_dim = 16, .heads = 2});
  const Tensor x = numbers({1, keys, 16});
  layer.forward(x, x, x);
  layer.backward(Tensor({1, keys, 16}));  // of zeros: every row is skipped
}

struct CallInside : testing::TestWithParam<int> {
  const ThreadCount threads{GetParam()};
};

TEST_P(CallInside, decode_changes_nothing) {
  const Tensor q = numbers({1, 4, 1, 64}), k = numbers({1, 4, 4096, 64}, DType::f32, 2);
  Tensor expected(q.sizes()), out(q.sizes()), weights({1, 4, 1, 4096}), expected_weights(weights.sizes());
  attention(q, k, k, expected, {}, {.weights = expected_weights});
  for (const std::int64_t keys : {std::int64_t{40}, std::int64_t{9000}}) {
    int calls = 0;
    const Progress progress = [&](double) {
      ++calls;
      call_everything(keys);
      return true;
    };
    attention(q, k, k, out, {.progress = progress}, {.weights = weights});
    EXPECT_GT(calls, 0);
    EXPECT_TRUE(same_bits(out, expected) && same_bits(weights, expected_weights)) << keys;
  }
}

TEST_P(CallInside, attention_and_its_backward_changes_nothing) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const Tensor q = numbers({1, 2, 700, 32}, dtype);
    Tensor expected(q.sizes(), dtype), out(q.sizes(), dtype), lse({1, 2, 700});
    Tensor dq(q.sizes(), dtype), dk(q.sizes(), dtype), dv(q.sizes(), dtype);
    Tensor expected_dq(q.sizes(), dtype), expected_dk(q.sizes(), dtype), expected_dv(q.sizes(), dtype);
    attention(q, q, q, expected, {}, {.lse = lse});
    attention_backward(q, q, q, q, expected, lse, {.dq = expected_dq, .dk = expected_dk, .dv = expected_dv});
    int calls = 0;
    const AttentionOptions options{.progress = [&](double) {
      ++calls;
      call_everything(700);
      return true;
    }};
    attention(q, q, q, out, options, {.lse = lse});
    attention_backward(q, q, q, q, out, lse, {.dq = dq, .dk = dk, .dv = dv}, options);
    EXPECT_GT(calls, 1);
    EXPECT_TRUE(same_bits(out, expected));
    EXPECT_TRUE(same_bits(dq, expected_dq) && same_bits(dk, expected_dk) && same_bits(dv, expected_dv));
  }
}

// Large enough to be reported on while a product's tasks run.
TEST_P(CallInside, a_layer_changes_nothing) {
  const Tensor x = numbers({1, 512, 512}, DType::f64), dy = numbers({1, 512, 512}, DType::f64, 2);
  MultiHeadAttention layer({.model_dim = 512, .heads = 8, .dtype = DType::f64});
  layer.forward(x, x, x);
  const Gradients expected = layer.backward(dy);
  int calls = 0;
  layer.forward(x, x, x, {.progress = [&](double) {
                  ++calls;
                  call_everything(600);
                  return true;
                }});
  const Gradients found = layer.backward(dy);
  EXPECT_GT(calls, 6);
  for (const auto& [name, gradient] : expected.parameters) {
    EXPECT_TRUE(same_bits(gradient, found.parameters.at(name))) << name;
  }
  EXPECT_TRUE(same_bits(expected.queries, found.queries) && same_bits(expected.values, found.values));
}

INSTANTIATE_TEST_SUITE_P(Threads, CallInside, testing::Values(1, 3),
                         [](const auto& one) { return "on_" + std::to_string(one.param); });

// Runs `pass` with a callback that ends it at its first report, its second, and so on; after each the pass without a
// callback must be right. Returns at how many reports it was ended.
int end_at_each_report(const std::function<void(const Progress&)>& pass, const std::function<bool()>& is_right,
                       bool throws) {
  for (int ended = 0;; ++ended) {
    int report = 0;
    const Progress progress = [&](double) {
      if (report++ == ended && throws) {
        throw std::out_of_range("the caller's own");
      }
      return report <= ended;
    };
    try {
      pass(progress);
      return ended;
    } catch (const Cancelled&) {
      EXPECT_FALSE(throws);
    } catch (const std::out_of_range&) {
      EXPECT_TRUE(throws);
    }
    EXPECT_TRUE(is_right()) << "after the end at report " << ended;
  }
}

TEST(CallbacksThatEndACall, leave_a_working_library_wherever_they_do) {
  const ThreadCount three(3);
  const Tensor q = numbers({1, 2, 300, 32}), one = numbers({1, 2, 1, 32}), x = numbers({1, 60, 32});
  Tensor out(q.sizes()), lse({1, 2, 300}), dq(q.sizes()), dk(q.sizes()), dv(q.sizes()), out_one(one.sizes());
  MultiHeadAttention layer({.model_dim = 32, .heads = 2});
  Tensor y;
  Gradients gradients;
  const auto pass = [&](const Progress& progress) {
    attention(q, q, q, out, {.progress = progress}, {.lse = lse});
    attention_backward(q, q, q, q, out, lse, {.dq = dq, .dk = dk, .dv = dv}, {.progress = progress});
    attention(one, q, q, out_one, {.progress = progress});
    y = layer.forward(x, x, x, {.progress = progress});
    gradients = layer.backward(x);
  };
  const auto bits = [&] {
    return bytes_of(out) + bytes_of(dq) + bytes_of(dk) + bytes_of(out_one) + bytes_of(y) +
           bytes_of(gradients.parameters.at("W_v")) + bytes_of(gradients.keys);
  };
  pass({});
  const std::string expected = bits();
  for (const bool throws : {false, true}) {
    const int ends = end_at_each_report(
        pass,
        [&] {
          pass({});
          return bits() == expected;
        },
        throws);
    EXPECT_GT(ends, 8) << "one for each stage at least";
  }
}

}  // namespace
}  // namespace headway::test
