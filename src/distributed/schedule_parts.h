// What the schedule, the simulator and the executor share: bytes of a row, heads of a rank.
#pragma once

#include <string>

#include "headway/distributed.h"

namespace headway::distributed {

// Why a scheme cannot be; empty where it can.
std::string impossible(Scheme scheme, const Sizes& sizes, int ranks, bool backward);

// The fastest of these that can be.
Scheme choose_among(std::span<const Scheme> schemes, const Sizes& sizes, const Seen& seen, const Sharding& sharding,
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

// The heads that a rank computes in scheme heads.
struct HeadGroup {
  Rows kv_heads;
  Rows heads;
};
HeadGroup head_group(const Sizes& sizes, int ranks, int rank);

struct HeadBytes {
  double inputs = 0;
  double results = 0;
};
HeadBytes head_bytes(const Schedule& schedule, const RowBytes& bytes, int from, int to);

}  // namespace headway::distributed
