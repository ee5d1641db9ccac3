// A dense row-major array of long double: what the oracle reads, computes and returns.
#pragma once

#include <cstdint>
#include <vector>

#include "headway/tensor.h"

namespace headway::test {

using Real = long double;

class Array {
 public:
  Array() = default;
  explicit Array(const Dims& sizes, Real fill = 0);

  const Dims& sizes() const { return sizes_; }
  std::int64_t size(int axis) const { return sizes_[axis]; }
  std::int64_t elements() const { return static_cast<std::int64_t>(values.size()); }

  template <class... Index>
  Real& operator()(Index... index) {
    return values[offset({static_cast<std::int64_t>(index)...})];
  }
  template <class... Index>
  Real operator()(Index... index) const {
    return values[offset({static_cast<std::int64_t>(index)...})];
  }

  // An axis of size 1 repeats: the element that [b,h,i,j] of the broadcast array comes from.
  Real& repeated(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j);
  const Real& repeated(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const;

  // The same numbers under other sizes; the element count must agree.
  Array reshaped(const Dims& sizes) const&;
  Array reshaped(const Dims& sizes) &&;

  std::vector<Real> values;

 private:
  std::size_t offset(std::initializer_list<std::int64_t> index) const;

  Dims sizes_;
};

// The index of the element with this row-major number.
Dims index_of(std::int64_t number, const Dims& sizes);

// Every index of the sizes, in row-major order.
template <class Visit>
void each_index(const Dims& sizes, Visit visit) {
  Dims index = sizes;
  for (int axis = 0; axis < sizes.size(); ++axis) {
    if (sizes[axis] == 0) return;
    index[axis] = 0;
  }
  for (int axis = 0; axis >= 0;) {
    visit(static_cast<const Dims&>(index));
    for (axis = sizes.size() - 1; axis >= 0 && ++index[axis] == sizes[axis]; --axis) index[axis] = 0;
  }
}

// One element of a view of any type. Every type but i64 above 2^53 fits in a double.
double get(ConstTensorView view, const Dims& index);
void set(TensorView view, const Dims& index, double value);
double rounded(DType dtype, double value);

Array read(ConstTensorView view);
void write(const Array& values, TensorView view);

// The same type, sizes and bytes, element by element; NaNs count by their bits.
bool same_bits(ConstTensorView a, ConstTensorView b);

}  // namespace headway::test
