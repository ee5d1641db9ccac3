// How the Hopper forward kernel reads a mask or bias: see kernels/hopper_units.cuh.
#pragma once

#include "core/problem.h"
#include "engines/cuda/kernels/hopper_arguments.h"

namespace headway::cuda {

// How blocks of the bias, or else of the mask, reach shared memory.
UnitArguments units_of(const Problem& problem, const HopperTile& tile);

}  // namespace headway::cuda
