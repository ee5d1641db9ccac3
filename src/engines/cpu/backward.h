// The CPU engine's backward pass: how a problem is cut into tasks.
#pragma once

#include "core/problem.h"
#include "headway/plan.h"

namespace headway::cpu {

void describe_backward(const Problem& problem, Plan& plan);
void backward(const BackwardProblem& problem, const Plan& plan);

}  // namespace headway::cpu
