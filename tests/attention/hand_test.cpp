// Cases small enough to compute by hand.
#include <gtest/gtest.h>

#include <cmath>

#include "support/inputs.h"
#include "support/run.h"

namespace headway::test {
namespace {

class ByHand : public EngineTest {
 protected:
  static constexpr double tolerance = 1e-14;

  // f64, one batch item, one head, one feature: attention over plain lists of numbers.
  struct Outcome {
    std::vector<double> out, lse, weights;
  };
  Outcome run(const std::vector<double>& q, const std::vector<double>& k, const std::vector<double>& v,
              const AttentionOptions& options) const {
    const auto column = [](const std::vector<double>& values) {
      return Tensor::of<double>({static_cast<std::int64_t>(values.size()), 1}, values);
    };
    const Tensor query = column(q), key = column(k), value = column(v);
    const Results results = Call{query, key, value, on_engine(options), {}}.run(true);
    const auto list = [](const Tensor& tensor) {
      return std::vector<double>(tensor.as<double>(), tensor.as<double>() + tensor.elements());
    };
    return {list(results.out), list(results.lse), list(*results.weights)};
  }

  static void expect_near(const std::vector<double>& actual, const std::vector<double>& expected) {
    ASSERT_EQ(actual.size(), expected.size());
    for (std::size_t n = 0; n < actual.size(); ++n) EXPECT_NEAR(actual[n], expected[n], tolerance) << "element " << n;
  }
};

const double ln3 = std::log(3.0);

TEST_P(ByHand, two_keys_share_a_row_as_one_to_three) {
  const Outcome result = run({1}, {0, ln3}, {4, 8}, {.scale = 1.0});
  expect_near(result.weights, {0.25, 0.75});
  expect_near(result.out, {7});
  expect_near(result.lse, {std::log(4.0)});
}

TEST_P(ByHand, the_scale_defaults_to_one_over_the_root_of_head_dim) {
  const Tensor q = Tensor::of<double>({1, 4}, {1, 1, 1, 1});
  const Tensor k = Tensor::of<double>({2, 4}, {0, 0, 0, 0, ln3, 0, ln3, 0});
  const Tensor v = Tensor::of<double>({2, 1}, {4, 8});
  Tensor out({1, 1}, DType::f64);
  run_attention(q, k, v, out, on_engine());
  EXPECT_NEAR(out.at<double>({0, 0}), 7, tolerance);
}

TEST_P(ByHand, a_sink_takes_its_share_and_adds_nothing) {
  const Tensor sinks = Tensor::of<double>({1}, {std::log(4.0)});
  const Outcome result = run({1}, {0, ln3}, {4, 8}, {.scale = 1.0, .sinks = sinks});
  expect_near(result.weights, {0.125, 0.375});
  expect_near(result.out, {3.5});
  expect_near(result.lse, {std::log(8.0)});
}

TEST_P(ByHand, a_softcap_bends_the_scores_before_the_bias) {
  const double cap = 2 * ln3;  // a score of cap * atanh(1/2) becomes cap / 2 = ln 3
  const Tensor bias = Tensor::of<double>({2}, {std::log(2.0), 0});
  const Outcome result = run({1}, {0, cap * std::atanh(0.5)}, {10, 0}, {.bias = bias, .scale = 1.0, .softcap = cap});
  expect_near(result.weights, {0.4, 0.6});
}

TEST_P(ByHand, alibi_lowers_a_score_by_the_distance_to_the_aligned_key) {
  const Tensor slopes = Tensor::of<double>({1}, {ln3});
  expect_near(run({1}, {0, 0}, {4, 8}, {.alibi_slopes = slopes}).weights, {0.25, 0.75});
  // top_left aligns query 0 with key 0, which is then the only one allowed.
  expect_near(run({1}, {0, 0}, {4, 8}, {.causal = Causal::top_left, .alibi_slopes = slopes}).weights, {1, 0});
  // Two queries, one key: offset -1, so distances 1 and 0; one key still takes all.
  const Outcome tall = run({1, 1}, {0}, {5}, {.alibi_slopes = slopes});
  expect_near(tall.lse, {-ln3, 0});
}

TEST_P(ByHand, causal_alignments_differ_when_the_lengths_do) {
  const std::vector<double> q{1, 1}, k{0, 0, 0}, v{3, 6, 12};
  expect_near(run(q, k, v, {.causal = Causal::top_left}).out, {3, 4.5});
  expect_near(run(q, k, v, {.causal = Causal::bottom_right}).out, {4.5, 7});
  expect_near(run(q, {0, 0}, {3, 6}, {.causal = Causal::square}).out, {3, 4.5});
}

TEST_P(ByHand, bottom_right_aligns_the_ends_of_the_real_sequences) {
  const Tensor keys = Tensor::of<std::int64_t>({1}, {3}), queries = Tensor::of<std::int64_t>({1}, {2});
  // Five keys of which three are real, three queries of which two are real: offset 1.
  const Outcome result = run({1, 1, 1}, {0, 0, 0, 0, 0}, {3, 6, 12, 99, 99},
                             {.causal = Causal::bottom_right, .valid_lens = keys, .query_lens = queries});
  expect_near(result.out, {4.5, 7, 0});
  EXPECT_EQ(result.lse[2], -INFINITY);
}

TEST_P(ByHand, per_row_valid_lens_do_not_move_the_alignment) {
  const Tensor lens = Tensor::of<std::int32_t>({1, 2}, {1, 3});
  const Outcome result = run({1, 1}, {0, 0, 0}, {3, 6, 12}, {.causal = Causal::bottom_right, .valid_lens = lens});
  expect_near(result.out, {3, 7});
}

TEST_P(ByHand, a_window_follows_the_aligned_diagonal) {
  const std::vector<double> q{1, 1}, k{0, 0, 0, 0}, v{1, 2, 4, 8};
  expect_near(run(q, k, v, {.window = Window{1, 0}}).out, {3, 6});  // offset 2: keys 1..2 and 2..3
  expect_near(run(q, k, v, {.window = Window{{}, 0}}).out, {7.0 / 3, 15.0 / 4});
  expect_near(run(q, k, v, {.window = Window{0, {}}}).out, {6, 8});
  expect_near(run(q, k, v, {.causal = Causal::top_left, .window = Window{0, 5}}).out, {1, 2});
}

TEST_P(ByHand, query_heads_share_kv_heads_in_order) {
  const Tensor q({1, 4, 1, 1}, DType::f64), k({1, 2, 1, 1}, DType::f64);
  const Tensor v = Tensor::of<double>({1, 2, 1, 1}, {10, 20});
  Tensor out({1, 4, 1, 1}, DType::f64);
  run_attention(q, k, v, out, on_engine());
  EXPECT_TRUE(same_bits(out, Tensor::of<double>({1, 4, 1, 1}, {10, 10, 20, 20})));
}

TEST_P(ByHand, gradients_of_two_equal_keys) {
  const Tensor q = Tensor::of<double>({1, 1}, {3}), k = Tensor::of<double>({2, 1}, {5, 5});
  const Tensor v = Tensor::of<double>({2, 1}, {0, 2}), grad = Tensor::of<double>({1, 1}, {1});
  const Tensor bias({1, 2}, DType::f64), sinks = Tensor::of<double>({1}, {15 * 0.1 + std::log(2.0)});
  // p = 1/4, 1/4 and the sink's 1/2; dP = 0, 2; delta = 1/2; dS = -1/8, 3/8.
  const Call call{q, k, v, on_engine({.bias = bias, .scale = 0.1, .sinks = sinks}), {}};
  const GradientTensors result = call.gradients(grad);
  EXPECT_NEAR(result.dq.at<double>({0, 0}), 0.1 * 5 * 0.25, tolerance);
  EXPECT_NEAR(result.dk.at<double>({0, 0}), 0.1 * 3 * -0.125, tolerance);
  EXPECT_NEAR(result.dk.at<double>({1, 0}), 0.1 * 3 * 0.375, tolerance);
  EXPECT_NEAR(result.dv.at<double>({0, 0}), 0.25, tolerance);
  EXPECT_NEAR(result.dv.at<double>({1, 0}), 0.25, tolerance);
  EXPECT_NEAR(result.dbias->at<double>({0, 0}), -0.125, tolerance);
  EXPECT_NEAR(result.dbias->at<double>({0, 1}), 0.375, tolerance);
  EXPECT_NEAR(result.dsinks->at<double>({0}), -0.25, tolerance);
}

TEST_P(ByHand, packed_sequences_are_separate_problems) {
  const Tensor q({3, 1, 1}, DType::f64), k({4, 1, 1}, DType::f64);
  const Tensor v = Tensor::of<double>({4, 1, 1}, {2, 4, 10, 20});
  // Sequences of 1 and 2 queries over 3 keys and 1 key.
  const Call call{q, k, v, on_engine(), Packing{{0, 1, 3}, {0, 3, 4}}};
  const Results results = call.run();
  EXPECT_NEAR(results.out.at<double>({0, 0, 0}), 16.0 / 3, tolerance);
  EXPECT_NEAR(results.out.at<double>({1, 0, 0}), 20, tolerance);
  EXPECT_NEAR(results.out.at<double>({2, 0, 0}), 20, tolerance);
  EXPECT_NEAR(results.lse.at<double>({0, 0}), std::log(3.0), tolerance);
}

ON_EVERY_ENGINE(ByHand);

}  // namespace
}  // namespace headway::test
