// Decoding on the host side: which calls have few queries over many keys, and their launch.
#pragma once

#include "core/problem.h"
#include "engines/cuda/device.h"
#include "engines/cuda/kernels/kernels.h"

namespace headway::cuda {

bool is_decoding(const Problem& problem);

Launch choose_decode(const Problem& problem, const ForwardArguments& arguments);

// Workspace of a launch, besides the lengths.
std::size_t decode_bytes(const Problem& problem, const Launch& launch);

cudaError_t queue_decode(const ForwardProblem& problem, const Launch& launch, const ForwardArguments& arguments,
                         Workspace& workspace);

}  // namespace headway::cuda
