// The CPU engine's linear map: three matrix products, and how one is cut into tasks.
//
// With few rows each task reads the columns it makes of `right` where they lie. With many, `right` is packed first, by
// all threads, for all tasks to read; what is packed at a time is bounded, so a product with a large `right` is done in
// groups of columns or parts of depth. No element's bits depend on the cut, so it may follow the thread count.
#include "engines/cpu/linear.h"

#include <algorithm>

#include "core/elements.h"
#include "core/parallel.h"
#include "engines/cpu/arguments.h"
#include "engines/cpu/gemm/args.h"
#include "engines/cpu/kernels.h"
#include "engines/cpu/scratch.h"
#include "headway/threads.h"

namespace headway::cpu {
namespace {

constexpr std::int64_t few_rows = 256;  // not worth packing for, or packed by each task for itself
constexpr std::int64_t packed_bytes = std::int64_t{8} << 20;  // packed at a time
constexpr std::int64_t depth_unit = 1024;                     // parts of depth are multiples of it
constexpr std::int64_t pack_steps = 128;                      // depth that a packing task does
constexpr double task_flops = 2e6;                            // about 20 microseconds of one core
constexpr double bytes_as_rows = 8;  // reading a number of `right` costs as much as 8 rows of FMAs

// ---- Views as lists of rows ----

template <class Void>
ItemRows<Void> rows_of(BasicTensorView<Void> batch) {  // [B,S,width]
  const std::int64_t items = batch.size(0), rows = batch.size(1);
  if (rows == 1) {
    return {batch.data(), std::max<std::int64_t>(1, items), 0, batch.stride(0), batch.stride(2)};
  }
  if (items == 1 || batch.stride(0) == rows * batch.stride(1)) {
    return {batch.data(), std::max<std::int64_t>(1, items * rows), 0, batch.stride(1), batch.stride(2)};
  }
  return {batch.data(), std::max<std::int64_t>(1, rows), batch.stride(0), batch.stride(1), batch.stride(2)};
}

template <class Void>
ItemRows<Void> matrix_rows(BasicTensorView<Void> matrix) {  // [rows,width]
  return {matrix.data(), std::max<std::int64_t>(1, matrix.size(0)), 0, matrix.stride(0), matrix.stride(1)};
}

std::int64_t row_count(ConstTensorView batch) { return batch.size(1) == 0 ? 0 : batch.size(0) * batch.size(1); }

// ---- One product ----

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

class Product {
 public:
  Product(const GemmArgs& args, DType dtype)
      : args_(args),
        kernel_(chosen_kernels().gemm[static_cast<int>(storage_of(dtype))]),
        computes_in_own_type_(!is_half_type(dtype)) {
    const double work = static_cast<double>(args.depth) * static_cast<double>(args.columns) *
                        (2.0 * static_cast<double>(args.rows) + 2.0 * bytes_as_rows);
    threads_ = work < task_flops ? 1 : get_threads();
  }

  void run() {
    if (args_.rows == 0 || args_.columns == 0) {
      return;
    }
    args_.column_end = args_.columns;
    args_.depth_end = args_.depth;
    const bool whole_depth = args_.depth * step_bytes(kernel_.panel_columns) <= packed_bytes;
    if (args_.rows > few_rows && (computes_in_own_type_ || (whole_depth && !args_.left_transposed))) {
      run_packed();
    } else {
      const bool transposed = args_.left_transposed;
      run_tasks(transposed ? 512 : few_rows, transposed ? 512 : 256);
    }
  }

 private:
  static bool is_half_type(DType dtype) { return dtype == DType::bf16 || dtype == DType::f16; }

  std::int64_t step_bytes(std::int64_t columns) const { return columns * kernel_.scalar_bytes; }

  // `right` is packed by groups of columns with all their depth; for left^T right by parts of depth with all their
  // columns, because each task copies its part of left once for all the columns it makes.
  void run_packed() {
    const std::int64_t width = kernel_.panel_columns;
    const std::int64_t most_steps = packed_bytes / step_bytes(width) / depth_unit * depth_unit;
    const std::int64_t least_steps = std::min(args_.depth, args_.left_transposed ? depth_unit : most_steps);
    const std::int64_t panels = std::max<std::int64_t>(1, packed_bytes / (least_steps * step_bytes(width)));
    const std::int64_t group = std::min(panels, ceil_div(args_.columns, width)) * width;
    const std::int64_t part =
        std::min(args_.depth, std::max(least_steps, packed_bytes / step_bytes(group) / depth_unit * depth_unit));
    void* packed = shared_scratch(part * step_bytes(group));
    for (std::int64_t column = 0; column < args_.columns; column += group) {
      args_.column_begin = args_.packed_begin = column;
      args_.column_end = std::min(column + group, args_.columns);
      for (std::int64_t k = 0; k < args_.depth; k += part) {
        args_.depth_begin = k;
        args_.depth_end = std::min(k + part, args_.depth);
        args_.packed = nullptr;
        parallel_for(ceil_div(args_.depth_end - k, pack_steps), threads_, [&](std::int64_t task, int) {
          const std::int64_t begin = k + task * pack_steps;
          kernel_.pack(args_, begin, std::min(begin + pack_steps, args_.depth_end), packed);
        });
        args_.packed = packed;
        run_tasks(args_.left_transposed ? 256 : 128, group);
      }
    }
  }

