// How the Hopper forward kernel reads a mask or bias: see kernels/hopper_units.cuh.
#pragma once

#include <optional>

#include "core/problem.h"
#include "engines/cuda/device.h"
#include "engines/cuda/kernels/hopper_arguments.h"

namespace headway::cuda {

// How blocks of the bias, or else of the mask, reach shared memory.
UnitArguments units_of(const Problem& problem, const HopperTile& tile, const std::optional<ConstTensorView>& aligned);

// Workspace for a copy of the mask or bias with rows that the copy engine can step over. 0 where it can already, or
// where the copy would take more memory than query, key and value.
std::size_t aligned_matrix_bytes(const Problem& problem);
std::optional<ConstTensorView> place_aligned_matrix(const Problem& problem, Workspace& workspace);

}  // namespace headway::cuda
