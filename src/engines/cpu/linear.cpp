// The CPU engine's linear map: three matrix products, and how one is cut into tasks. No element's bits depend on the
// cut, so it may follow the thread count.
#include "engines/cpu/linear.h"

#include <algorithm>
#include <atomic>

#include "core/elements.h"
#include "core/parallel.h"
#include "core/progress.h"
#include "engines/cpu/arguments.h"
#include "engines/cpu/gemm/args.h"
#include "engines/cpu/kernels.h"
#include "engines/cpu/scratch.h"
#include "engines/cpu/tasks.h"
#include "headway/threads.h"

namespace headway::cpu {
namespace {

// A task that copies its part of `left` has few rows, so that the copy fits the cache, and many columns, which reuse
// it; a task that reads `left` in place has many rows, so that packing a panel costs little in comparison.
constexpr std::int64_t rows_of_copies = 128, columns_of_copies = 1024;
constexpr std::int64_t rows_in_place = 256;
constexpr std::int64_t deep = 1024, columns_of_deep = 256;  // sums of several chunks wait in the cache
constexpr std::int64_t scanned_rows = 256;                  // by a task that only looks at numbers
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

class Product {
 public:
  Product(const GemmArgs& args, DType dtype, const LinearCall& call, bool skip_zero_rows = false)
      : args_(args),
        kernel_(chosen_kernels().gemm[static_cast<int>(storage_of(dtype))]),
        dtype_(dtype),
        call_(call),
        skip_zero_rows_(skip_zero_rows) {
    const double work = static_cast<double>(args.depth) * static_cast<double>(args.columns) *
                        (2.0 * static_cast<double>(args.rows) + 2.0 * bytes_as_rows);
    threads_ = work < task_flops ? 1 : get_threads();
  }

  void run() {
    if (args_.rows == 0 || args_.columns == 0) {
      return;
    }
    if (skip_zero_rows_) {
      find_zero_rows();
    }
    if (kernel_.suits_pairs != nullptr) {
      args_.exact_products = !right_suits_pairs() || (args_.left_transposed && !suits_pairs(args_.left, args_.rows));
      if (!args_.left_transposed) {
        find_paired_rows();
      }
    }
    run_tasks();
  }

 private:
  void find_zero_rows() {
    auto* found = static_cast<std::uint8_t*>(row_marks_.at_least(args_.depth));
    parallel_for(ceil_div(args_.depth, scanned_rows), threads_, [&](std::int64_t task, int) {
      const std::int64_t begin = task * scanned_rows;
      kernel_.find_zero_rows(args_, begin, std::min(begin + scanned_rows, args_.depth), found);
    });
    args_.skipped = found;
  }

  void find_paired_rows() {
    auto* found = static_cast<std::uint8_t*>(row_marks_.at_least(args_.rows));
    parallel_for(ceil_div(args_.rows, scanned_rows), threads_, [&](std::int64_t task, int) {
      for (std::int64_t r = task * scanned_rows; r < std::min((task + 1) * scanned_rows, args_.rows); ++r) {
        found[r] = kernel_.suits_pairs(args_.left, r, r + 1, args_.depth);
      }
    });
    args_.paired_rows = found;
  }

  // W^T is looked at as W, row by row.
  bool right_suits_pairs() {
    const ItemRows<const void>& right = args_.right;
    if (right.row_stride != 1 || right.per_item < args_.depth) {
      return suits_pairs(right, args_.columns);
    }
    return suits_pairs({right.data, args_.columns, 0, right.column_stride, 1}, args_.columns, args_.depth);
  }
  bool suits_pairs(const ItemRows<const void>& matrix, std::int64_t columns) {
    return suits_pairs(matrix, args_.depth, columns);
  }

  // Whether the rows of a matrix [rows, columns] do.
  bool suits_pairs(const ItemRows<const void>& matrix, std::int64_t rows, std::int64_t columns) {
    std::atomic<bool> suits{true};
    parallel_for(ceil_div(rows, scanned_rows), threads_, [&](std::int64_t task, int) {
      const std::int64_t begin = task * scanned_rows;
      if (!kernel_.suits_pairs(matrix, begin, std::min(begin + scanned_rows, rows), columns)) {
        suits.store(false, std::memory_order_relaxed);
      }
    });
    return suits.load();
  }

