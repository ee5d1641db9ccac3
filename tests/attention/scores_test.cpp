// attention_scores: the matrix after each stage of the definition.
#include <gtest/gtest.h>

#include <cmath>

#include "support/inputs.h"
#include "support/run.h"

namespace headway::test {
namespace {

class Scores : public EngineTest {
 protected:
  // The matrix as the engine gives it, into memory that holds NaN before.
  Tensor scores(const Inputs& inputs, Stage stage, const AttentionOptions& options) const {
    Tensor result = filled(Call{inputs.q, inputs.k, inputs.v, {}, {}}.weights_sizes(), inputs.q.dtype(), NAN);
    run_attention_scores(inputs.q, inputs.k, result, stage, on_engine(options));
    return result;
  }
};

TEST_P(Scores, follow_the_definition_stage_by_stage_under_every_option) {
  const Shape shape{};
  for (DType type : float_types)
    for (const OptionSet& kind : all_kinds(shape)) {
      SCOPED_TRACE(kind.name + std::string(" ") + name(type));
      const Inputs inputs = random_inputs(shape, type);
      const Spec spec = spec_of(inputs.q, inputs.k, inputs.v, kind.options);
      const ScoreMatrices stages = test::scores(spec);
      const Forward weights = forward(spec);
      const std::pair<Stage, const Array&> matrices[] = {{Stage::scaled, stages.scaled},
                                                         {Stage::capped, stages.capped},
                                                         {Stage::biased, stages.biased},
                                                         {Stage::weights, weights.weights.value}};
      for (const auto& [stage, exact] : matrices) {
        SCOPED_TRACE(static_cast<int>(stage));
        Array bound(exact.sizes());
        const Real unit = type == DType::f64   ? 0x1p-53L
                          : type == DType::f32 ? 0x1p-24L
                          : type == DType::f16 ? 0x1p-10L
                                               : 0x1p-7L;
        // Sizes of about 8 products of normal numbers: 64 units of the larger of 1 and the score, 4 in a half type.
        for (std::size_t n = 0; n < bound.values.size(); ++n)
          bound.values[n] = (unit < 0x1p-20L ? 64 : 4) * unit * std::max<Real>(1, std::abs(exact.values[n]));
        EXPECT_TRUE(within(scores(inputs, stage, kind.options), exact, bound));
      }
    }
}

TEST_P(Scores, of_the_last_stage_are_the_weights_of_attention) {
  for (DType type : float_types)
    for (const Shape& shape : {Shape{}, Shape{.queries = 2, .keys = 530}}) {
      const Inputs inputs = random_inputs(shape, type);
      const AttentionOptions options = on_engine({.causal = Causal::bottom_right, .softcap = 2.0});
      const Results results = inputs.call(options).run(true);
      const Forward exact = forward(spec_of(inputs.q, inputs.k, inputs.v, options));
      const Tensor matrix = scores(inputs, Stage::weights, options);
      EXPECT_TRUE(within(matrix, exact.weights.value, error_bound(exact.weights, Kind::weights, type)));
      EXPECT_TRUE(same_bits(matrix, *results.weights));
    }
}

TEST_P(Scores, ignore_masks_before_the_biased_stage) {
  const Inputs inputs = random_inputs({});
  const Tensor lens({2}, DType::i64), rows({2}, DType::i64);
  const AttentionOptions masked{.causal = Causal::top_left, .valid_lens = lens, .query_lens = rows};
  EXPECT_TRUE(same_bits(scores(inputs, Stage::scaled, masked), scores(inputs, Stage::scaled, {})));
  EXPECT_TRUE(same_bits(scores(inputs, Stage::capped, masked), scores(inputs, Stage::scaled, {})));
  EXPECT_TRUE(same_bits(scores(inputs, Stage::biased, masked), filled({2, 4, 5, 7}, DType::f32, -INFINITY)));
  EXPECT_TRUE(same_bits(scores(inputs, Stage::weights, masked), Tensor({2, 4, 5, 7})));
}

TEST_P(Scores, at_forbidden_places_are_minus_infinity_whatever_is_stored_there) {
  Inputs inputs = random_inputs({});
  for (std::int64_t d = 0; d < 8; ++d) inputs.k.at<float>({0, 1, 6, d}) = NAN;
  const Tensor matrix = scores(inputs, Stage::biased, {.causal = Causal::top_left});
  for (std::int64_t i = 0; i < 5; ++i) EXPECT_EQ(matrix.at<float>({0, 3, i, 6}), -INFINITY);
  EXPECT_EQ(scores(inputs, Stage::weights, {.causal = Causal::top_left}).at<float>({0, 3, 4, 6}), 0);
}

TEST_P(Scores, take_lower_ranks_and_strided_output) {
  Random random(6);
  const Tensor q = normal({5, 3}, DType::f64, random), k = normal({4, 3}, DType::f64, random);
  Tensor plain({5, 4}, DType::f64);
  run_attention_scores(q, k, plain, Stage::scaled, on_engine());
  for (Layout layout : {Layout::gaps, Layout::reversed, Layout::heads_inside, Layout::misaligned}) {
    Strided strided({5, 4}, DType::f64, layout);
    run_attention_scores(q, k, strided.view(), Stage::scaled, on_engine());
    EXPECT_TRUE(same_bits(strided.view(), plain));
    EXPECT_TRUE(strided.surroundings_intact());
  }
}

ON_EVERY_ENGINE(Scores);

}  // namespace
}  // namespace headway::test
