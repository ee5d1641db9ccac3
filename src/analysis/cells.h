// An analysis that passes its maps on row by row, in cells of any size: for maps too fine to be stored in a result.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "core/problem.h"
#include "headway/analysis.h"

namespace headway {

// Receives row `row` of cells of head b * H + h: means and maxima. Called from several threads, for different rows.
struct CellTaker {
  std::int64_t row_cell = 1, key_cell = 1;
  std::function<void(std::int64_t head, std::int64_t row, std::span<const double> mean, std::span<const double> max)>
      take = {};
};

// analyze() for a problem from analysis_problem; with a consumer, the result's own maps are empty.
Analysis analyze(const Problem& problem, const AnalysisRequest& request, const CellTaker& taker);

}  // namespace headway
