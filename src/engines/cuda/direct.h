// Kernels whose operands go straight to registers (kernels/direct_tile.cuh), on the host side: which calls have few
// keys, or few queries, and their launch.
#pragma once

#include <optional>
#include <string>

#include "core/problem.h"
#include "engines/cuda/device.h"
#include "engines/cuda/kernels/kernels.h"

namespace headway::cuda {

std::optional<std::string> direct_forward_refusal(const Problem& problem);
Launch choose_direct_forward(const Problem& problem, const ForwardArguments& arguments);
cudaError_t queue_direct_forward(const ForwardProblem& problem, const Launch& launch, const ForwardArguments& arguments,
                                 Workspace& workspace);

std::optional<std::string> direct_decode_refusal(const Problem& problem);
Launch choose_direct_decode(const Problem& problem, const ForwardArguments& arguments);
// The same of f32, queued as those.
std::optional<std::string> exact_decode_refusal(const Problem& problem);
Launch choose_exact_decode(const Problem& problem, const ForwardArguments& arguments);
cudaError_t queue_direct_decode(const ForwardProblem& problem, const Launch& launch, const ForwardArguments& arguments,
                                Workspace& workspace);

}  // namespace headway::cuda