  bool copies_left() const {
    const bool converts =
        (dtype_ == DType::bf16 || dtype_ == DType::f16) && (kernel_.suits_pairs == nullptr || args_.exact_products);
    return args_.left_transposed || converts;
  }

  // Blocks of the same rows follow each other: their part of left is in the cache.
  void run_tasks() {
    const std::int64_t width = kernel_.panel_columns;
    std::int64_t rows = std::min(copies_left() ? rows_of_copies : rows_in_place, args_.rows);
    const std::int64_t most_columns = copies_left()        ? columns_of_copies
                                      : args_.depth > deep ? columns_of_deep
                                                           : args_.columns;
    std::int64_t columns = ceil_div(std::min(most_columns, args_.columns), width) * width;
    const auto tasks = [&] { return ceil_div(args_.rows, rows) * ceil_div(args_.columns, columns); };
    const std::int64_t wanted = threads_ == 1 ? 1 : kernel_.tasks_of_a_thread * threads_;
    while (tasks() < wanted && columns > kernel_.least_panels * width) {
      columns = ceil_div(columns / 2, width) * width;
    }
    while (tasks() < wanted && rows > 64) {
      rows = ceil_div(rows, 8) * 4;  // strips of 4
    }
    while (tasks() < wanted && columns > width) {
      columns = ceil_div(columns / 2, width) * width;
    }
    const std::int64_t row_tasks = ceil_div(args_.columns, columns);
    SharedProgress progress(call_.operation, call_.progress, tasks());
    parallel_for(tasks(), threads_, [&](std::int64_t task, int worker) {
      GemmArgs args = args_;
      args.row_begin = task / row_tasks * rows;
      args.row_end = std::min(args.row_begin + rows, args.rows);
      args.column_begin = task % row_tasks * columns;
      args.column_end = std::min(args.column_begin + columns, args.columns);
      TaskScratch scratch;
      kernel_.run(args, scratch.at_least(kernel_.scratch_bytes(args)));
      progress.task_done(worker);
    });
    progress.finish();
  }

  GemmArgs args_;
  const GemmKernel& kernel_;
  const DType dtype_;
  const LinearCall& call_;
  const bool skip_zero_rows_;
  CallScratch row_marks_;
  int threads_ = 1;
};

// dW = x^T dy, or db = 1^T dy with an x that is 1 everywhere.
void sum_over_rows(ItemRows<const void> x, ConstTensorView dy, ItemRows<void> out, std::int64_t rows,
                   const LinearCall& call, bool skip_zero_rows) {
  GemmArgs args;
  args.left = x;
  args.left_transposed = true;
  args.right = rows_of(dy);
  args.out = out;
  args.rows = rows;
  args.columns = dy.size(2);
  args.depth = row_count(dy);
  Product(args, dy.dtype(), call, skip_zero_rows).run();
}

}  // namespace

void linear(ConstTensorView x, ConstTensorView weight, const std::optional<ConstTensorView>& bias, TensorView y,
            const LinearCall& call) {
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
  Product(args, x.dtype(), call).run();
}

void linear_backward(ConstTensorView dy, ConstTensorView x, ConstTensorView weight, const LinearGradients& gradients,
                     const LinearCall& call) {
  // dx and dW cost the same, db next to nothing.
  const double half = gradients.dx && gradients.dweight ? 0.5 : gradients.dx ? 1.0 : 0.0;
  if (gradients.dx) {
    GemmArgs args;
    args.left = rows_of(dy);
    args.right = matrix_rows(weight.transpose(0, 1));
    args.out = rows_of(*gradients.dx);
    args.rows = row_count(dy);
    args.columns = weight.size(0);
    args.depth = weight.size(1);
    Product(args, dy.dtype(), {.operation = call.operation, .progress = part_of(call.progress, 0, half)}).run();
  }
  if (gradients.dbias) {
    with_float_type(dy.dtype(), [&](auto type) {
      const auto one = converted<decltype(type)>(1.0);
      const ItemRows<const void> ones{&one, std::max<std::int64_t>(1, row_count(dy)), 0, 0, 0};
      sum_over_rows(ones, dy, {gradients.dbias->data(), 1, 0, 0, gradients.dbias->stride(0)}, 1, {}, false);
    });
  }
  if (gradients.dweight) {
    sum_over_rows(rows_of(x), dy, matrix_rows(*gradients.dweight), weight.size(0),
                  {.operation = call.operation, .progress = part_of(call.progress, half, 1)}, true);
  }
}

}  // namespace headway::cpu
