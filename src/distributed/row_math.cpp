#include "distributed/row_math.h"

#include <cmath>
#include <limits>

#include "core/elements.h"
#include "core/key_range.h"
#include "core/parallel.h"
#include "headway/threads.h"

namespace headway::distributed {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr std::int64_t block = 64;  // rows of one head that are one task

// Calls visit(b, h, first row, last row) for blocks of rows, on all threads.
template <class Visit>
void for_each_block(std::int64_t batch, std::int64_t heads, std::int64_t rows, const Visit& visit) {
  const std::int64_t blocks = (rows + block - 1) / block;
  const auto task = [&](std::int64_t number, int) {
    const std::int64_t head = number / blocks;
    const std::int64_t first = number % blocks * block;
    visit(head / heads, head % heads, first, std::min(first + block, rows));
  };
  parallel_for(batch * heads * blocks, get_threads(), task);
}

template <class From, class To, class Put>
void each_row(const ConstTensorView& from, const TensorView& to, const Put& put) {
  for_each_block(to.size(0), to.size(1), to.size(2), [&](auto b, auto h, auto first, auto last) {
    for (std::int64_t i = first; i < last; ++i) {
      put(static_cast<const From*>(from.data()) + row_offset(from, b, h, i),
          static_cast<To*>(to.data()) + row_offset(to, b, h, i));
    }
  });
}

// Calls put(target, source) for every element, row by row. Rows whose elements lie side by side have a loop of their
// own, which compilers vectorise.
template <class From, class To, class Put>
void each_element(const ConstTensorView& from, const TensorView& to, const Put& put) {
  const std::int64_t columns = to.size(3), from_step = from.stride(3), to_step = to.stride(3);
  const bool side_by_side = from_step == 1 && to_step == 1;
  each_row<From, To>(from, to, [&](const From* source, To* target) {
    if (side_by_side) {
      for (std::int64_t c = 0; c < columns; ++c) {
        put(target[c], source[c]);
      }
      return;
    }
    for (std::int64_t c = 0; c < columns; ++c) {
      put(target[c * to_step], source[c * from_step]);
    }
  });
}

template <class From, class To>
void add_typed(const ConstTensorView& from, const TensorView& to) {
  each_element<From, To>(from, to, [](To& target, From source) { target += converted<To>(source); });
}

// Element (b, h, i) of a [B,H,rows] view.
double& at(const Tensor& numbers, std::int64_t b, std::int64_t h, std::int64_t i) {
  const Dims& sizes = numbers.sizes();
  return const_cast<double*>(numbers.as<double>())[(b * sizes[1] + h) * sizes[2] + i];
}

}  // namespace

void copy_rows(ConstTensorView from, TensorView to) {
  with_float_type(from.dtype(), [&](auto from_type) {
    with_float_type(to.dtype(), [&](auto to_type) {
      using From = decltype(from_type);
      using To = decltype(to_type);
      each_element<From, To>(from, to, [](To& target, From source) { target = converted<To>(source); });
    });
  });
}

void add_rows(ConstTensorView from, TensorView to) {
  if (from.dtype() == DType::f32 && to.dtype() == DType::f32) {
    add_typed<float, float>(from, to);
  } else if (from.dtype() == DType::f32) {
    add_typed<float, double>(from, to);
  } else {
    add_typed<double, double>(from, to);
  }
}

Tensor as_type(ConstTensorView from, DType dtype) {
  Tensor result = Tensor::uninitialized(from.sizes(), dtype);
  copy_rows(from, result);
  return result;
}

double lowest_lse(DType type) {
  return type == DType::f64 ? std::numeric_limits<double>::lowest() : double{std::numeric_limits<float>::lowest()};
}

RowMerge::RowMerge(std::int64_t batch, std::int64_t heads, std::int64_t rows, std::int64_t width)
    : batch_(batch),
      heads_(heads),
      rows_(rows),
      width_(width),
      sums_(Tensor::uninitialized({batch, heads, rows, width}, DType::f64)),
      highest_(Tensor::uninitialized({batch, heads, rows}, DType::f64)),
      totals_({batch, heads, rows}, DType::f64) {
  std::fill_n(highest_.as<double>(), highest_.elements(), -infinity);
}

