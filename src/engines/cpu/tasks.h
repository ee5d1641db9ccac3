// Common to the passes: cutting work into tasks.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/ceil_div.h"

namespace headway::cpu {

// The least work for which another thread pays off: about 20 microseconds of one core.
constexpr double task_flops = 2e6;

// How many of `units` equal pieces of work make a task: enough to pay off, and more if there are many small pieces,
// since a thread can prefetch only inside its own task.
inline std::int64_t units_in_task(std::int64_t units, double unit_flops, int threads) {
  constexpr double most_flops = 20 * task_flops;
  constexpr std::int64_t tasks_of_a_thread = 32;
  const auto filling = [&](double flops) { return static_cast<std::int64_t>(flops / std::max(unit_flops, 1.0)); };
  const std::int64_t many = std::min(units / (tasks_of_a_thread * threads), filling(most_flops));
  return std::clamp<std::int64_t>(std::max(filling(task_flops), many), 1,
                                  std::max<std::int64_t>(1, ceil_div(units, threads)));
}

}  // namespace headway::cpu
