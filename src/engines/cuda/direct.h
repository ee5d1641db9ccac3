// Kernels whose operands go straight to registers, on the host side: few queries and keys of halves
// (kernels/direct_tile.cuh), and few queries over many keys of f32 (kernels/exact_decode.cuh).
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

std::optional<std::string> exact_decode_refusal(const Problem& problem);
Launch choose_exact_decode(const Problem& problem, const ForwardArguments& arguments);
cudaError_t queue_exact_decode(const ForwardProblem& problem, const Launch& launch, const ForwardArguments& arguments,
                               Workspace& workspace);

}  // namespace headway::cuda
