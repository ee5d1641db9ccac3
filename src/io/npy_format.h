// The .npy format, alone in a file or as a member of a .npz archive.
#pragma once

#include <cstdint>
#include <string_view>

#include "headway/io.h"
#include "io/file_context.h"
#include "io/input_file.h"
#include "io/output_file.h"

namespace headway::io {

struct NpyHeader {
  DType dtype = DType::f32;
  bool fortran_order = false;
  Dims sizes;

  // Fortran order stores the elements of the reversed shape in C order.
  Dims stored_sizes() const;
  // The elements as the header means them, from a tensor of the stored sizes or a slice of it.
  Tensor as_meant(Tensor stored) const;
};
// Leaves the source at the first element; a FileError unless what remains is the elements.
NpyHeader read_npy_header(ByteSource& source, const FileContext& context, const ReadLimits& limits);
std::string npy_header(const Dims& sizes, DType dtype);

// Reads a source that holds one array and nothing after it.
Tensor read_npy(ByteSource& source, const FileContext& context, const ReadLimits& limits);

// Checks that the tensor can be written: TypeMismatch for bf16, Unsupported for memory of another device. `name` may be
// empty.
void require_npy(const char* operation, std::string_view name, ConstTensorView view);
std::uint64_t npy_bytes(ConstTensorView view);
void write_npy(const ByteSink& sink, ConstTensorView view);

}  // namespace headway::io
