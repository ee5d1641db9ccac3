// Every pair of levels of every two options over 1 to 4 ranks that are threads, against the oracle.
#include <gtest/gtest.h>

#include "split_sweep.h"

namespace headway::test {
namespace {

class DistributedSweep : public testing::TestWithParam<int> {};

TEST_P(DistributedSweep, every_pair_of_options_gives_what_one_process_does) {
  sweep_split_calls(GetParam(), [](const SplitCall& split, ConstTensorView grad_out) {
    expect_split(split.whole, run_split(split, GetParam(), &grad_out), grad_out);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, DistributedSweep, testing::Values(1, 2, 3, 4),
                         [](const testing::TestParamInfo<int>& one) { return std::to_string(one.param); });

}  // namespace
}  // namespace headway::test
