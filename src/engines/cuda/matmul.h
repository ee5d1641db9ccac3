// Matrix products through cuBLASLt, for layouts that it takes.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string_view>

#include "headway/dtype.h"

namespace headway::cuda {

// A matrix in device memory; strides in elements.
struct FlatMatrix {
  void* data = nullptr;
  std::int64_t rows = 0, columns = 0;
  std::int64_t row = 0, column = 0;

  FlatMatrix transposed() const { return {data, columns, rows, column, row}; }
};

// d = a b + bias  [M,N] = [M,K] [K,N] + [N]. Halves and f32 are summed in f32, f64 in f64; rounded once.
struct Matmul {
  FlatMatrix a, b, d;
  const void* bias = nullptr;  // its elements lie side by side
  DType dtype = DType::f32;
  int device = 0;  // the current one
  cudaStream_t stream = nullptr;
  std::string_view operation;
};

// Queues the product; false where cuBLASLt has no way for these layouts and sizes, and d is still to be written. The
// way is chosen once for a shape, layout and alignment, so the same call takes the same way and gives the same bits.
bool matmul(const Matmul& call);

}  // namespace headway::cuda
