// The option space of section 1 as factors whose levels are words of a case, and cases in which every pair of levels of
// every two factors occurs.
#pragma once

#include "fuzz/case.h"
#include "fuzz/pairwise.h"

namespace headway::test::fuzz {

const std::vector<Factor>& sweep_factors();
bool sweep_compatible(int factor_a, int level_a, int factor_b, int level_b);

// The case of one row of a covering array. Its seed is the first with which some row attends to two keys (to one, where
// more is impossible) and not all is dropped, if there is one among a few.
struct SweepCase {
  Case one;
  bool live;
};
SweepCase sweep_case(const Assignment& levels, std::uint64_t first_seed);

}  // namespace headway::test::fuzz
