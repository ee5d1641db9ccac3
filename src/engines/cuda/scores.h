// The score matrix, and the weights that a forward pass was asked for.
#pragma once

#include "core/problem.h"
#include "engines/cuda/arguments.h"
#include "headway/plan.h"

namespace headway::cuda {

void describe_scores(const Problem& problem, Plan& plan);
void scores(const ScoresProblem& problem);

// For arguments whose lengths are in place already.
void queue_scores(const Problem& problem, const Arguments& arguments, const TensorView& matrix, headway::Stage stage);

}  // namespace headway::cuda
