// Every pair of levels of every two options on every engine of the build: every check of the fuzzer.
#include "fuzz/sweep.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <iostream>

#include "engines/cpu/kernels.h"
#include "fuzz/child.h"
#include "support/inputs.h"

namespace headway::test::fuzz {
namespace {

// Covering arrays, each with its own seed and so its own triples and data. In the first, cases combine as much as they
// can; in the others most cases leave most masks out, so that there is something to compute.
constexpr double sparsities[] = {0.0, 0.6, 0.8, 0.9};
constexpr int rounds = std::size(sparsities);

const CoveringArray& covering_array(int round) {
  static const std::vector<CoveringArray> arrays = [] {
    std::vector<CoveringArray> made;
    for (double sparsity : sparsities)
      made.push_back(cover_pairs(sweep_factors(), sweep_compatible, sparsity, made.size() + 1));
    return made;
  }();
  return arrays[static_cast<std::size_t>(round)];
}

SweepCase case_number(int round, std::size_t number) {
  return sweep_case(covering_array(round).cases[number], 1000 * static_cast<std::uint64_t>(round) + 20 * number);
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

// A case in which masks leave nothing says little about the other options.
TEST(SweepCoverage, every_legal_pair_occurs_where_there_is_something_to_compute) {
  std::vector<Assignment> live;
  std::size_t all = 0;
  for (int round = 0; round < rounds; ++round)
    for (std::size_t n = 0; n < covering_array(round).cases.size(); ++n, ++all)
      if (case_number(round, n).live) live.push_back(covering_array(round).cases[n]);
  const auto not_all_dropped = [](int factor_a, int level_a, int factor_b, int level_b) {
    const auto drops_all = [](int factor, int level) {
      const Factor& one = sweep_factors()[static_cast<std::size_t>(factor)];
      return one.levels[static_cast<std::size_t>(level)] == "dropout=1";
    };
    return !drops_all(factor_a, level_a) && !drops_all(factor_b, level_b) &&
           sweep_compatible(factor_a, level_a, factor_b, level_b);
  };
  const Coverage coverage = coverage_of(live, sweep_factors(), not_all_dropped);
  EXPECT_EQ(coverage.covered, coverage.legal_pairs);
  std::cout << live.size() << " of " << all << " cases have rows with keys left; they cover " << coverage.covered
            << " of " << coverage.legal_pairs << " pairs\n";
}

TEST(SweepCoverage, a_missing_case_leaves_pairs_uncovered) {
  const CoveringArray& array = covering_array(0);
  const std::vector<Assignment> some(array.cases.begin(), array.cases.begin() + 10);
  EXPECT_LT(coverage_of(some, sweep_factors(), sweep_compatible).covered, array.legal_pairs);
}

class Sweep : public testing::TestWithParam<int> {};

// The oracle computes a case once for all engines and instruction sets. Two rounds are enough for instruction sets that
// this machine does not use by itself.
bool takes_part(const Target& target, int round) {
  const bool usual = target.engine == Engine::reference || target.isa == cpu::available_kernels().front()->name;
  return usual || round == 0 || round == rounds - 1;
}

// An engine may refuse a call with the reason, but never computes something else; the reference refuses nothing.
TEST_P(Sweep, every_case_is_as_the_contract_says) {
  Batch batch;
  for (std::size_t n = 0; n < covering_array(GetParam()).cases.size(); ++n)
    batch.push_back(std::make_unique<Prepared>(case_number(GetParam(), n).one));
  for (const Target& target : targets()) {
    if (!takes_part(target, GetParam())) continue;
    const BatchResult result = run_batch(batch, 0, target);
    EXPECT_FALSE(result.verdict.failed) << name(target) << ": " << result.verdict.failure.check << ": "
                                        << result.verdict.failure.text << "\n"
                                        << line_of(batch[result.end]->materials.what);
    if (result.refused > 0)
      std::cout << name(target) << " refused " << result.refused << " of " << batch.size() << '\n';
  }
}

INSTANTIATE_TEST_SUITE_P(Rounds, Sweep, testing::Range(0, rounds), [](const testing::TestParamInfo<int>& round) {
  return "cpu_and_reference_" + std::to_string(round.param);
});

// In this process: a device does not survive a fork.
class SweepOnDevice : public testing::TestWithParam<int> {};

TEST_P(SweepOnDevice, every_case_is_as_the_contract_says) {
  if (std::ranges::count(tested_engines(), Engine::cuda) == 0) GTEST_SKIP() << "there is no GPU";
  const auto& cases = covering_array(GetParam()).cases;
  std::size_t refused = 0;
  for (std::size_t n = 0; n < cases.size() && !HasFailure(); ++n) {
    const Prepared prepared(case_number(GetParam(), n).one);
    SCOPED_TRACE(line_of(prepared.materials.what));
    try {
      const auto failure = check(prepared, Engine::cuda);
      EXPECT_FALSE(failure) << failure->check << ": " << failure->text;
    } catch (const Unsupported&) {
      ++refused;
    } catch (const std::exception& error) {
      ADD_FAILURE() << error.what();
    }
  }
  if (refused > 0) std::cout << "cuda refused " << refused << " of " << cases.size() << '\n';
}

INSTANTIATE_TEST_SUITE_P(Rounds, SweepOnDevice, testing::Range(0, rounds),
                         [](const testing::TestParamInfo<int>& round) {
                           return "cuda_" + std::to_string(round.param);
                         });

}  // namespace
}  // namespace headway::test::fuzz
