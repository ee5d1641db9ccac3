// Gradients of few rows: the walk of each tile is shared out to several blocks, whose sums are added up in their order.
#pragma once

#include <cstddef>

#include "engines/cuda/arguments.h"
#include "engines/cuda/device.h"
#include "engines/cuda/kernels/kernels.h"
#include "engines/cuda/problem_arguments.h"

namespace headway::cuda {

// How many parts the walks of a launch are best shared out to, where the launch has one. It depends on the batch.
int gradient_parts(const Problem& problem, GradientOf of, const Launch& whole);

// Workspace for the parts of dq, or for those of dk and dv: they are used one after the other.
std::size_t gradient_part_bytes(const Problem& problem, GradientOf of, int parts);

// What the parts of one gradient are added up from, and where a kernel stores them: in `memory`, which is moved past
// them. A gradient that is not asked for has no parts.
GradientPartsArguments place_gradient_parts(const Problem& problem, GradientOf of, int parts, const Rows& gradient,
                                            std::byte*& memory);

}  // namespace headway::cuda
