// What K and V hold at forbidden positions is never visible; NaN at an allowed position reaches the rows that attend to
// it and no others. Both bit for bit, forward and backward.
#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "support/inputs.h"

namespace headway::test {
namespace {

using KvPosition = std::array<std::int64_t, 3>;   // b, kv head, j
using RowPosition = std::array<std::int64_t, 3>;  // b, head, i

// Which rows may attend to which kv positions.
struct Reach {
  std::set<KvPosition> every_key, attended;
  std::vector<std::pair<RowPosition, KvPosition>> pairs;

  explicit Reach(const Spec& spec) {
    for (std::int64_t b = 0; b < spec.batch(); ++b)
      for (std::int64_t h = 0; h < spec.heads(); ++h)
        for (std::int64_t j = 0; j < spec.k.size(2); ++j) {
          const KvPosition key{b, h / (spec.heads() / spec.kv_heads()), j};
          every_key.insert(key);
          for (std::int64_t i = 0; i < spec.q.size(2); ++i)
            if (allowed(spec, b, h, i, j)) {
              attended.insert(key);
              pairs.push_back({{b, h, i}, key});
            }
        }
  }
};

void poison(Tensor& tensor, const KvPosition& at, double value) {
  for (std::int64_t d = 0; d < tensor.size(3); ++d) set(tensor, {at[0], at[1], at[2], d}, value);
}

ConstTensorView vector_of(const Tensor& tensor, const std::array<std::int64_t, 3>& at) {
  return tensor.view().select(0, at[0]).select(0, at[1]).select(0, at[2]);
}

bool all_nan(ConstTensorView view) {
  for (Real value : read(view).values)
    if (!std::isnan(value)) return false;
  return true;
}

class ForbiddenPositions : public EngineTest {
 protected:
  void expect_invisible(const Shape& shape) const;
  void expect_exact_reach(const Shape& shape) const;
};

// For engines that cut many keys of few queries into chunks.
const Shape few_queries{.batch = 2, .heads = 4, .kv_heads = 2, .queries = 2, .keys = 530};

void ForbiddenPositions::expect_invisible(const Shape& shape) const {
  std::size_t poisoned_kinds = 0;
  for (DType type : float_types)
    for (OptionSet& kind : mask_kinds(shape)) {
      SCOPED_TRACE(kind.name + std::string(" ") + name(type));
      for (const bool modifiers : {false, true}) {
        if (modifiers) {
          Random random(2);
          kind.options.softcap = 3.0;
          kind.options.sinks = kind.keep(normal({4}, DType::f32, random));
          kind.options.alibi_slopes = kind.keep(normal({4}, DType::f32, random));
          kind.options.dropout = 0.25;
          kind.options.seed = 7;
        }
        Inputs inputs = random_inputs(shape, type);
        const Call call = inputs.call(on_engine(kind.options));
        Random random(5);
        const Tensor grad_out = normal(call.out_sizes(), type, random);
        const Results clean = call.run(true);
        const GradientTensors clean_gradients = call.gradients(grad_out, clean);
        const Reach reach(call.spec());
        const double bad[] = {NAN, INFINITY, -INFINITY};
        std::size_t poisoned = 0;
        for (const KvPosition& key : reach.every_key)
          if (reach.attended.count(key) == 0) {
            poison(inputs.k, key, bad[poisoned % 3]);
            poison(inputs.v, key, bad[(poisoned + 1) % 3]);
            ++poisoned;
          }
        poisoned_kinds += poisoned > 0;
        EXPECT_TRUE(same_bits(call.run(true), clean));
        EXPECT_TRUE(same_bits(call.gradients(grad_out, clean), clean_gradients));
      }
    }
  EXPECT_GE(poisoned_kinds, 4u * 2u * 8u) << "the kinds no longer forbid whole keys";
}

TEST_P(ForbiddenPositions, hold_what_they_will_without_changing_a_bit) {
  expect_invisible({});
  expect_invisible(few_queries);
}

void ForbiddenPositions::expect_exact_reach(const Shape& shape) const {
  for (DType type : {DType::f32, DType::f64, DType::f16})
    for (const OptionSet& kind : mask_kinds(shape)) {
      SCOPED_TRACE(kind.name + std::string(" ") + name(type));
      Inputs inputs = random_inputs(shape, type);
      const Call call = inputs.call(on_engine(kind.options));
      Random random(5);
      const Tensor grad_out = normal(call.out_sizes(), type, random);
      const Results clean = call.run(true);
      const GradientTensors clean_gradients = call.gradients(grad_out, clean);
      const Reach reach(call.spec());
      ASSERT_FALSE(reach.attended.empty());
      const KvPosition target =
          *std::next(reach.attended.begin(), static_cast<std::ptrdiff_t>(reach.attended.size() / 2));
      poison(inputs.k, target, NAN);
      poison(inputs.v, target, NAN);

      std::set<RowPosition> rows;  // those that attend to the target
      for (const auto& [row, key] : reach.pairs)
        if (key == target) rows.insert(row);
      std::set<KvPosition> keys;  // those whose gradients such a row feeds
      for (const auto& [row, key] : reach.pairs)
        if (rows.count(row) > 0) keys.insert(key);

      const Results results = call.run(true);
      const GradientTensors gradients = call.gradients(grad_out, results);
      const auto expect = [](const Tensor& now, const Tensor& before, const std::array<std::int64_t, 3>& at, bool hit,
                             const char* what) {
        if (hit)
          EXPECT_TRUE(all_nan(vector_of(now, at))) << what << ' ' << at[0] << ',' << at[1] << ',' << at[2];
        else
          EXPECT_TRUE(same_bits(vector_of(now, at), vector_of(before, at)))
              << what << ' ' << at[0] << ',' << at[1] << ',' << at[2];
      };
      for (std::int64_t b = 0; b < shape.batch; ++b)
        for (std::int64_t h = 0; h < shape.heads; ++h)
          for (std::int64_t i = 0; i < shape.queries; ++i) {
            const bool hit = rows.count({b, h, i}) > 0;
            expect(results.out, clean.out, {b, h, i}, hit, "out");
            expect(gradients.dq, clean_gradients.dq, {b, h, i}, hit, "dq");
            EXPECT_EQ(std::isnan(get(results.lse, {b, h, i})), hit);
          }
      for (const KvPosition& key : reach.every_key) {
        expect(gradients.dk, clean_gradients.dk, key, keys.count(key) > 0, "dk");
        expect(gradients.dv, clean_gradients.dv, key, keys.count(key) > 0, "dv");
      }
    }
}

TEST_P(ForbiddenPositions, a_nan_reaches_exactly_the_rows_that_attend_to_it) {
  expect_exact_reach({});
  expect_exact_reach(few_queries);
}

TEST_P(ForbiddenPositions, a_nan_in_one_value_feature_stays_in_that_feature) {
  Inputs inputs = random_inputs({});
  const Call call = inputs.call(on_engine({.causal = Causal::top_left}));
  const Results clean = call.run();
  inputs.v.at<float>({0, 0, 3, 2}) = NAN;
  const Results results = call.run();
  for (std::int64_t i = 0; i < 5; ++i)
    for (std::int64_t d = 0; d < 6; ++d)
      EXPECT_EQ(std::isnan(results.out.at<float>({0, 1, i, d})), i >= 3 && d == 2) << i << ' ' << d;
  EXPECT_TRUE(same_bits(results.lse, clean.lse));
}

TEST_P(ForbiddenPositions, sequences_of_a_pack_never_see_each_other) {
  Random random(4);
  const Tensor q = normal({9, 2, 4}, DType::f32, random);
  Tensor k = normal({11, 1, 4}, DType::f32, random), v = normal({11, 1, 3}, DType::f32, random);
  const Call call{q, k, v, on_engine({.window = Window{6, 6}}), Packing{{0, 4, 6, 9}, {0, 3, 8, 11}}};
  const Tensor grad_out = normal(call.out_sizes(), DType::f32, random);
  const Results clean = call.run();
  const GradientTensors clean_gradients = call.gradients(grad_out, clean);
  for (std::int64_t row = 3; row < 8; ++row)
    for (std::int64_t d = 0; d < 4; ++d) {
      k.at<float>({row, 0, d}) = NAN;
      if (d < 3) v.at<float>({row, 0, d}) = INFINITY;
    }
  const Results results = call.run();
  const GradientTensors gradients = call.gradients(grad_out, results);
  const auto others_same = [](ConstTensorView a, ConstTensorView b, std::int64_t begin, std::int64_t end) {
    return same_bits(a.slice(0, 0, begin), b.slice(0, 0, begin)) &&
           same_bits(a.slice(0, end, a.size(0)), b.slice(0, end, b.size(0)));
  };
  EXPECT_TRUE(others_same(results.out, clean.out, 4, 6));
  EXPECT_TRUE(all_nan(static_cast<const Tensor&>(results.out).view().slice(0, 4, 6)));
  EXPECT_TRUE(others_same(gradients.dq, clean_gradients.dq, 4, 6));
  EXPECT_TRUE(others_same(gradients.dk, clean_gradients.dk, 3, 8));
  EXPECT_TRUE(others_same(gradients.dv, clean_gradients.dv, 3, 8));
}

TEST_P(ForbiddenPositions, of_one_row_may_be_allowed_to_its_neighbours_without_changing_a_bit) {
  struct Stretch {
    std::int64_t keys, begin, end, window;
  };
  for (DType type : float_types)
    for (const Stretch& one : {Stretch{512, 64, 127, 128}, {300, 0, 40, 64}, {200, 10, 90, 20}}) {
      SCOPED_TRACE(testing::Message() << name(type) << ' ' << one.keys);
      Inputs inputs = random_inputs({.batch = 1,
                                     .heads = 1,
                                     .kv_heads = 1,
                                     .queries = one.keys,
                                     .keys = one.keys,
                                     .head_dim = 64,
                                     .value_dim = 8},
                                    type);
      const Call call = inputs.call(on_engine({.causal = Causal::top_left, .window = Window{one.window, 0}}));
      const Results clean = call.run();
      for (std::int64_t j = one.begin; j < one.end; ++j) poison(inputs.k, {0, 0, j}, NAN);
      const Results results = call.run();
      for (std::int64_t i = 0; i < one.keys; ++i) {
        const bool sees = i >= one.begin && i - one.window < one.end;
        EXPECT_EQ(std::isnan(get(results.lse, {0, 0, i})), sees) << i;
        if (!sees) {
          EXPECT_TRUE(same_bits(vector_of(results.out, {0, 0, i}), vector_of(clean.out, {0, 0, i}))) << i;
        }
      }
    }
}

ON_EVERY_ENGINE(ForbiddenPositions);

}  // namespace
}  // namespace headway::test