void RowMerge::add(ConstTensorView out, ConstTensorView lse, std::int64_t first_row) {
  const auto add_row = [&]<class T>(T, std::int64_t b, std::int64_t h, std::int64_t i) {
    const auto row_lse = static_cast<double>(
        static_cast<const T*>(lse.data())[b * lse.stride(0) + h * lse.stride(1) + i * lse.stride(2)]);
    if (row_lse == -infinity) {
      return;
    }
    const std::int64_t row = first_row + i;
    double& highest = at(highest_, b, h, row);
    double& total = at(totals_, b, h, row);
    const T* values = static_cast<const T*>(out.data()) + row_offset(out, b, h, i);
    const std::int64_t step = out.stride(3);
    double* sums = sums_.as<double>() + ((b * heads_ + h) * rows_ + row) * width_;
    if (highest == -infinity) {  // the first part with a key
      highest = row_lse;
      total = 1;
      for (std::int64_t c = 0; c < width_; ++c) {
        sums[c] = static_cast<double>(values[c * step]);
      }
      return;
    }
    // A NaN stays: neither comparison holds, and exp of a difference with it is NaN.
    const double above = row_lse > highest || std::isnan(row_lse) ? row_lse : highest;
    const double old_weight = std::exp(highest - above);
    const double new_weight = std::exp(row_lse - above);
    highest = above;
    total = total * old_weight + new_weight;
    for (std::int64_t c = 0; c < width_; ++c) {
      sums[c] = sums[c] * old_weight + static_cast<double>(values[c * step]) * new_weight;
    }
  };
  for_each_block(batch_, heads_, out.size(2), [&](auto b, auto h, auto first, auto last) {
    for (std::int64_t i = first; i < last; ++i) {
      out.dtype() == DType::f64 ? add_row(double{}, b, h, i) : add_row(float{}, b, h, i);
    }
  });
}

void RowMerge::store_part(TensorView out, TensorView lse) const { store(true, {}, nullptr, out, lse); }

void RowMerge::finish(const std::optional<ConstTensorView>& sinks, const std::vector<bool>* padding, TensorView out,
                      TensorView lse) const {
  store(false, sinks, padding, out, lse);
}

void RowMerge::store(bool as_part, const std::optional<ConstTensorView>& sinks, const std::vector<bool>* padding,
                     TensorView out, TensorView lse) const {
  const double lowest = lowest_lse(lse.dtype());
  const auto finish_row = [&]<class T>(T, std::int64_t b, std::int64_t h, std::int64_t i) {
    double highest = at(highest_, b, h, i);
    double total = at(totals_, b, h, i);
    const bool has_keys = highest != -infinity;  // else the row's sums were never written
    double weight = 1;
    const bool is_padding = padding != nullptr && (*padding)[static_cast<std::size_t>(b * rows_ + i)];
    const double sink = sinks && !is_padding ? load_float(*sinks, h * sinks->stride(0)) : -infinity;
    if (sink != -infinity) {
      const double above = sink > highest || std::isnan(sink) ? sink : highest;
      weight = has_keys ? std::exp(highest - above) : 0;
      total = total * weight + (sink == above ? 1 : std::exp(sink - above));  // also of an infinite sink
      highest = above;
    }
    if (highest == lowest && !as_part) {  // exp(-inf) / 0
      total = std::numeric_limits<double>::quiet_NaN();
    }
    const double* sums = sums_.as<double>() + ((b * heads_ + h) * rows_ + i) * width_;
    T* target = static_cast<T*>(out.data()) + row_offset(out, b, h, i);
    const double factor = weight / total;
    const auto store = [&](std::int64_t step) {
      for (std::int64_t c = 0; c < width_; ++c) {  // a row without keys is 0, whatever its sink
        target[c * step] = converted<T>(has_keys ? sums[c] * factor : 0.0);
      }
    };
    out.stride(3) == 1 ? store(1) : store(out.stride(3));
    store_float(lse, b * lse.stride(0) + h * lse.stride(1) + i * lse.stride(2),
                total == 0 ? -infinity : highest + std::log(total));
  };
  with_float_type(out.dtype(), [&](auto type) {
    for_each_block(batch_, heads_, rows_, [&](auto b, auto h, auto first, auto last) {
      for (std::int64_t i = first; i < last; ++i) {
        finish_row(type, b, h, i);
      }
    });
  });
}

}  // namespace headway::distributed
