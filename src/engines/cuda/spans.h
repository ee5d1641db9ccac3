// From a Problem's spans to those of kernel arguments: sent from host memory, or brought into normal form where they
// are in device memory, and the tiles that they leave something of. Nothing waits, and a graph keeps no host memory.
#pragma once

#include "core/problem.h"
#include "engines/cuda/arguments.h"
#include "engines/cuda/device.h"

namespace headway::cuda {

// Workspace that place_spans takes.
std::size_t spans_bytes(const Problem& problem);

// Behind the lengths: packed sequences must be known.
void place_spans(const Problem& problem, Arguments& arguments, Workspace& workspace, cudaStream_t stream);

}  // namespace headway::cuda
