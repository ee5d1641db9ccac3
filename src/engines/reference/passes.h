// The three passes of the reference engine, each in the file of its name.
#pragma once

#include "core/problem.h"

namespace headway::reference {

void forward(const ForwardProblem& problem);
void backward(const BackwardProblem& problem);
void scores(const ScoresProblem& problem);

// What backward allocates besides its outputs, in bytes.
double backward_scratch(const Problem& problem);

}  // namespace headway::reference
