// Keys that are split over blocks: into how many parts, and the memory for what each leaves of its rows.
#pragma once

#include "engines/cuda/device.h"
#include "engines/cuda/kernels/decode_arguments.h"

namespace headway::cuda {

// What share of the slots' time is used when `tasks` tasks of `steps` steps each are split.
double split_efficiency(std::int64_t tasks, std::int64_t steps, std::int64_t splits, std::int64_t slots);

// The smallest number of splits, at most so many, whose last wave of blocks is nearly as full as the best number's.
std::int64_t balanced_splits(std::int64_t tasks, std::int64_t steps, std::int64_t most, std::int64_t slots);

// The sums and statistics of splits that wait to be merged.
struct SplitShape {
  std::int64_t heads;  // kv heads, of all batch items
  std::int64_t splits;
  std::int64_t rows;  // of a head, in whole tiles
  std::int64_t value_dim;

  std::size_t sum_bytes() const;
  std::size_t statistic_bytes() const;
  std::size_t bytes() const { return sum_bytes() + statistic_bytes(); }  // 0 for one split
};

SplitArguments place_splits(const SplitShape& shape, float unit, Workspace& workspace);

}  // namespace headway::cuda
