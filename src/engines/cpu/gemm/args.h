// What the matrix product's kernels are told: bare pointers, strides in elements and numbers. No type in here has code
// of its own, so every instruction set may share it.
#pragma once

#include <cstdint>

namespace headway::cpu {

// The rows of a batch of matrices as one list: row r is row r % per_item of item r / per_item. Where all rows are
// equally far apart there is one item.
template <class Void>
struct ItemRows {
  Void* data = nullptr;
  std::int64_t per_item = 1;
  std::int64_t item_stride = 0;
  std::int64_t row_stride = 0;
  std::int64_t column_stride = 0;
};

// out = left right + bias, or left^T right: out [rows, columns], left [rows, depth] ([depth, rows] when transposed),
// right [depth, columns]. One task makes out[row_begin .. row_end, column_begin .. column_end]; column_begin is a
// multiple of the kernel's panel.
struct GemmArgs {
  ItemRows<const void> left;
  bool left_transposed = false;
  ItemRows<const void> right;
  const void* bias = nullptr;  // [columns]; null: none
  std::int64_t bias_stride = 0;
  ItemRows<void> out;
  std::int64_t rows = 0, columns = 0, depth = 0;
  const std::uint8_t* skipped =
      nullptr;                  // left_transposed only: [depth], rows of left to take for 0 whatever they hold
  bool exact_products = false;  // not through products of pairs, which take denormals for 0
  std::int64_t row_begin = 0, row_end = 0;
  std::int64_t column_begin = 0, column_end = 0;
  // [rows] of a left that is not transposed: whether each suits products of pairs; null: not known yet
  const std::uint8_t* paired_rows = nullptr;
};

}  // namespace headway::cpu
