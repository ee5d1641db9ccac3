// The linear map and its gradients: the definition in loops.
#include "engines/reference/linear.h"

#include <algorithm>
#include <vector>

#include "core/elements.h"

namespace headway::reference {
namespace {

using Row = std::vector<double>;

// One axis of a view as float64 numbers: a row of x, of a weight matrix, or a bias.
template <class T>
struct Strided {
  const T* data;
  std::int64_t stride;

  double operator[](std::int64_t i) const { return converted<double>(data[i * stride]); }
};

template <class T>
Strided<T> row_of(ConstTensorView matrix, std::int64_t row) {
  return {matrix.as<T>() + row * matrix.stride(0), matrix.stride(1)};
}

template <class T>
Strided<T> row_of(ConstTensorView batch, std::int64_t b, std::int64_t s) {
  return {batch.as<T>() + b * batch.stride(0) + s * batch.stride(1), batch.stride(2)};
}

template <class T>
void read_row(Strided<T> from, Row& to) {
  for (std::size_t i = 0; i < to.size(); ++i) {
    to[i] = from[static_cast<std::int64_t>(i)];
  }
}

template <class T>
void write_row(const Row& from, T* to, std::int64_t stride) {
  for (std::size_t i = 0; i < from.size(); ++i) {
    to[static_cast<std::int64_t>(i) * stride] = converted<T>(from[i]);
  }
}

// sum += factor * row
template <class T>
void add_scaled(double factor, Strided<T> row, Row& sum) {
  for (std::size_t i = 0; i < sum.size(); ++i) {
    sum[i] += factor * row[static_cast<std::int64_t>(i)];
  }
}

// Calls visit(b, s) for each row of [B,S,width], in order.
template <class Visit>
void for_each_row(ConstTensorView batch, const Visit& visit) {
  if (batch.size(1) == 0) {
    return;  // a batch of 2^60 empty sequences is legal
  }
  for (std::int64_t b = 0; b < batch.size(0); ++b) {
    for (std::int64_t s = 0; s < batch.size(1); ++s) {
      visit(b, s);
    }
  }
}

Row zeros(std::int64_t width) { return Row(static_cast<std::size_t>(width), 0.0); }

template <class T>
void forward(ConstTensorView x, ConstTensorView weight, const std::optional<ConstTensorView>& bias, TensorView y) {
  Row sum = zeros(weight.size(1));
  for_each_row(x, [&](std::int64_t b, std::int64_t s) {
    const Strided<T> in = row_of<T>(x, b, s);
    std::fill(sum.begin(), sum.end(), 0.0);
    for (std::int64_t e = 0; e < weight.size(0); ++e) {
      add_scaled(in[e], row_of<T>(weight, e), sum);
    }
    if (bias) {
      add_scaled(1.0, Strided<T>{bias->as<T>(), bias->stride(0)}, sum);
    }
    write_row(sum, y.as<T>() + b * y.stride(0) + s * y.stride(1), y.stride(2));
  });
}

// dx[b,s,e] = <dy[b,s,:], W[e,:]>
template <class T>
void backward_input(ConstTensorView dy, ConstTensorView weight, TensorView dx) {
  Row grad = zeros(weight.size(1));
  Row sums = zeros(weight.size(0));
  for_each_row(dy, [&](std::int64_t b, std::int64_t s) {
    read_row(row_of<T>(dy, b, s), grad);
    for (std::size_t e = 0; e < sums.size(); ++e) {
      const Strided<T> weights = row_of<T>(weight, static_cast<std::int64_t>(e));
      double sum = 0.0;
      for (std::size_t o = 0; o < grad.size(); ++o) {
        sum += grad[o] * weights[static_cast<std::int64_t>(o)];
      }
      sums[e] = sum;
    }
    write_row(sums, dx.as<T>() + b * dx.stride(0) + s * dx.stride(1), dx.stride(2));
  });
}

// The rows (b, s) of dy that are not all zero.
struct Position {
  std::int64_t b, s;
};

template <class T>
std::vector<Position> rows_with_gradient(ConstTensorView dy) {
  std::vector<Position> rows;
  for_each_row(dy, [&](std::int64_t b, std::int64_t s) {
    const Strided<T> grad = row_of<T>(dy, b, s);
    for (std::int64_t o = 0; o < dy.size(2); ++o) {
      if (grad[o] != 0.0) {  // NaN too
        rows.push_back({b, s});
        break;
      }
    }
  });
  return rows;
}

// dW[e,:] = sum over rows of x[row,e] * dy[row,:]
template <class T>
void backward_weight(ConstTensorView dy, ConstTensorView x, TensorView dweight) {
  const std::vector<Position> rows = rows_with_gradient<T>(dy);
  Row sum = zeros(dweight.size(1));
  for (std::int64_t e = 0; e < dweight.size(0); ++e) {
    std::fill(sum.begin(), sum.end(), 0.0);
    for (const auto [b, s] : rows) {
      add_scaled(row_of<T>(x, b, s)[e], row_of<T>(dy, b, s), sum);
    }
    write_row(sum, dweight.as<T>() + e * dweight.stride(0), dweight.stride(1));
  }
}

template <class T>
void backward_bias(ConstTensorView dy, TensorView dbias) {
  Row sum = zeros(dbias.size(0));
  for_each_row(dy, [&](std::int64_t b, std::int64_t s) { add_scaled(1.0, row_of<T>(dy, b, s), sum); });
  write_row(sum, dbias.as<T>(), dbias.stride(0));
}

}  // namespace

void linear(ConstTensorView x, ConstTensorView weight, const std::optional<ConstTensorView>& bias, TensorView y) {
  with_float_type(x.dtype(), [&](auto type) { forward<decltype(type)>(x, weight, bias, y); });
}

void linear_backward(ConstTensorView dy, ConstTensorView x, ConstTensorView weight, const LinearGradients& gradients) {
  with_float_type(dy.dtype(), [&](auto type) {
    using T = decltype(type);
    if (gradients.dx) {
      backward_input<T>(dy, weight, *gradients.dx);
    }
    if (gradients.dweight) {
      backward_weight<T>(dy, x, *gradients.dweight);
    }
    if (gradients.dbias) {
      backward_bias<T>(dy, *gradients.dbias);
    }
  });
}

}  // namespace headway::reference
