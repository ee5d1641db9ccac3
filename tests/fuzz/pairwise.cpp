#include "fuzz/pairwise.h"

#include <algorithm>
#include <numeric>
#include <random>
#include <set>
#include <stdexcept>
#include <tuple>

namespace headway::test::fuzz {
namespace {

using Pair = std::tuple<int, int, int, int>;  // factor, level, later factor, its level

Pair ordered(int factor_a, int level_a, int factor_b, int level_b) {
  return factor_a < factor_b ? Pair{factor_a, level_a, factor_b, level_b} : Pair{factor_b, level_b, factor_a, level_a};
}

int levels_of(const std::vector<Factor>& factors, int factor) {
  return static_cast<int>(factors[static_cast<std::size_t>(factor)].levels.size());
}

template <class Visit>
void each_pair(const std::vector<Factor>& factors, Visit visit) {
  const int count = static_cast<int>(factors.size());
  for (int a = 0; a < count; ++a)
    for (int b = a + 1; b < count; ++b)
      for (int level_a = 0; level_a < levels_of(factors, a); ++level_a)
        for (int level_b = 0; level_b < levels_of(factors, b); ++level_b) visit(a, level_a, b, level_b);
}

// One case under construction: -1 where no level is chosen yet.
class Builder {
 public:
  Builder(const std::vector<Factor>& factors, const Compatible& compatible, const std::set<Pair>& uncovered)
      : factors_(factors), compatible_(compatible), uncovered_(uncovered), levels_(factors.size(), -1) {}

  void choose(int factor, int level) { levels_[static_cast<std::size_t>(factor)] = level; }
  bool chosen(int factor) const { return levels_[static_cast<std::size_t>(factor)] >= 0; }
  const Assignment& levels() const { return levels_; }

  // The level that covers the most new pairs, the first of `order` among equals.
  int best_level(int factor, const std::vector<int>& order) const {
    int best = -1, best_gain = -1;
    for (int level : order) {
      const int gain = gain_of(factor, level);
      if (gain > best_gain) {
        best = level;
        best_gain = gain;
      }
    }
    if (best < 0) throw std::logic_error("no compatible level for " + factors_[static_cast<std::size_t>(factor)].name);
    return best;
  }

  // New pairs that the level would cover; -1 when it is forbidden here.
  int gain_of(int factor, int level) const {
    int gain = 0;
    for (int other = 0; other < static_cast<int>(factors_.size()); ++other) {
      if (other == factor || !chosen(other)) continue;
      const Pair pair = ordered(factor, level, other, levels_[static_cast<std::size_t>(other)]);
      if (!std::apply(compatible_, pair)) return -1;
      gain += uncovered_.count(pair) > 0;
    }
    return gain;
  }

 private:
  const std::vector<Factor>& factors_;
  const Compatible& compatible_;
  const std::set<Pair>& uncovered_;
  Assignment levels_;
};

}  // namespace

CoveringArray cover_pairs(const std::vector<Factor>& factors, const Compatible& compatible, double sparsity,
                          std::uint64_t seed) {
  CoveringArray result;
  std::set<Pair> uncovered;
  each_pair(factors, [&](int a, int level_a, int b, int level_b) {
    if (compatible(a, level_a, b, level_b))
      uncovered.insert({a, level_a, b, level_b});
    else
      ++result.forbidden_pairs;
  });
  result.legal_pairs = static_cast<std::int64_t>(uncovered.size());

  std::mt19937_64 random(seed);
  std::bernoulli_distribution skip(sparsity);
  std::vector<int> factor_order(factors.size());
  std::iota(factor_order.begin(), factor_order.end(), 0);
  while (!uncovered.empty()) {
    Builder builder(factors, compatible, uncovered);
    auto first = uncovered.begin();
    std::advance(first, static_cast<std::ptrdiff_t>(random() % uncovered.size()));
    const auto [a, level_a, b, level_b] = *first;
    builder.choose(a, level_a);
    builder.choose(b, level_b);
    std::shuffle(factor_order.begin(), factor_order.end(), random);
    for (int factor : factor_order) {
      if (builder.chosen(factor)) continue;
      const bool sparse = factors[static_cast<std::size_t>(factor)].restricts && skip(random);
      if (sparse && builder.gain_of(factor, 0) >= 0) {
        builder.choose(factor, 0);
        continue;
      }
      std::vector<int> level_order(static_cast<std::size_t>(levels_of(factors, factor)));
      std::iota(level_order.begin(), level_order.end(), 0);
      std::shuffle(level_order.begin(), level_order.end(), random);
      builder.choose(factor, builder.best_level(factor, level_order));
    }
    const Assignment& levels = builder.levels();
    for (int one = 0; one < static_cast<int>(factors.size()); ++one)
      for (int other = one + 1; other < static_cast<int>(factors.size()); ++other)
        uncovered.erase({one, levels[static_cast<std::size_t>(one)], other, levels[static_cast<std::size_t>(other)]});
    result.cases.push_back(levels);
  }
  return result;
}

Coverage coverage_of(const std::vector<Assignment>& cases, const std::vector<Factor>& factors,
                     const Compatible& compatible) {
  Coverage result;
  each_pair(factors, [&](int a, int level_a, int b, int level_b) {
    const bool found = std::any_of(cases.begin(), cases.end(), [&](const Assignment& one) {
      return one[static_cast<std::size_t>(a)] == level_a && one[static_cast<std::size_t>(b)] == level_b;
    });
    if (!compatible(a, level_a, b, level_b))
      result.legal = result.legal && !found;
    else
      result.covered += found;
    result.legal_pairs += compatible(a, level_a, b, level_b);
  });
  return result;
}

}  // namespace headway::test::fuzz
