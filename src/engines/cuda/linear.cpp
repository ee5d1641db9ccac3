#include "engines/cuda/linear.h"

#include <algorithm>
#include <optional>

#include "engines/cuda/device.h"
#include "engines/cuda/kernels/linear_kernels.h"
#include "engines/cuda/matmul.h"
#include "engines/cuda/memory.h"

namespace headway::cuda {
namespace {

void* address(const ConstTensorView& view) { return const_cast<void*>(view.data()); }

// [B,S,F] or [rows,columns], with one row after the other.
ConstTensorView with_outer_axis(const ConstTensorView& view) { return view.rank() == 2 ? view.unsqueeze(0) : view; }

std::int64_t row_count(const ConstTensorView& view) {
  return view.rank() == 2 ? view.size(0) : view.size(0) * view.size(1);
}

// The rows as one axis, where one stride leads from each to the next.
std::optional<FlatMatrix> flat(const ConstTensorView& view) {
  const ConstTensorView rows = with_outer_axis(view);
  const std::int64_t outer = rows.size(0), inner = rows.size(1);
  if (outer > 1 && inner > 1 && rows.stride(0) != inner * rows.stride(1)) {
    return std::nullopt;
  }
  return FlatMatrix{address(view), outer * inner, rows.size(2), inner > 1 ? rows.stride(1) : rows.stride(0),
                    rows.stride(2)};
}

// One division less an element where the rows are one axis.
LinearMatrix any_layout(const ConstTensorView& view) {
  const ConstTensorView rows = with_outer_axis(view);
  if (const auto even = flat(view)) {
    return {even->data, std::max<std::int64_t>(even->rows, 1), 0, even->row, even->column};
  }
  return {address(view), std::max<std::int64_t>(rows.size(1), 1), rows.stride(0), rows.stride(1), rows.stride(2)};
}

// product = a b + bias, each as it is or transposed.
struct Product {
  ConstTensorView a, b;
  TensorView product;
  std::optional<ConstTensorView> bias = {};
  bool transpose_a = false, transpose_b = false;
};

class Runner {
 public:
  explicit Runner(const ConstTensorView& like, const LinearCall& call)
      : call_(call),
        dtype_(like.dtype()),
        device_(like.device().index),
        stream_(static_cast<cudaStream_t>(call.stream)),
        scope_((require_device(like.device(), call.operation), device_), call.operation) {}

  void multiply(const Product& call) const {
    const auto a = flat(call.a), b = flat(call.b), product = flat(call.product);
    ProductArguments all = arguments(call);
    if (all.rows == 0 || all.columns == 0) {
      return;
    }
    const bool bias_fits = !call.bias || call.bias->stride(0) == 1 || call.bias->size(0) == 1;
    if (!call_.batch_invariant && all.depth > 0 && a && b && product && bias_fits) {
      const Matmul flat_call{.a = call.transpose_a ? a->transposed() : *a,
                             .b = call.transpose_b ? b->transposed() : *b,
                             .d = *product,
                             .bias = call.bias ? call.bias->data() : nullptr,
                             .dtype = dtype_,
                             .device = device_,
                             .stream = stream_,
                             .operation = call_.operation};
      if (matmul(flat_call)) {
        return;
      }
    }
    Tensor side_by_side;
    if (!bias_fits) {
      side_by_side = copied_to(*call.bias, call.bias->device(), stream_);
      all.bias = side_by_side.data();
    }
    check(launch_product(all, dtype_, stream_), call_.operation, "launching the exact product");
  }

  // Zero rows of dy add nothing to dweight, but cuBLASLt multiplies them too, and 0 * NaN is NaN. Where the gradient
  // holds a NaN, those elements are computed again without such rows; the device finds that out by itself.
  void repair(const Product& call) const {
    ProductArguments all = arguments(call);
    all.repair = true;
    if (all.rows > 0 && all.columns > 0) {
      check(launch_product(all, dtype_, stream_), call_.operation, "launching the repair of a product");
    }
  }

  void sum_columns(const ConstTensorView& dy, const TensorView& sums) const {
    const std::int64_t rows = row_count(dy), columns = with_outer_axis(dy).size(2);
    if (columns == 0) {
      return;
    }
    const std::size_t real = dtype_ == DType::f64 ? sizeof(double) : sizeof(float);
    Workspace workspace(real * static_cast<std::size_t>(column_sum_chunks(rows) * columns), device_, stream_,
                        call_.operation);
    Tensor whole;
    if (sums.stride(0) != 1) {
      whole = Tensor::uninitialized(sums.sizes(), dtype_, sums.device(), stream_);
    }
    void* target = sums.stride(0) != 1 ? whole.data() : sums.data();
    check(launch_column_sums(any_layout(dy), rows, columns, dtype_, workspace.data(), target, stream_), call_.operation,
          "summing columns");
    if (sums.stride(0) != 1) {
      copy(whole, sums, stream_);
    }
  }

 private:
  ProductArguments arguments(const Product& call) const {
    ProductArguments all;
    const std::int64_t a_columns = with_outer_axis(call.a).size(2), b_columns = with_outer_axis(call.b).size(2);
    all.rows = call.transpose_a ? a_columns : row_count(call.a);
    all.depth = call.transpose_a ? row_count(call.a) : a_columns;
    all.columns = call.transpose_b ? row_count(call.b) : b_columns;
    all.a = any_layout(call.a);
    all.b = any_layout(call.b);
    all.product = any_layout(call.product);
    all.a_by_depth = call.transpose_a;
    all.b_by_column = call.transpose_b;
    all.bias = call.bias ? call.bias->data() : nullptr;
    return all;
  }

  const LinearCall& call_;
  DType dtype_;
  int device_;
  cudaStream_t stream_;
  DeviceScope scope_;
};

}  // namespace

void linear(ConstTensorView x, ConstTensorView weight, const std::optional<ConstTensorView>& bias, TensorView y,
            const LinearCall& call) {
  Runner(x, call).multiply({.a = x, .b = weight, .product = y, .bias = bias});
}

void linear_backward(ConstTensorView dy, ConstTensorView x, ConstTensorView weight, const LinearGradients& gradients,
                     const LinearCall& call) {
  const Runner runner(x, call);
  if (gradients.dx) {
    runner.multiply({.a = dy, .b = weight, .product = *gradients.dx, .transpose_b = true});
  }
  if (gradients.dweight) {
    const Product product{.a = x, .b = dy, .product = *gradients.dweight, .transpose_a = true};
    runner.multiply(product);
    runner.repair(product);
  }
  if (gradients.dbias) {
    runner.sum_columns(dy, *gradients.dbias);
  }
}

}  // namespace headway::cuda
