// The .npy format, alone in a file or as a member of a .npz archive.
#pragma once

#include <cstdint>
#include <string_view>

#include "headway/io.h"
#include "io/file_context.h"
#include "io/input_file.h"
#include "io/output_file.h"

namespace headway::io {

// Reads a source that holds one array and nothing after it.
Tensor read_npy(ByteSource& source, const FileContext& context, const ReadLimits& limits);

// Checks that the tensor can be written: TypeMismatch for bf16, Unsupported for memory of another device. `name` may be
// empty.
void require_npy(const char* operation, std::string_view name, ConstTensorView view);
std::uint64_t npy_bytes(ConstTensorView view);
void write_npy(const ByteSink& sink, ConstTensorView view);

}  // namespace headway::io