  // The columns at hand for all rows, in blocks of at most this size. Blocks of the same rows follow each other: their
  // part of left is in the cache.
  void run_tasks(std::int64_t rows, std::int64_t columns) {
    const std::int64_t width = kernel_.panel_columns;
    const std::int64_t all_columns = args_.column_end - args_.column_begin;
    rows = std::min(rows, args_.rows);
    columns = ceil_div(std::min(columns, all_columns), width) * width;
    const auto tasks = [&] { return ceil_div(args_.rows, rows) * ceil_div(all_columns, columns); };
    const std::int64_t wanted = threads_ == 1 ? 1 : args_.left_transposed ? threads_ : 3 * threads_;
    while (tasks() < wanted && columns > width) {
      columns = ceil_div(columns / 2, width) * width;
    }
    while (tasks() < wanted && rows > 64) {
      rows = ceil_div(rows, 2);
    }
    const std::int64_t row_tasks = ceil_div(all_columns, columns);
    parallel_for(tasks(), threads_, [&](std::int64_t task, int) {
      GemmArgs args = args_;
      args.row_begin = task / row_tasks * rows;
      args.row_end = std::min(args.row_begin + rows, args.rows);
      args.column_begin += task % row_tasks * columns;
      args.column_end = std::min(args.column_begin + columns, args.column_end);
      kernel_.run(args, thread_scratch(kernel_.scratch_bytes(args)));
      trim_thread_scratch();
    });
  }

  GemmArgs args_;
  const GemmKernel& kernel_;
  const bool computes_in_own_type_;
  int threads_ = 1;
};

// dW = x^T dy, or db = 1^T dy with an x that is 1 everywhere.
void sum_over_rows(ItemRows<const void> x, ConstTensorView dy, ItemRows<void> out, std::int64_t rows,
                   bool skip_zero_rows) {
  GemmArgs args;
  args.left = x;
  args.left_transposed = true;
  args.right = rows_of(dy);
  args.out = out;
  args.rows = rows;
  args.columns = dy.size(2);
  args.depth = row_count(dy);
  args.skip_zero_rows = skip_zero_rows;
  Product(args, dy.dtype()).run();
}

}  // namespace

void linear(ConstTensorView x, ConstTensorView weight, const std::optional<ConstTensorView>& bias, TensorView y) {
  GemmArgs args;
  args.left = rows_of(x);
  args.right = matrix_rows(weight);
  args.out = rows_of(y);
  args.rows = row_count(x);
  args.columns = weight.size(1);
  args.depth = weight.size(0);
  if (bias) {
    args.bias = bias->data();
    args.bias_stride = bias->stride(0);
  }
  Product(args, x.dtype()).run();
}

void linear_backward(ConstTensorView dy, ConstTensorView x, ConstTensorView weight, const LinearGradients& gradients) {
  if (gradients.dx) {
    GemmArgs args;
    args.left = rows_of(dy);
    args.right = matrix_rows(weight.transpose(0, 1));
    args.out = rows_of(*gradients.dx);
    args.rows = row_count(dy);
    args.columns = weight.size(0);
    args.depth = weight.size(1);
    Product(args, dy.dtype()).run();
  }
  if (gradients.dweight) {
    sum_over_rows(rows_of(x), dy, matrix_rows(*gradients.dweight), weight.size(0), true);
  }
  if (gradients.dbias) {
    with_float_type(dy.dtype(), [&](auto type) {
      const auto one = converted<decltype(type)>(1.0);
      const ItemRows<const void> ones{&one, std::max<std::int64_t>(1, row_count(dy)), 0, 0, 0};
      sum_over_rows(ones, dy, {gradients.dbias->data(), 1, 0, 0, gradients.dbias->stride(0)}, 1, false);
    });
  }
}

}  // namespace headway::cpu
