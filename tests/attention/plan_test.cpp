// explain() and the choice of engines.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <sstream>

#include "support/inputs.h"

namespace headway::test {
namespace {

// Pairs that the key ranges leave, counted one by one; a mask or a bias does not count.
double visited_pairs(const Inputs& inputs, AttentionOptions options) {
  options.mask = {};
  options.bias = {};
  const Spec spec = spec_of(inputs.q, inputs.k, inputs.v, options);
  double pairs = 0;
  for (std::int64_t b = 0; b < spec.batch(); ++b)
    for (std::int64_t h = 0; h < spec.heads(); ++h)
      for (std::int64_t i = 0; i < spec.q.size(2); ++i)
        for (std::int64_t j = 0; j < spec.k.size(2); ++j) pairs += allowed(spec, b, h, i, j);
  return pairs;
}

class Plans : public EngineTest {};

TEST_P(Plans, count_two_flops_a_feature_for_each_visited_pair) {
  const Shape shape{};
  const Inputs inputs = random_inputs(shape);
  for (const OptionSet& kind : all_kinds(shape)) {
    SCOPED_TRACE(kind.name);
    const double pairs = visited_pairs(inputs, kind.options);
    const Plan forward = explain(inputs.q, inputs.k, inputs.v, on_engine(kind.options));
    EXPECT_EQ(forward.pairs, pairs);
    EXPECT_EQ(forward.flops, 2 * (8 + 6) * pairs);
    const Plan backward = explain(inputs.q, inputs.k, inputs.v, on_engine(kind.options), {.backward = true});
    EXPECT_EQ(backward.flops, 2.5 * 2 * (8 + 6) * pairs);
  }
}

TEST_P(Plans, name_the_engine_asked_for_and_the_call) {
  const Inputs inputs = random_inputs({});
  const Plan plan = explain(inputs.q, inputs.k, inputs.v, on_engine({.causal = Causal::bottom_right}));
  EXPECT_EQ(plan.engine, GetParam());
  EXPECT_EQ(plan.operation, "attention");
  const std::string text = to_string(plan);
  EXPECT_NE(text.find(name(GetParam())), std::string::npos) << text;
  EXPECT_NE(text.find("bottom_right"), std::string::npos) << text;
  EXPECT_NE(text.find("(2, 4, 5, 8)"), std::string::npos) << text;
  std::ostringstream stream;
  stream << plan;
  EXPECT_EQ(stream.str(), text);
  EXPECT_EQ(explain(inputs.q, inputs.k, inputs.v, on_engine(), {.backward = true}).operation, "attention_backward");
}

TEST_P(Plans, run_nothing_and_read_no_tensor) {
  constexpr std::size_t bytes = 1 << 20;
  void* memory = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  const ConstTensorView untouchable(static_cast<const float*>(memory), {2, 2, 64, 16});
  EXPECT_EQ(explain(untouchable, untouchable, untouchable, on_engine()).pairs, 2 * 2 * 64 * 64);
  munmap(memory, bytes);
}

TEST_P(Plans, of_calls_too_long_to_run_are_made_at_once) {
  const std::int64_t length = 1 << 20;
  const Tensor one({1, 1, 1, 64});
  const ConstTensorView q = one.view().expand({8, 32, length, 64});
  const double all = 8.0 * 32.0 * static_cast<double>(length) * static_cast<double>(length);
  EXPECT_EQ(explain(q, q, q, on_engine()).pairs, all);
  EXPECT_EQ(explain(q, q, q, on_engine({.causal = Causal::square})).pairs,
            (all + 8.0 * 32.0 * static_cast<double>(length)) / 2);
}

TEST_P(Plans, without_weights_need_no_matrix) {
  const Inputs inputs = random_inputs({.batch = 1, .heads = 1, .kv_heads = 1, .queries = 2048, .keys = 2048});
  const Plan plan = explain(inputs.q, inputs.k, inputs.v, on_engine());
  EXPECT_LT(plan.scratch_bytes, 2048.0 * 2048.0 * sizeof(float) / 2);
  // Inputs and outputs, each once: q, k of 8 features, v and out of 6.
  EXPECT_EQ(plan.bytes, 2048.0 * (8 + 8 + 6 + 6) * sizeof(float));
}

ON_EVERY_HOST_ENGINE(Plans);

TEST(Engines, always_end_with_the_reference) {
  const std::vector<Engine> there = engines();
  ASSERT_FALSE(there.empty());
  EXPECT_EQ(there.back(), Engine::reference);
  EXPECT_EQ(std::count(there.begin(), there.end(), Engine::automatic), 0);
}

TEST(Engines, have_the_names_of_the_contract) {
  EXPECT_STREQ(name(Engine::reference), "reference");
  EXPECT_STREQ(name(Engine::cpu), "cpu");
  EXPECT_STREQ(name(Engine::cuda), "cuda");
}

TEST(Engines, chosen_automatically_are_the_first_that_can) {
  const Inputs inputs = random_inputs({});
  const Plan plan = explain(inputs.q, inputs.k, inputs.v);
  const std::vector<Engine> there = host_engines();
  EXPECT_NE(std::find(there.begin(), there.end(), plan.engine), there.end());
  for (const Plan::PassedOver& other : plan.passed_over) {
    EXPECT_NE(other.engine, plan.engine);
    EXPECT_FALSE(other.reason.empty());
  }
}

TEST(Engines, that_are_not_there_cannot_be_explained) {
  const Inputs inputs = random_inputs({});
  const std::vector<Engine> there = engines();
  for (Engine engine : {Engine::cpu, Engine::cuda}) {
    if (std::find(there.begin(), there.end(), engine) != there.end()) continue;
    EXPECT_TRUE(throws<Unsupported>("explain", {name(engine)},
                                    [&] { explain(inputs.q, inputs.k, inputs.v, {.engine = engine}); }));
  }
}

}  // namespace
}  // namespace headway::test
