// Covering arrays of strength two: a short list of cases in which every legal pair of levels of every two factors
// occurs.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace headway::test::fuzz {

struct Factor {
  std::string name;
  std::vector<std::string> levels;
  bool restricts = false;  // its levels but the first leave less to compute
};

// One level's number per factor.
using Assignment = std::vector<int>;

// Whether level_a of factor_a may occur together with level_b of factor_b; asked with factor_a < factor_b.
using Compatible = std::function<bool(int factor_a, int level_a, int factor_b, int level_b)>;

struct CoveringArray {
  std::vector<Assignment> cases;
  std::int64_t legal_pairs = 0;
  std::int64_t forbidden_pairs = 0;
};

// Greedy: each case starts from a pair not yet covered and takes, factor by factor, the level that covers the most new
// pairs; a factor that restricts takes its first level instead with probability `sparsity`, so that some cases have
// much to compute. Ties fall by the seed. Every factor needs a level that is compatible with everything.
CoveringArray cover_pairs(const std::vector<Factor>& factors, const Compatible& compatible, double sparsity,
                          std::uint64_t seed);

// How many legal pairs of levels the cases contain, counted anew; and whether any case holds a forbidden pair.
struct Coverage {
  std::int64_t legal_pairs = 0;
  std::int64_t covered = 0;
  bool legal = true;
};
Coverage coverage_of(const std::vector<Assignment>& cases, const std::vector<Factor>& factors,
                     const Compatible& compatible);

}  // namespace headway::test::fuzz
