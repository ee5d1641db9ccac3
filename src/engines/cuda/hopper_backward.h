// The Hopper backward's host side: which calls it takes, what it would launch, and the launches.
#pragma once

#include <optional>
#include <string>

#include "core/problem.h"
#include "engines/cuda/arguments.h"
#include "engines/cuda/device.h"
#include "engines/cuda/kernels/kernels.h"

namespace headway::cuda {

// Why the kernel does not take a call's inputs and options, or its gradients; nothing when it does. The data is not
// read.
std::optional<std::string> hopper_backward_refusal(const Problem& problem);
std::optional<std::string> hopper_gradient_refusal(const BackwardProblem& problem);

Launch hopper_backward_launch(const Problem& problem);

// Workspace that a call takes: f32 sums of dq, and a few numbers for each query row.
std::size_t hopper_backward_bytes(const Problem& problem);

// Into how many parts the query heads of a kv head and their rows are shared out, whose sums of dk and dv are then
// added up in order.
std::int64_t hopper_backward_parts(const Problem& problem);

// How many query rows have one entry in CoarseRows::found.
int hopper_backward_rows_a_tile(const Problem& problem);

// Queues dq, dk and dv, as far as they are asked for, and fills coarse.found.
void queue_hopper_backward(const BackwardProblem& problem, const Arguments& arguments, const CoarseRows& coarse,
                           Workspace& workspace);

}  // namespace headway::cuda
