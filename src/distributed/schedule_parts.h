// What the schedule, the simulator and the executor share: bytes of a row, heads of a rank.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "headway/distributed.h"

namespace headway::distributed {

// Those that `automatic` chooses from; the first two leave queries where they are.
inline constexpr std::array<Scheme, 5> all_schemes = {Scheme::all_gather, Scheme::ring, Scheme::heads,
                                                      Scheme::pass_query, Scheme::hybrid};

// Why a scheme cannot be; empty where it can.
std::string impossible(Scheme scheme, const Sizes& sizes, int ranks, bool backward);

// How many ranks the groups of hybrid may have, the largest first.
std::vector<int> group_sizes(const Sizes& sizes, int ranks);

// The fastest of these that can be; one of them must be.
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

// The ranks that split the heads among them: all for heads, a group of neighbours for hybrid, each alone else.
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
