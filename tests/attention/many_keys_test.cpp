// Sums over many keys: the contract's bounds hold for any number of them, also where all terms round the same way.
#include <gtest/gtest.h>

#include <cmath>

#include "support/inputs.h"

namespace headway::test {
namespace {

class ManyKeys : public EngineTest {
 protected:
  void expect_mean(DType type, std::int64_t queries, std::int64_t keys, const std::vector<double>& values,
                   std::int64_t dim = 32) const;
};

// One key scores `above` more than the others, which all score 0: their weights are equal, and not a power of two.
constexpr double above = 1.2;

void ManyKeys::expect_mean(DType type, std::int64_t queries, std::int64_t keys, const std::vector<double>& values,
                           std::int64_t dim) const {
  const Real unit = type == DType::f64 ? 0x1p-53L : 0x1p-24L;
  const bool half = type == DType::bf16 || type == DType::f16;
  const Real type_unit = type == DType::f16 ? 0x1p-11L : type == DType::bf16 ? 0x1p-8L : 0;
  Tensor q({1, 1, queries, dim}, type), k({1, 1, keys, dim}, type);
  for (std::int64_t i = 0; i < queries; ++i) set(q, {0, 0, i, 0}, 1.0);
  set(k, {0, 0, 0, 0}, above);
  const Real score = get(k, {0, 0, 0, 0});
  const Real lse = std::log(std::exp(score) + static_cast<Real>(keys - 1));
  const Real lse_bound = (half ? 64 + 8 * score : 32 + 4 * score) * unit + 2 * unit * lse;
  for (const double value : values) {
    const Tensor one_value = filled({1, 1, 1, 3}, type, value);
    const Call call{q, k, one_value.view().expand({1, 1, keys, 3}), on_engine({.scale = 1.0})};
    const Results results = call.run();
    const Real exact = get(one_value, {0, 0, 0, 0});
    const Real bound = ((64 + 4 * score) * unit + 2 * type_unit) * exact;
    for (std::int64_t i = 0; i < queries; i += std::max<std::int64_t>(1, queries - 1)) {
      EXPECT_LE(std::abs(get(results.out, {0, 0, i, 1}) - exact), bound) << "row " << i << ", value " << value;
      EXPECT_LE(std::abs(get(results.lse, {0, 0, i}) - lse), lse_bound) << "row " << i;
    }
  }
}

TEST_P(ManyKeys, with_equal_values_give_that_value) {
  for (DType type : float_types)
    for (const std::int64_t queries : {1, 20, 64})
      for (const std::int64_t keys : {256, 4100}) {
        SCOPED_TRACE(testing::Message() << name(type) << ' ' << queries << " x " << keys);
        expect_mean(type, queries, keys, {0.57, 1.93});
      }
  expect_mean(DType::f32, 64, 10000, {1.37, 1e18});
  expect_mean(DType::bf16, 64, 10000, {1e18});
}

TEST_P(ManyKeys, up_to_a_million_give_that_value_too) {
  for (const std::int64_t queries : {1, 9}) {
    SCOPED_TRACE(queries);
    expect_mean(DType::f32, queries, 1000003, {1.37}, 1);
  }
}

TEST_P(ManyKeys, whose_scores_rise_slowly_are_within_the_bounds) {
  constexpr std::int64_t keys = 20000;
  for (const bool modified : {false, true})
    for (const std::int64_t queries : {1, 9}) {
      SCOPED_TRACE(testing::Message() << queries << (modified ? " softcap" : ""));
      Tensor q = filled({1, 1, queries, 1}, DType::f32, 1.0), k({1, 1, keys, 1}), v({1, 1, keys, 1});
      for (std::int64_t j = 0; j < keys; ++j) {
        set(k, {0, 0, j, 0}, 1e-4 * static_cast<double>(j));
        set(v, {0, 0, j, 0}, 1.37);
      }
      AttentionOptions options{.scale = 1.0};
      if (modified) options.softcap = 100.0;
      const Call call{q, k, v, on_engine(options)};
      expect_forward(call, call.run());
    }
}

ON_EVERY_ENGINE(ManyKeys);

}  // namespace
}  // namespace headway::test
