// Spans: their edges, their errors, and what bits they promise. The sweep and the fuzzer (tests/fuzz) meet every other
// option with them.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "headway/analysis.h"
#include "support/inputs.h"
#include "support/run.h"

namespace headway::test {
namespace {

constexpr double nan = std::numeric_limits<double>::quiet_NaN();

// [rows, count, 2] with span(row, n) as {begin, end}.
template <class SpanOf>
Tensor spans_of_rows(std::int64_t rows, std::int64_t count, const SpanOf& span) {
  Tensor spans({rows, count, 2}, DType::i64);
  for (std::int64_t i = 0; i < rows; ++i)
    for (std::int64_t n = 0; n < count; ++n) {
      const std::pair<std::int64_t, std::int64_t> one = span(i, n);
      spans.at<std::int64_t>({i, n, 0}) = one.first;
      spans.at<std::int64_t>({i, n, 1}) = one.second;
    }
  return spans;
}

Tensor same_for_all_rows(std::int64_t rows, const std::vector<std::pair<std::int64_t, std::int64_t>>& list) {
  return spans_of_rows(rows, static_cast<std::int64_t>(list.size()),
                       [&](std::int64_t, std::int64_t n) { return list[static_cast<std::size_t>(n)]; });
}

// The tokens' own position in a call with as many keys as queries.
std::pair<std::int64_t, std::int64_t> inside(std::int64_t begin, std::int64_t end, std::int64_t keys) {
  const std::int64_t from = std::clamp<std::int64_t>(begin, 0, keys);
  return {from, std::clamp<std::int64_t>(end, from, keys)};
}

class Spans : public EngineTest {};

TEST_P(Spans, empty_overlapping_and_unsorted_ones_mean_their_union) {
  for (DType type : float_types) {
    const Inputs inputs = random_inputs({}, type);
    for (const auto& list :
         std::vector<std::vector<std::pair<std::int64_t, std::int64_t>>>{{{0, 7}},
                                                                         {{5, 6}, {0, 2}},
                                                                         {{3, 3}, {1, 4}, {7, 7}, {2, 6}},
                                                                         {{0, 0}, {6, 7}},
                                                                         {{4, 5}, {3, 4}, {0, 1}}}) {
      const Tensor spans = same_for_all_rows(5, list);
      expect_contract(inputs.call(on_engine({.spans = spans})));
    }
  }
}

TEST_P(Spans, rows_without_one_see_nothing) {
  const Inputs inputs = random_inputs({});
  for (const Tensor& spans : {Tensor({5, 0, 2}, DType::i64), Tensor({5, 3, 2}, DType::i64)}) {
    const Results results = inputs.call(on_engine({.spans = spans})).run(true);
    for (Real value : read(results.out).values) EXPECT_EQ(value, 0);
    for (Real value : read(*results.weights).values) EXPECT_EQ(value, 0);
    for (Real value : read(results.lse).values) EXPECT_EQ(value, -std::numeric_limits<Real>::infinity());
  }
}

TEST_P(Spans, of_every_head_and_item_are_its_own) {
  const Inputs inputs = random_inputs({});
  Tensor spans({2, 4, 5, 2, 2}, DType::i32);
  each_index({2, 4, 5}, [&](const Dims& at) {
    const std::int64_t begin = (at[0] + 2 * at[1] + at[2]) % 5;
    set(spans, {at[0], at[1], at[2], 0, 0}, static_cast<double>(begin));
    set(spans, {at[0], at[1], at[2], 0, 1}, static_cast<double>(begin + 1));
    set(spans, {at[0], at[1], at[2], 1, 0}, 6);
    set(spans, {at[0], at[1], at[2], 1, 1}, 7);
  });
  expect_contract(inputs.call(on_engine({.spans = spans})));
  expect_contract(inputs.call(on_engine({.spans = spans.view().slice(0, 0, 1)})));
  expect_contract(inputs.call(on_engine({.spans = spans.view().slice(1, 2, 3)})));
  expect_contract(inputs.call(on_engine({.spans = spans.view().slice(0, 1, 2).slice(1, 0, 1)})));
}

TEST_P(Spans, that_draw_a_causal_mask_or_a_window_give_its_bits) {
  for (DType type : float_types) {
    if (GetParam() == Engine::cuda && size_of(type) == 2) continue;  // another kernel may have them there
    const Inputs inputs = random_inputs({.batch = 1, .heads = 2, .kv_heads = 1, .queries = 200, .keys = 300}, type);
    const auto grad = filled(inputs.call({}).out_sizes(), type, 0.5);
    const auto same = [&](const AttentionOptions& options, const Tensor& spans) {
      const Call plain = inputs.call(on_engine(options)), spanned = inputs.call(on_engine({.spans = spans}));
      const Results a = plain.run(true), b = spanned.run(true);
      EXPECT_TRUE(same_bits(a, b));
      if (GetParam() == Engine::cuda && type == DType::f32) return;  // a causal walk is shared out otherwise
      EXPECT_TRUE(same_bits(plain.gradients(grad, a), spanned.gradients(grad, b)));
    };
    same({.causal = Causal::top_left},
         spans_of_rows(200, 1, [](std::int64_t i, std::int64_t) { return inside(0, i + 1, 300); }));
    same({.window = Window{40, 3}},
         spans_of_rows(200, 2, [](std::int64_t i, std::int64_t n) {  // in two halves that touch
           return n == 0 ? inside(i + 100 - 40, i + 90, 300) : inside(i + 90, i + 104, 300);
         }));
  }
}

TEST_P(Spans, of_many_keys_with_holes_keep_the_contract) {
  const auto check = [&](const Inputs& inputs, const Tensor& spans, AttentionOptions options) {
    options.spans = spans;
    expect_contract(inputs.call(on_engine(options)));
  };
  for (DType type : {DType::f32, DType::bf16}) {
    const Inputs inputs =
        random_inputs({.batch = 1, .heads = 2, .kv_heads = 1, .queries = 190, .keys = 700, .head_dim = 16}, type);
    const Tensor window_and_first = spans_of_rows(190, 2, [](std::int64_t i, std::int64_t n) {
      return n == 0 ? inside(0, 4, 700) : inside(i + 510 - 130, i + 511, 700);
    });
    check(inputs, window_and_first, {});
    check(inputs, window_and_first, {.causal = Causal::bottom_right, .softcap = 5.0});
    const Tensor islands = spans_of_rows(190, 3, [](std::int64_t i, std::int64_t n) {
      return inside(n * 230 + i % 7 * 13, n * 230 + i % 7 * 13 + 100 + i % 5, 700);
    });
    check(inputs, islands, {});
    check(inputs, islands, {.window = Window{400, 10}});
  }
}

TEST_P(Spans, of_blocks_of_rows_are_those_of_each_of_them) {
  const Inputs inputs = random_inputs({.batch = 1, .heads = 1, .kv_heads = 1, .queries = 150, .keys = 400});
  const auto span = [](std::int64_t i, std::int64_t n) {
    return inside((i / 64 * 3 + n) * 64, (i / 64 * 3 + n) * 64 + 40, 400);
  };
  const Tensor rows = spans_of_rows(150, 2, span);
  const Tensor blocks = spans_of_rows(3, 2, [&](std::int64_t i, std::int64_t n) { return span(i * 64, n); });
  const Call by_row = inputs.call(on_engine({.spans = rows}));
  const Call by_block = inputs.call(on_engine({.spans = blocks, .span_rows = 64}));
  expect_contract(by_block);
  EXPECT_TRUE(same_bits(by_row.run(true), by_block.run(true)));
}

TEST_P(Spans, hide_what_lies_between_them) {
  for (DType type : float_types) {
    Inputs inputs = random_inputs({.batch = 1, .heads = 2, .kv_heads = 1, .queries = 70, .keys = 500}, type);
    const Tensor spans = same_for_all_rows(70, {{3, 90}, {400, 470}});
    const Call call = inputs.call(on_engine({.spans = spans}));
    const Results before = call.run(true);
    const auto grad = filled(call.out_sizes(), type, 0.5);
    const GradientTensors gradients = call.gradients(grad, before);
    for (Tensor* tensor : {&inputs.k, &inputs.v})
      each_index(tensor->sizes(), [&](const Dims& at) {
        if (at[2] < 3 || (at[2] >= 90 && at[2] < 400) || at[2] >= 470) set(*tensor, at, nan);
      });
    const Call changed = inputs.call(on_engine({.spans = spans}));
    const Results after = changed.run(true);
    EXPECT_TRUE(same_bits(before, after));
    EXPECT_TRUE(same_bits(gradients, changed.gradients(grad, after)));
  }
}

TEST_P(Spans, of_packed_sequences_count_inside_each) {
  Random random(3);
  const Tensor q = normal({9, 2, 8}, DType::f32, random), k = normal({12, 2, 8}, DType::f32, random);
  const Tensor v = normal({12, 2, 8}, DType::f32, random);
  const Tensor spans = spans_of_rows(9, 2, [](std::int64_t i, std::int64_t n) {
    const std::int64_t keys = i < 4 ? 5 : 7;
    return n == 0 ? inside(0, 1, keys) : inside(3, 5, keys);
  });
  expect_contract(
      {.q = q, .k = k, .v = v, .options = on_engine({.spans = spans}), .packing = Packing{{0, 4, 9}, {0, 5, 12}}});
}

TEST_P(Spans, of_few_queries_skip_the_keys_between) {
  for (DType type : float_types) {
    const Inputs inputs = random_inputs({.batch = 2, .heads = 4, .kv_heads = 2, .queries = 1, .keys = 5000}, type);
    const Tensor spans = same_for_all_rows(1, {{0, 4}, {1500, 1501}, {4100, 4900}});
    expect_contract(inputs.call(on_engine({.spans = spans})));
  }
}

ON_EVERY_ENGINE(Spans);

// ---- Plans and errors ----

TEST(SpansPlan, counts_the_pairs_inside_them) {
  const Tensor q({2, 4, 5, 8}), k({2, 4, 7, 8});
  const Tensor spans = same_for_all_rows(5, {{0, 2}, {1, 3}, {5, 7}});
  EXPECT_EQ(explain(q, k, k, {.spans = spans}).pairs, 2 * 4 * 5 * 5);
  EXPECT_EQ(explain(q, k, k, {.causal = Causal::top_left, .spans = spans}).pairs, 2 * 4 * (1 + 2 + 3 + 3 + 3));
  const Tensor blocks = same_for_all_rows(2, {{2, 6}});
  EXPECT_EQ(explain(q, k, k, {.spans = blocks, .span_rows = 4}).pairs, 2 * 4 * 5 * 4);
  EXPECT_NE(explain(q, k, k, {.spans = spans}).options.find("spans"), std::string::npos);
}

struct Legal {
  Tensor q{{2, 6, 5, 8}}, k{{2, 3, 7, 8}}, out{{2, 6, 5, 8}};
  Tensor spans{{2, 1, 5, 3, 2}, DType::i64};
  std::int64_t span_rows = 1;

