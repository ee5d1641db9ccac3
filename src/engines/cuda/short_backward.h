// The backward of short sequences in one kernel (kernels/short_gradient.cuh): which calls it takes.
#pragma once

#include <optional>
#include <string>

#include "core/problem.h"

namespace headway::cuda {

// Why the kernel does not take a call, or why another one is expected to be faster; nothing when it takes it.
std::optional<std::string> short_backward_refusal(const Problem& problem);

}  // namespace headway::cuda
