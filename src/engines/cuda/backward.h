// The backward pass: delta, then a kernel for each gradient that was asked for.
#pragma once

#include "core/problem.h"
#include "headway/plan.h"

namespace headway::cuda {

void describe_backward(const Problem& problem, Plan& plan);
void backward(const BackwardProblem& problem);

}  // namespace headway::cuda
