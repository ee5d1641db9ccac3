#include "engines/cuda/splits.h"

#include <algorithm>

namespace headway::cuda {

// Steps that the slowest slot takes, against what an even share would be.
double split_efficiency(std::int64_t tasks, std::int64_t steps, std::int64_t splits, std::int64_t slots) {
  const std::int64_t waves = (tasks * splits + slots - 1) / slots, longest = (steps + splits - 1) / splits;
  return static_cast<double>(tasks * steps) / static_cast<double>(waves * longest * slots);
}

std::int64_t balanced_splits(std::int64_t tasks, std::int64_t steps, std::int64_t most, std::int64_t slots) {
  const std::int64_t limit = std::max<std::int64_t>(most, 1);
  const auto efficiency = [&](std::int64_t splits) { return split_efficiency(tasks, steps, splits, slots); };
  double best = 0;
  for (std::int64_t splits = 1; splits <= limit; ++splits) {
    best = std::max(best, efficiency(splits));
  }
  std::int64_t splits = 1;
  while (splits < limit && efficiency(splits) < 0.9 * best) {
    ++splits;
  }
  return splits;
}

namespace {

std::size_t bytes_of(const SplitShape& shape, std::int64_t numbers) {
  const std::int64_t rows = shape.splits > 1 ? shape.heads * shape.splits * shape.rows : 0;
  return Workspace::rounded(static_cast<std::size_t>(rows * numbers) * sizeof(float));
}

}  // namespace

std::size_t SplitShape::sum_bytes() const { return bytes_of(*this, sum_width(value_dim)); }

std::size_t SplitShape::statistic_bytes() const { return bytes_of(*this, 2); }

SplitArguments place_splits(const SplitShape& shape, float unit, Workspace& workspace) {
  SplitArguments split{};
  split.splits = shape.splits;
  split.rows = shape.rows;
  split.unit = unit;
  split.sums = static_cast<float*>(workspace.take(shape.sum_bytes()));
  split.statistics = static_cast<float*>(workspace.take(shape.statistic_bytes()));
  return split;
}

}  // namespace headway::cuda
