// From a Problem to kernel arguments.
#pragma once

#include "core/problem.h"
#include "engines/cuda/arguments.h"
#include "engines/cuda/device.h"

namespace headway::cuda {

Rows rows_of(const ConstTensorView& view);
Rows row_values_of(const ConstTensorView& view);  // [B,H,S]
Matrix matrix_of(const ConstTensorView& view);

// What the device has that the problem's tensors lie on.
const DeviceProperties& device_of(const Problem& problem);

bool is_half_type(DType dtype);

// Whether the tensor core kernels take it: a half type, and heads that are not too wide.
bool fits_tensor_cores(const Problem& problem);

// Everything but the lengths.
Arguments arguments_of(const Problem& problem);

// Lengths that lie in host memory travel with the call: this many bytes of workspace hold them.
std::size_t lengths_bytes(const Problem& problem);
void place_lengths(const Problem& problem, Arguments& arguments, Workspace& workspace, cudaStream_t stream);

}  // namespace headway::cuda
