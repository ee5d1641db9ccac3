// The backward pass: delta, then a kernel for each gradient that was asked for.
#pragma once

#include "core/problem.h"
#include "engines/cuda/kernel_choice.h"
#include "headway/plan.h"

namespace headway::cuda {

struct BackwardKernel;  // a row of the list in backward.cpp

struct BackwardChoice {
  const BackwardKernel* kernel = nullptr;
  Launch launch;  // of the gradients of keys, or of all
};

// A plan that is only explained has no gradients yet: they will suit. Reasons go to `passed`, unless null.
BackwardChoice choose_backward(const Problem& problem, const BackwardProblem* call = nullptr,
                               PassedKernels* passed = nullptr);

void describe_backward(const Problem& problem, const BackwardChoice& choice, Plan& plan);
void backward(const BackwardProblem& problem, const BackwardChoice& planned);

}  // namespace headway::cuda
