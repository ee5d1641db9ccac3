// The kernels for keys and values in pages: those of kernels.h and decode_kernels.h with other loads, the same
// arithmetic in the same order, so that the bits are those of keys in one tensor.
#pragma once

#include "engines/cuda/kernels/decode_kernels.h"
#include "engines/cuda/kernels/kernels.h"

namespace headway::cuda {

// launch_forward and launch_decode launch them.
Launch paged_mma_launch(const ForwardArguments& arguments, DType dtype);
Launch paged_exact_launch(const ForwardArguments& arguments,
                          DType dtype);  // of the f32 and f64 kernels the compensated
Launch paged_decode_launch(const ForwardArguments& arguments, DType dtype, std::int64_t splits);

// Boxes of keys that are neighbours in a page: at least this many rows, or asking for them would take too long.
constexpr std::int64_t fewest_box_rows = 8;
Launch hopper_paged_decode_launch(const ForwardArguments& arguments, DType dtype, std::int64_t splits);

// 8-bit pages of `stored`, as float32 numbers; queries and output of `dtype`. Decoding takes half types, and rows whose
// chunks of 16 bytes can be copied whole.
Launch paged_bytes_launch(const ForwardArguments& arguments, DType dtype, DType stored);
Launch byte_decode_launch(const ForwardArguments& arguments, DType dtype, DType stored, std::int64_t splits);

}  // namespace headway::cuda
