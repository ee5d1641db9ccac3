// The loops over one row: their logarithm and exponential, and lists with ties.
#include "analysis/row_statistics.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace headway::test {
namespace {

template <class T>
void expect_entropy(T tolerance) {
  for (T p : {T(1), T(0.75), T(0.5), T(0.1), T(1e-3), T(1e-20), T(1e-37), T(0)}) {
    std::vector<T> row(37, p);
    TopList<T> none{nullptr, nullptr, 0};
    const RowSums sums = sum_row(WeightRow<T>{row.data(), 0, 37}, 5, none);
    const double expected = p == 0 ? 0 : -37 * static_cast<double>(p) * std::log(static_cast<double>(p));
    EXPECT_NEAR(sums.entropy, expected,
                static_cast<double>(tolerance) * (std::abs(expected) + 37 * static_cast<double>(p)))
        << p;
  }
}

TEST(RowStatistics, entropy_is_accurate_from_one_to_the_smallest_weights) {
  expect_entropy<float>(0x1p-21f);
  expect_entropy<double>(0x1p-50);
}

template <class T>
void expect_exponentials(T tolerance) {
  const T lse = T(0.25);
  for (double s = -800; s <= 0.25; s += 0.37) {
    std::vector<T> scores(19, static_cast<T>(s));
    scores[3] = -std::numeric_limits<T>::infinity();
    exponentiate(scores.data(), 19, lse);
    const double difference = static_cast<double>(static_cast<T>(s)) - 0.25, expected = std::exp(difference);
    const double quantum = static_cast<double>(std::numeric_limits<T>::denorm_min());
    EXPECT_NEAR(static_cast<double>(scores[18]), expected,
                static_cast<double>(tolerance) * (4 + std::abs(difference)) * expected + 4 * quantum)
        << s;
    EXPECT_EQ(scores[3], 0);
  }
}

TEST(RowStatistics, exponentials_are_accurate_down_to_denormals) {
  expect_exponentials<float>(0x1p-24f);
  expect_exponentials<double>(0x1p-53);
}

TEST(RowStatistics, nan_reaches_the_sums) {
  std::vector<float> row(20, 0.05f);
  row[7] = NAN;
  TopList<float> none{nullptr, nullptr, 0};
  EXPECT_TRUE(std::isnan(sum_row(WeightRow<float>{row.data(), 0, 20}, 0, none).entropy));
  exponentiate(row.data(), 20, 0.0f);
  EXPECT_TRUE(std::isnan(row[7]));
}

TEST(RowStatistics, equal_weights_are_listed_by_key) {
  std::vector<float> row(700, 0.001f);
  row[600] = row[10] = row[300] = 0.2f;
  std::int64_t keys[4];
  float weights[4];
  TopList<float> top{keys, weights, 4};
  sum_row(WeightRow<float>{row.data(), 2, 700}, 0, top);
  EXPECT_EQ(keys[0], 10);
  EXPECT_EQ(keys[1], 300);
  EXPECT_EQ(keys[2], 600);
  EXPECT_EQ(keys[3], 2);
}

}  // namespace
}  // namespace headway::test
