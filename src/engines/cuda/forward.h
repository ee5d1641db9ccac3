// The forward pass: which kernel takes a call, and its launches.
#pragma once

#include "core/problem.h"
#include "engines/cuda/kernel_choice.h"
#include "headway/plan.h"

namespace headway::cuda {

struct ForwardKernel;  // a row of the list in forward.cpp

struct ForwardChoice {
  const ForwardKernel* kernel = nullptr;
  Launch launch;
  std::size_t workspace_bytes = 0;
};

// A plan that is only explained has no output yet: it will have one that suits. Reasons go to `passed`, unless null.
ForwardChoice choose_forward(const Problem& problem, const TensorView* out = nullptr, PassedKernels* passed = nullptr);

void describe_forward(const Problem& problem, const ForwardChoice& choice, Plan& plan);
void forward(const ForwardProblem& problem, const ForwardChoice& planned);

}  // namespace headway::cuda
