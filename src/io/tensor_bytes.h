// Converts between tensors and the bytes of their elements in C order, which all three formats store.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "headway/io.h"
#include "io/file_context.h"
#include "io/input_file.h"
#include "io/output_file.h"

namespace headway::io {

// What one format calls an element type.
struct TypeName {
  std::string_view name;
  DType dtype;
};

const TypeName* find_type(std::span<const TypeName> types, std::string_view name);  // null when there is none
const TypeName* find_type(std::span<const TypeName> types, DType dtype);
std::string listed(std::span<const TypeName> types);  // "F32, F64"

// Appends a size that a file claims.
void append_size(Dims& sizes, std::uint64_t size, const FileContext& context);

// The bytes of a tensor that a file claims to hold; a FileError if they pass 2^63 or `limits`.
std::uint64_t checked_bytes(const Dims& sizes, DType dtype, const ReadLimits& limits, const FileContext& context);

// Allocates: call it only after comparing checked_bytes() with what the source has.
Tensor read_elements(ByteSource& source, const Dims& sizes, DType dtype);

// In error texts: ` for "weight"`, or nothing where a file holds one tensor and `name` is empty.
std::string for_tensor(std::string_view name);
void require_host(const char* operation, std::string_view name, ConstTensorView view);
void write_elements(const ByteSink& sink, ConstTensorView view);

}  // namespace headway::io
