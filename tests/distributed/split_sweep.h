// Every pair of levels of every two options over a number of ranks: the cases of tests/fuzz, split.
#pragma once

#include <functional>

#include "fuzz/materials.h"
#include "fuzz/sweep.h"
#include "split_on_threads.h"

namespace headway::test {

// Ranks bring contiguous rows, so that the layouts, the last factors, are left out.
inline std::vector<fuzz::Factor> split_factors() {
  std::vector<fuzz::Factor> factors = fuzz::sweep_factors();
  std::erase_if(factors, [](const fuzz::Factor& one) { return one.name.ends_with("layout"); });
  return factors;
}

// Schemes and shards take turns. Ends at the first case with a failure.
inline void sweep_split_calls(int ranks, const std::function<void(const SplitCall&, ConstTensorView grad_out)>& check) {
  using namespace fuzz;
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
    check({call, shards[shard], scheme}, materials.grad_out);
    if (testing::Test::HasFailure()) return;
    ++turn;
  }
  EXPECT_EQ(coverage_of(array.cases, split_factors(), sweep_compatible).covered, array.legal_pairs);
}

}  // namespace headway::test
