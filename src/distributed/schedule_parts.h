// Common to the schedule, the simulator and the executors: bytes of a row, heads of a rank.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "headway/distributed.h"

namespace headway::distributed {

// Those that `automatic` chooses from; the first two leave queries where they are.
inline constexpr std::array<Scheme, 5> all_schemes = {Scheme::all_gather, Scheme::ring, Scheme::heads,
                                                      Scheme::pass_query, Scheme::hybrid};

// Why a scheme is impossible; empty if it is possible.
std::string impossible(Scheme scheme, const Sizes& sizes, int ranks, bool backward);

// The possible group sizes of hybrid, the largest first.
std::vector<int> group_sizes(const Sizes& sizes, int ranks);

// The fastest possible one of these; at least one must be possible.
Schedule plan_among(std::span<const Scheme> schemes, const Sizes& sizes, const Seen& seen, const Sharding& sharding,
                    const Cluster& cluster, bool backward);

// Of one row, over all batch items and heads. Partial results and gradients of parts travel in the accumulator's type.
struct RowBytes {
  double query = 0;
  double key_value = 0;
  double key_gradient = 0;
  double partial = 0;
  double out = 0;
  double lse = 0;
};
RowBytes row_bytes(const Sizes& sizes);

// The ranks that split the heads: all for heads, a group of neighbours for hybrid, otherwise each rank alone.
struct RankGroup {
  int first = 0;
  int size = 1;
};
RankGroup group_of(const Schedule& schedule, int rank);

// The heads that a rank computes: all, unless a group splits them.
struct HeadShare {
  Rows kv_heads;
  Rows heads;
};
HeadShare heads_of(const Schedule& schedule, int rank);

}  // namespace headway::distributed
