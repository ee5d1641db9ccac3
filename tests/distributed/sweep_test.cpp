// Every pair of levels of every two options over 1 to 4 ranks, against the oracle: the cases of tests/fuzz, split.
#include "fuzz/sweep.h"

#include <gtest/gtest.h>

#include "fuzz/materials.h"
#include "split_on_threads.h"

namespace headway::test {
namespace {

using namespace fuzz;

class DistributedSweep : public testing::TestWithParam<int> {};

// Ranks bring contiguous rows, so that the layouts, the last factors, are left out.
std::vector<Factor> split_factors() {
  std::vector<Factor> factors = sweep_factors();
  std::erase_if(factors, [](const Factor& one) { return one.name.ends_with("layout"); });
  return factors;
}

TEST_P(DistributedSweep, every_pair_of_options_gives_what_one_process_does) {
  const int ranks = GetParam();
  const CoveringArray array =
      cover_pairs(split_factors(), sweep_compatible, ranks == 1 ? 0.0 : 0.7, static_cast<std::uint64_t>(ranks));
  std::size_t turn = 0;
  for (const Assignment& levels : array.cases) {
    const Materials materials(sweep_case(levels, 20 * turn).one);
    const Call& call = materials.call;
    const int axis = call.packing ? 0 : call.q.rank() - 2;
    const std::int64_t kv_heads = call.packing ? call.k.size(1) : call.k.rank() == 4 ? call.k.size(1) : 1;
    const auto shards = shardings(call.q.size(axis), call.k.size(axis), ranks);
    Scheme scheme = schemes[turn % 5];
    if (!is_possible(scheme, call, kv_heads, ranks)) scheme = schemes[turn % 2];
    const std::size_t shard = turn / 5 % shards.size();
    SCOPED_TRACE(testing::Message() << line_of(materials.what) << ": " << ranks << " ranks, " << name(scheme)
                                    << ", shards " << shard);
    const SplitResults results = run_split({call, shards[shard], scheme}, ranks, &materials.grad_out);
    expect_split(call, results, materials.grad_out);
    if (testing::Test::HasFailure()) return;
    ++turn;
  }
  const Coverage coverage = coverage_of(array.cases, split_factors(), sweep_compatible);
  EXPECT_EQ(coverage.covered, array.legal_pairs);
}

INSTANTIATE_TEST_SUITE_P(Ranks, DistributedSweep, testing::Values(1, 2, 3, 4),
                         [](const testing::TestParamInfo<int>& one) { return std::to_string(one.param); });

}  // namespace
}  // namespace headway::test
