// The forward pass: which kernel takes a call, and its launches.
#pragma once

#include "core/problem.h"
#include "headway/plan.h"

namespace headway::cuda {

void describe_forward(const Problem& problem, Plan& plan);
void forward(const ForwardProblem& problem);

}  // namespace headway::cuda
