// The CPU engine's forward pass and score matrices: how a problem is cut into tasks.
#pragma once

#include "core/problem.h"
#include "headway/plan.h"

namespace headway::cpu {

void describe_forward(const Problem& problem, Plan& plan);
void forward(const ForwardProblem& problem, const Plan& plan);

// attention_scores runs as a forward with values of width 0: the weights are the last stage, earlier stages are stored
// before the softmax.
void scores(const ScoresProblem& problem, const Plan& plan);

}  // namespace headway::cpu
