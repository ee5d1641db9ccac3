// Every pair of levels of every two options, forward and backward, on every engine of the build, against the oracle.
#include <gtest/gtest.h>

#include <iostream>

#include "support/sweep_case.h"

namespace headway::test {
namespace {

constexpr int rounds = 4;  // covering arrays, each with its own seed and so its own triples and data

const CoveringArray& covering_array(int round) {
  static const std::vector<CoveringArray> arrays = [] {
    std::vector<CoveringArray> made;
    for (int n = 0; n < rounds; ++n)
      made.push_back(cover_pairs(sweep_factors(), sweep_compatible, static_cast<std::uint64_t>(n) + 1));
    return made;
  }();
  return arrays[static_cast<std::size_t>(round)];
}

TEST(SweepCoverage, every_legal_pair_of_levels_occurs_in_every_round) {
  for (int round = 0; round < rounds; ++round) {
    const CoveringArray& array = covering_array(round);
    const Coverage coverage = coverage_of(array.cases, sweep_factors(), sweep_compatible);
    EXPECT_EQ(coverage.covered, array.legal_pairs);
    EXPECT_TRUE(coverage.legal);
    std::cout << "round " << round << ": " << sweep_factors().size() << " factors, " << array.legal_pairs
              << " pairs covered by " << array.cases.size() << " cases; " << array.forbidden_pairs
              << " pairs are not legal\n";
  }
}

TEST(SweepCoverage, a_missing_case_leaves_pairs_uncovered) {
  const CoveringArray& array = covering_array(0);
  const std::vector<Assignment> some(array.cases.begin(), array.cases.begin() + 10);
  EXPECT_LT(coverage_of(some, sweep_factors(), sweep_compatible).covered, array.legal_pairs);
}

struct Part {
  Engine engine;
  int round;
};

std::vector<Part> parts() {
  std::vector<Part> all;
  for (Engine engine : engines())
    if (engine != Engine::automatic)
      for (int round = 0; round < rounds; ++round) all.push_back({engine, round});
  return all;
}

class Sweep : public testing::TestWithParam<Part> {
 protected:
  // An engine may refuse a call with the reason, but never computes something else; the reference refuses nothing.
  template <class Check>
  void each_case(Check check) {
    const auto& cases = covering_array(GetParam().round).cases;
    std::size_t refused = 0;
    for (std::size_t n = 0; n < cases.size() && !HasFailure(); ++n) {
      SweepCase one(cases[n], 1000 * static_cast<std::uint64_t>(GetParam().round) + n);
      SCOPED_TRACE(one.description);
      one.call.options.engine = GetParam().engine;
      try {
        check(one);
      } catch (const Unsupported&) {
        ++refused;
        ASSERT_NE(GetParam().engine, Engine::reference);
      } catch (const std::exception& error) {
        ADD_FAILURE() << error.what();
      }
    }
    if (refused > 0) std::cout << name(GetParam().engine) << " refused " << refused << " of " << cases.size() << '\n';
  }
};

TEST_P(Sweep, forward_is_within_the_contracts_bounds) {
  each_case([](SweepCase& one) { one.check_forward(); });
}

TEST_P(Sweep, backward_is_within_the_contracts_bounds) {
  each_case([](SweepCase& one) { one.check_backward(); });
}

INSTANTIATE_TEST_SUITE_P(Engines, Sweep, testing::ValuesIn(parts()), [](const testing::TestParamInfo<Part>& part) {
  return std::string(name(part.param.engine)) + "_" + std::to_string(part.param.round);
});

}  // namespace
}  // namespace headway::test
