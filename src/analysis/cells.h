// An analysis whose maps go elsewhere as they come, in cells of any size: for maps too fine to be a result.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "core/problem.h"
#include "headway/analysis.h"

namespace headway {

// Takes row `row` of cells of head b * H + h: means, and largest weights. Called from several threads, for different
// rows.
struct CellTaker {
  std::int64_t row_cell = 1, key_cell = 1;
  std::function<void(std::int64_t head, std::int64_t row, std::span<const double> mean, std::span<const double> max)>
      take = {};
};

// analyze() of a problem that analysis_problem made; with a taker the result's own maps are empty.
Analysis analyze(const Problem& problem, const AnalysisRequest& request, const CellTaker& taker);

}  // namespace headway
