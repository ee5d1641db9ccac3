// From a Problem to kernel arguments.
#pragma once

#include <optional>
#include <string>

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

// The scale or softcap, in words, with which products may overflow or vanish where scores are ordinary, whatever the
// inputs, or which a float does not have: such calls are done in plain arithmetic. Nothing for ordinary ones.
std::optional<std::string> extreme_scale(const Problem& problem);

// Why kernels that use Hopper's own instructions do not take it: the chip.
std::optional<std::string> hopper_chip_refusal(const Problem& problem);

// Why the tensor core kernels do not take it: they want a half type, and heads that are not too wide.
std::optional<std::string> tensor_core_refusal(const Problem& problem);

// The same of those for f32 in three bf16 parts.
std::optional<std::string> split_refusal(const Problem& problem);
std::optional<std::string> hopper_split_refusal(const Problem& problem);

// Everything but the lengths and spans.
Arguments arguments_of(const Problem& problem);

// Lengths and spans that lie in host memory travel with the call: this many bytes of workspace hold them, and what
// spans need besides (spans.h).
std::size_t lengths_bytes(const Problem& problem);
void place_lengths(const Problem& problem, Arguments& arguments, Workspace& workspace, cudaStream_t stream);

}  // namespace headway::cuda
