// The analysis of tensors on a CUDA device: computed there, with results in host memory except for mean weights.
// Defined in the CUDA engine's folder, or in the one that stands in for it where it is not built.
#pragma once

#include <cstdint>
#include <optional>

#include "analysis/cells.h"
#include "core/problem.h"
#include "headway/analysis.h"

namespace headway {

// `result` is allocated; all of it is written.
void analyze_on_device(const Problem& problem, const AnalysisRequest& request, const CellTaker& taker,
                       Analysis& result);

// `weights` [B,H,rows,keys]; lse [B,H,Sq] in host memory or on the device, or none.
void weights_on_device(const Problem& problem, const Rectangle& rectangle, const std::optional<ConstTensorView>& lse,
                       Tensor& weights);

// One head; `lse` as above.
void map_on_device(const Problem& problem, std::int64_t batch, std::int64_t head, const Rectangle& rectangle,
                   std::int64_t row_cell, std::int64_t key_cell, const ConstTensorView& lse, TileMap& map);

// `mean` [B,Sq,Sk] and lse [B,H,Sq], both on the device; queued, not waited for.
void mean_weights_on_device(const Problem& problem, const ConstTensorView& lse, const TensorView& mean);

}  // namespace headway
