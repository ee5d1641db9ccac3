// Every step of small traces, worked out by hand.
#include <gtest/gtest.h>

#include <cmath>

#include "headway/headway.h"
#include "support/array.h"

namespace headway::test {
namespace {

std::vector<std::string> names(const Trace& trace) {
  std::vector<std::string> result;
  for (const TraceStep& step : trace.steps) result.push_back(step.name);
  return result;
}

void expect_step(const Trace& trace, const std::string& name, const Dims& sizes, const std::vector<double>& expected) {
  const Tensor& found = trace.step(name).numbers;
  ASSERT_EQ(found.sizes(), sizes) << name;
  ASSERT_EQ(found.elements(), static_cast<std::int64_t>(expected.size())) << name;
  for (std::size_t n = 0; n < expected.size(); ++n) {
    const double number = found.as<double>()[n];
    if (std::isfinite(expected[n])) {
      EXPECT_NEAR(number, expected[n], 1e-15 * std::fmax(1, std::fabs(expected[n]))) << name << " " << n;
    } else {
      EXPECT_EQ(number, expected[n]) << name << " " << n;
    }
  }
}

// Document 002's example: two tokens, identity weights, two heads.
TEST(TraceByHand, two_heads_of_the_document_s_example) {
  const Tensor x = Tensor::of<double>({2, 4}, {1, 2, 3, 4, 5, 6, 7, 8});
  const Tensor eye = Tensor::of<double>({4, 4}, {1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1});
  TraceRequest request;
  request.heads = 2;
  request.weights = {{"W_q", eye}, {"W_k", eye}, {"W_v", eye}};
  const Trace found = trace(x, x, x, {}, request);
  EXPECT_EQ(names(found), (std::vector<std::string>{
                              "input", "W_q", "W_k", "W_v", "projected queries", "projected keys", "projected values",
                              "queries by head", "keys by head", "values by head", "scores", "scaled scores",
                              "row maxima", "exponentials", "row sums", "weights", "weighted sums", "joined heads"}));
  expect_step(found, "projected keys", {2, 4}, {1, 2, 3, 4, 5, 6, 7, 8});
  expect_step(found, "queries by head", {2, 2, 2}, {1, 2, 5, 6, 3, 4, 7, 8});
  // <(1,2), (5,6)> = 17 and so on
  expect_step(found, "scores", {2, 2, 2}, {5, 17, 17, 61, 25, 53, 53, 113});
  const double root = std::sqrt(2.0);
  expect_step(found, "scaled scores", {2, 2, 2},
              {5 / root, 17 / root, 17 / root, 61 / root, 25 / root, 53 / root, 53 / root, 113 / root});
  expect_step(found, "row maxima", {2, 2}, {17 / root, 61 / root, 53 / root, 113 / root});
  const double a = std::exp(-12 / root), b = std::exp(-44 / root), c = std::exp(-28 / root), d = std::exp(-60 / root);
  expect_step(found, "exponentials", {2, 2, 2}, {a, 1, b, 1, c, 1, d, 1});
  expect_step(found, "row sums", {2, 2}, {1 + a, 1 + b, 1 + c, 1 + d});
  expect_step(found, "weights", {2, 2, 2},
              {a / (1 + a), 1 / (1 + a), b / (1 + b), 1 / (1 + b), c / (1 + c), 1 / (1 + c), d / (1 + d), 1 / (1 + d)});
  // Key 1's value is key 0's plus 4.
  const std::vector<double> out = {1 + 4 / (1 + a), 2 + 4 / (1 + a), 3 + 4 / (1 + c), 4 + 4 / (1 + c),
                                   1 + 4 / (1 + b), 2 + 4 / (1 + b), 3 + 4 / (1 + d), 4 + 4 / (1 + d)};
  expect_step(found, "joined heads", {2, 4}, out);
  EXPECT_EQ(found.step("scores").axes, (std::vector<std::string>{"head", "query", "key"}));
  EXPECT_EQ(found.step("input").axes, (std::vector<std::string>{"token", "in"}));
}

TEST(TraceByHand, masks_and_modifiers_one_by_one) {
  const double inf = INFINITY;
  const Tensor query = Tensor::of<double>({3, 1}, {1, 2, 3}), key = Tensor::of<double>({3, 1}, {2, 0, -2});
  const Tensor value = Tensor::of<double>({3, 1}, {10, 20, 40});
  const Tensor mask = Tensor::of<bool>({3, 3}, {true, true, true, false, true, true, true, true, true});
  const Tensor bias = Tensor::of<double>({3}, {1, -inf, 0.5});
  const Tensor slopes = Tensor::of<double>({1}, {0.25}), lens = Tensor::of<std::int64_t>({3}, {3, 3, 2});
  const Tensor sinks = Tensor::of<double>({1}, {0});
  const AttentionOptions options{.mask = mask,
                                 .bias = bias,
                                 .causal = Causal::square,
                                 .window = Window{1, 5},
                                 .valid_lens = lens,
                                 .scale = 0.5,
                                 .softcap = 2,
                                 .alibi_slopes = slopes,
                                 .sinks = sinks};
  const Trace found = trace(query, key, value, options);
  EXPECT_EQ(names(found), (std::vector<std::string>{
                              "query", "key", "value", "bias", "mask", "scores", "scaled scores", "capped scores",
                              "biased scores", "scores with distance", "causal mask", "window", "valid lengths",
                              "masked scores", "row maxima", "exponentials", "row sums", "weights", "weighted sums"}));
  expect_step(found, "scores", {3, 3}, {2, 0, -2, 4, 0, -4, 6, 0, -6});
  expect_step(found, "scaled scores", {3, 3}, {1, 0, -1, 2, 0, -2, 3, 0, -3});
  const double t1 = 2 * std::tanh(0.5), t2 = 2 * std::tanh(1), t3 = 2 * std::tanh(1.5);
  expect_step(found, "capped scores", {3, 3}, {t1, 0, -t1, t2, 0, -t2, t3, 0, -t3});
  expect_step(found, "biased scores", {3, 3}, {t1 + 1, -inf, 0.5 - t1, t2 + 1, -inf, 0.5 - t2, t3 + 1, -inf, 0.5 - t3});
  expect_step(found, "scores with distance", {3, 3},
              {t1 + 1, -inf, -t1, t2 + 0.75, -inf, 0.25 - t2, t3 + 0.5, -inf, 0.5 - t3});
  expect_step(found, "causal mask", {3, 3}, {1, 0, 0, 1, 1, 0, 1, 1, 1});
  expect_step(found, "window", {3, 3}, {1, 1, 1, 1, 1, 1, 0, 1, 1});
  expect_step(found, "valid lengths", {3, 3}, {1, 1, 1, 1, 1, 1, 1, 1, 0});
  expect_step(found, "masked scores", {3, 3}, {t1 + 1, -inf, -inf, -inf, -inf, -inf, -inf, -inf, -inf});
  // Row 0 sees key 0 and the sink, whose score is 0; the others see nothing but the sink.
  expect_step(found, "row maxima", {3}, {t1 + 1, 0, 0});
  expect_step(found, "exponentials", {3, 3}, {1, 0, 0, 0, 0, 0, 0, 0, 0});
  const double sink = std::exp(-(t1 + 1));
  expect_step(found, "row sums", {3}, {1 + sink, 1, 1});
  expect_step(found, "weights", {3, 3}, {1 / (1 + sink), 0, 0, 0, 0, 0, 0, 0, 0});
  expect_step(found, "weighted sums", {3, 1}, {10 / (1 + sink), 0, 0});
}

TEST(TraceByHand, a_row_with_no_key_gives_zero) {
  const Tensor x = Tensor::of<float>({2, 2}, {1, 2, 3, 4});
  const Tensor lens = Tensor::of<std::int32_t>({2}, {0, 2});
  const Trace found = trace(x, x, x, {.valid_lens = lens});
  expect_step(found, "masked scores", {2, 2}, {-INFINITY, -INFINITY, 11 / std::sqrt(2.0), 25 / std::sqrt(2.0)});
  EXPECT_EQ(found.step("row maxima").numbers.at<double>({0}), -INFINITY);
  EXPECT_EQ(found.step("row sums").numbers.at<double>({0}), 0);
  EXPECT_EQ(get(found.result(), {0, 0}), 0);
  EXPECT_EQ(get(found.result(), {0, 1}), 0);
}

// A layer of one head and width 2, with numbers small enough for the head.
TEST(TraceByHand, a_layer_with_biases) {
  MultiHeadAttention layer({.model_dim = 2, .heads = 1, .bias = true, .dtype = DType::f64});
  const auto fill = [&](const char* name, const std::vector<double>& numbers) {
    std::copy(numbers.begin(), numbers.end(), layer.parameter(name).as<double>());
  };
  fill("W_q", {1, 0, 0, 2});
  fill("W_k", {1, 1, 0, 1});
  fill("W_v", {0, 1, 1, 0});
  fill("W_o", {2, 0, 0, 1});
  fill("b_q", {0, 1});
  fill("b_k", {1, 0});
  fill("b_v", {0, 0});
  fill("b_o", {0.5, -1});
  const Tensor x = Tensor::of<double>({1, 2, 2}, {1, 0, 0, 1});
  const Trace found = trace(layer, x, x, x, {.causal = Causal::square});
  expect_step(found, "projected queries", {1, 2, 2}, {1, 1, 0, 3});
  expect_step(found, "projected keys", {1, 2, 2}, {2, 1, 1, 1});
  expect_step(found, "projected values", {1, 2, 2}, {0, 1, 1, 0});
  expect_step(found, "queries by head", {1, 1, 2, 2}, {1, 1, 0, 3});
  expect_step(found, "scores", {1, 1, 2, 2}, {3, 2, 3, 3});
  expect_step(found, "weights", {1, 1, 2, 2}, {1, 0, 0.5, 0.5});
  expect_step(found, "joined heads", {1, 2, 2}, {0, 1, 0.5, 0.5});
  expect_step(found, "output", {1, 2, 2}, {0.5, 0, 1.5, -0.5});
}

// What a cell of the page lights up.
TEST(TraceByHand, steps_know_what_they_are_made_of) {
  const Tensor x({2, 4}, DType::f64);
  TraceRequest request;
  request.heads = 2;
  const Trace found = trace(x, x, x, {.causal = Causal::square}, request);
  const auto sources = [&](const std::string& name) {
    std::vector<std::string> result;
    for (const TraceSource& source : found.step(name).sources)
      result.push_back(found.steps[source.step].name + ": " + headway::name(source.part));
    return result;
  };
  using Names = std::vector<std::string>;
  EXPECT_EQ(sources("queries by head"), (Names{"input: split"}));
  EXPECT_EQ(sources("scores"), (Names{"queries by head: row", "keys by head: other_row"}));
  EXPECT_EQ(sources("masked scores"), (Names{"scaled scores: cell", "causal mask: cell"}));
  EXPECT_EQ(sources("row maxima"), (Names{"masked scores: row"}));
  EXPECT_EQ(sources("exponentials"), (Names{"masked scores: cell", "row maxima: row_entry"}));
  EXPECT_EQ(sources("weights"), (Names{"exponentials: cell", "row sums: row_entry"}));
  EXPECT_EQ(sources("weighted sums"), (Names{"weights: row", "values by head: column"}));
  EXPECT_EQ(sources("joined heads"), (Names{"weighted sums: join"}));
}

}  // namespace
}  // namespace headway::test
