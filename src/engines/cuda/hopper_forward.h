// The Hopper forward kernel's host side: which calls it takes, what it would launch, and the launch.
#pragma once

#include <optional>
#include <string>

#include "core/problem.h"
#include "engines/cuda/arguments.h"
#include "engines/cuda/device.h"
#include "engines/cuda/kernels/hopper_arguments.h"
#include "engines/cuda/kernels/kernels.h"

namespace headway::cuda {

// The copy engine's positions, and sums of them, are 32-bit numbers.
constexpr std::int64_t longest_axis = std::int64_t{1} << 28;

// Why the kernel does not take a call's inputs and options, or its output; nothing when it does. The data is not read.
std::optional<std::string> hopper_refusal(const Problem& problem);
std::optional<std::string> hopper_refusal(const TensorView& out);

Launch hopper_launch(const Problem& problem);

// Workspace of a launch, besides the lengths.
std::size_t hopper_bytes(const Problem& problem, const Launch& launch);

// A call that was not refused; its lengths have been placed.
cudaError_t queue_hopper(const ForwardProblem& problem, const Launch& launch, const ForwardArguments& arguments,
                         Workspace& workspace);

// Rows of a box of keys: a block's, or as many of them as always lie in one page.
int box_rows(const Problem& problem, std::int64_t block);

// For the backward too: whether type and device suit, whether the copy engine can read query, key and value, how a
// tensor map is stepped over, and softcap's coefficients.
std::optional<std::string> kind_refusal(const Problem& problem);
std::optional<std::string> input_refusal(const Problem& problem);
MapSteps steps_of(const ConstTensorView& view);
void place_softcap(double cap, double unit, HopperArguments& arguments);

}  // namespace headway::cuda