  template <class Exception>
  testing::AssertionResult is(const std::vector<std::string>& parts) {
    return throws<Exception>("attention", parts,
                             [&] { attention(q, k, k, out, {.spans = spans, .span_rows = span_rows}); });
  }
};

TEST(SpansErrors, bounds_outside_the_keys_or_out_of_order_are_named) {
  for (const auto& [begin, end] : std::vector<std::pair<int, int>>{{-1, 3}, {2, 8}, {4, 3}, {9, 9}}) {
    Legal call;
    set(call.spans, {1, 0, 4, 2, 0}, begin);
    set(call.spans, {1, 0, 4, 2, 1}, end);
    EXPECT_TRUE(call.is<InvalidArgument>({"spans[1, 0, 4, 2] is (" + std::to_string(begin) + ", " +
                                          std::to_string(end) + "), expected 0 <= begin <= end <= 7"}));
  }
}

TEST(SpansErrors, shapes_that_do_not_broadcast_are_named) {
  for (const Dims& sizes : {Dims{2, 1, 4, 3, 2}, Dims{2, 1, 1, 3, 2}, Dims{3, 1, 5, 3, 2}, Dims{2, 3, 5, 3, 2},
                            Dims{2, 1, 5, 3}, Dims{5, 3, 3}, Dims{5, 2}, Dims{2}, Dims{1, 2, 1, 5, 3, 2}}) {
    Legal call;
    call.spans = Tensor(sizes, DType::i64);
    EXPECT_TRUE(call.is<InvalidArgument>({"spans has shape", "(2, 6, 5,"}));
  }
}

TEST(SpansErrors, other_types_are_named) {
  for (DType type : {DType::f32, DType::b8}) {
    Legal call;
    call.spans = Tensor({2, 1, 5, 3, 2}, type);
    EXPECT_TRUE(call.is<TypeMismatch>({"spans has type", "expected i32 or i64"}));
  }
}

TEST(SpansErrors, span_rows_must_be_positive_and_fit_the_entries) {
  Legal call;
  call.span_rows = 0;
  EXPECT_TRUE(call.is<InvalidArgument>({"span_rows is 0"}));
  call.span_rows = 2;
  EXPECT_TRUE(call.is<InvalidArgument>({"spans has shape (2, 1, 5, 3, 2)", "(2, 6, 3, 3, 2)", "span_rows 2"}));
  call.spans = Tensor({2, 1, 1, 3, 2}, DType::i64);
  call.span_rows = std::numeric_limits<std::int64_t>::max();
  EXPECT_NO_THROW(attention(call.q, call.k, call.k, call.out, {.spans = call.spans, .span_rows = call.span_rows}));
  EXPECT_TRUE(throws<InvalidArgument>("attention", {"span_rows is 4", "no spans"},
                                      [&] { attention(call.q, call.k, call.k, call.out, {.span_rows = 4}); }));
}

TEST(SpansErrors, packed_ones_count_inside_their_own_sequence) {
  const Tensor q({9, 2, 8}), starts_q = cu_seqlens({4, 5}), starts_k = cu_seqlens({5, 4});
  Tensor spans = same_for_all_rows(9, {{0, 5}});
  const auto call = [&](std::int64_t span_rows) {
    attention_varlen(q, q, q, starts_q, starts_k, {.spans = spans, .span_rows = span_rows});
  };
  EXPECT_TRUE(throws<InvalidArgument>("attention_varlen", {"spans[0, 0, 4, 0] is (0, 5)", "<= 4"}, [&] { call(1); }));
  EXPECT_TRUE(throws<InvalidArgument>("attention_varlen", {"span_rows is 3", "packed"}, [&] { call(3); }));
}

TEST(SpansErrors, an_output_on_top_of_them_is_named) {
  Tensor memory({1, 1, 4, 2, 2}, DType::i64);
  const Tensor q({1, 1, 4, 4});
  const TensorView out(memory.view().data(), DType::f32, {1, 1, 4, 4});
  EXPECT_TRUE(throws<InvalidArgument>("attention", {"out overlaps spans"},
                                      [&] { attention(q, q, q, out, {.spans = memory}); }));
}

TEST(SpansAnalysis, a_part_of_the_weights_is_that_of_all) {
  const Inputs inputs = random_inputs({.batch = 1, .heads = 2, .kv_heads = 1, .queries = 30, .keys = 50});
  const Tensor spans =
      spans_of_rows(10, 2, [](std::int64_t i, std::int64_t n) { return inside(n * 20 + i, n * 20 + i + 9, 50); });
  const AttentionOptions options{.spans = spans, .span_rows = 3};
  const Tensor all = *inputs.call(options).run(true).weights;
  const Tensor part = weights_in(inputs.q, inputs.k, {7, 21, 5, 41}, options);
  EXPECT_TRUE(
      within(part, read(all.view().slice(2, 7, 21).slice(3, 5, 41)), read(filled({1, 2, 14, 36}, DType::f64, 1e-6))));
}

}  // namespace
}  // namespace headway::test
