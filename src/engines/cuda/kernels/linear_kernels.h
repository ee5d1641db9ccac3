// The kernels around a layer's matrix products, as the host side calls them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "headway/dtype.h"

namespace headway::cuda {

// Element (r, c) is at (r / inner) * outer + (r % inner) * row + c * column: the rows of a [B,S,F] view.
struct LinearMatrix {
  void* data = nullptr;
  std::int64_t inner = 1, outer = 0, row = 0, column = 0;
};

// product(m, n) = sum_k a(m, k) b(k, n) + bias(n)
struct ProductArguments {
  std::int64_t rows = 0, columns = 0, depth = 0;
  LinearMatrix a, b, product;
  bool a_by_depth = false;     // a's matrix has k along its rows
  bool b_by_column = false;    // b's has n along its rows
  const void* bias = nullptr;  // [N], side by side
  // Writes where the product holds a NaN, and leaves out every k for which b(k, n) is 0 for all n.
  bool repair = false;
};
cudaError_t launch_product(const ProductArguments& arguments, DType dtype, cudaStream_t stream);

// sums[c] = sum of column c, in one order. `partial` holds column_sum_chunks(rows) rows of sums: f64 for f64, else f32.
std::int64_t column_sum_chunks(std::int64_t rows);
cudaError_t launch_column_sums(const LinearMatrix& matrix, std::int64_t rows, std::int64_t columns, DType dtype,
                               void* partial, void* sums, cudaStream_t stream);

}  // namespace headway::cuda
