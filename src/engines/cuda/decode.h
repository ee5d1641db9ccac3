// Decoding on the host side: which calls have few queries over many keys, and their launch.
#pragma once

#include <optional>
#include <string>

#include "core/problem.h"
#include "engines/cuda/device.h"
#include "engines/cuda/kernels/kernels.h"

namespace headway::cuda {

// Why the kernel for every chip, or the one with tiles from the copy engine, does not take a call; the same over keys
// in pages, and in 8-bit ones.
std::optional<std::string> decode_refusal(const Problem& problem);
std::optional<std::string> hopper_decode_refusal(const Problem& problem);
std::optional<std::string> paged_decode_refusal(const Problem& problem);
std::optional<std::string> hopper_paged_decode_refusal(const Problem& problem);
std::optional<std::string> byte_decode_refusal(const Problem& problem);

Launch choose_decode(const Problem& problem, const ForwardArguments& arguments);
Launch choose_hopper_decode(const Problem& problem, const ForwardArguments& arguments);
Launch choose_paged_decode(const Problem& problem, const ForwardArguments& arguments);
Launch choose_hopper_paged_decode(const Problem& problem, const ForwardArguments& arguments);
Launch choose_byte_decode(const Problem& problem, const ForwardArguments& arguments);

// Workspace of a launch, besides the lengths.
std::size_t decode_bytes(const Problem& problem, const Launch& launch);

cudaError_t queue_decode(const ForwardProblem& problem, const Launch& launch, const ForwardArguments& arguments,
                         Workspace& workspace);

}  // namespace headway::cuda
