// How one of several kernels is chosen for a call: candidates stand in an order, each may refuse, and the first that
// does not, and whose launch fits the device, runs. forward.cpp, backward.cpp and scores.cpp have the lists.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "engines/cuda/device.h"
#include "engines/cuda/kernels/kernels.h"
#include "headway/plan.h"

namespace headway::cuda {

// Why a kernel does not take a call; nothing when it does.
using Refusal = std::optional<std::string>;

// The kernels before the chosen one, and why each does not run the call.
using PassedKernels = std::vector<Plan::PassedKernel>;

// Whether a block may have the launch's shared memory, beside `own` bytes that its kernel declares itself.
Refusal shared_refusal(const Launch& launch, std::size_t own, const DeviceProperties& device);

// What a plan says about a launch.
void describe_launch(const Launch& launch, Plan& plan);

}  // namespace headway::cuda
