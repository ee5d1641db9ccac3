#include "support/array.h"

#include <cstring>
#include <stdexcept>
#include <utility>

namespace headway::test {
namespace {

std::size_t count(const Dims& sizes) {
  std::size_t product = 1;
  for (std::int64_t size : sizes) product *= static_cast<std::size_t>(size);
  return product;
}

// The address of an element, from the view's public parts only.
template <class View>
auto* address(const View& view, const Dims& index) {
  using Byte = std::conditional_t<View::writable, char, const char>;
  std::int64_t offset = 0;
  for (int axis = 0; axis < view.rank(); ++axis) offset += index[axis] * view.stride(axis);
  return static_cast<Byte*>(view.data()) + offset * static_cast<std::int64_t>(size_of(view.dtype()));
}

template <class T>
T load(const char* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <class T>
void store(char* to, T value) {
  std::memcpy(to, &value, sizeof value);
}

template <class T>
void read_row(const char* from, std::int64_t stride, std::int64_t width, Real* to) {
  for (std::int64_t d = 0; d < width; ++d)
    to[d] = static_cast<Real>(static_cast<double>(load<T>(from + d * stride * static_cast<std::int64_t>(sizeof(T)))));
}

}  // namespace

Array::Array(const Dims& sizes, Real fill) : values(count(sizes), fill), sizes_(sizes) {}

std::size_t Array::offset(std::initializer_list<std::int64_t> index) const {
  std::size_t result = 0;
  int axis = 0;
  for (std::int64_t position : index)
    result = result * static_cast<std::size_t>(sizes_[axis++]) + static_cast<std::size_t>(position);
  return result;
}

Real& Array::repeated(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) {
  auto at = [&](int axis, std::int64_t position) { return sizes_[axis] == 1 ? 0 : position; };
  return (*this)(at(0, b), at(1, h), at(2, i), at(3, j));
}

const Real& Array::repeated(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const {
  return const_cast<Array*>(this)->repeated(b, h, i, j);
}

Array Array::reshaped(const Dims& sizes) && {
  if (count(sizes) != values.size()) throw std::logic_error("reshaped: the element counts differ");
  sizes_ = sizes;
  return std::move(*this);
}

Array Array::reshaped(const Dims& sizes) const& { return Array(*this).reshaped(sizes); }

Dims index_of(std::int64_t number, const Dims& sizes) {
  Dims index = sizes;
  for (int axis = sizes.size() - 1; axis >= 0; --axis) {
    index[axis] = number % sizes[axis];
    number /= sizes[axis];
  }
  return index;
}

double get(ConstTensorView view, const Dims& index) {
  const char* from = address(view, index);
  switch (view.dtype()) {
    case DType::f32: return static_cast<double>(load<float>(from));
    case DType::f64: return load<double>(from);
    case DType::bf16: return static_cast<double>(load<bfloat16>(from));
    case DType::f16: return static_cast<double>(load<float16>(from));
    case DType::b8: return load<unsigned char>(from) != 0 ? 1 : 0;
    case DType::i32: return load<std::int32_t>(from);
    case DType::i64: return static_cast<double>(load<std::int64_t>(from));
    case DType::i8: return load<std::int8_t>(from);
    case DType::f8e4m3: return static_cast<double>(load<float8_e4m3>(from));
  }
  throw std::logic_error("get: unknown type");
}

void set(TensorView view, const Dims& index, double value) {
  char* to = address(view, index);
  switch (view.dtype()) {
    case DType::f32: return store(to, static_cast<float>(value));
    case DType::f64: return store(to, value);
    case DType::bf16: return store(to, bfloat16(value));
    case DType::f16: return store(to, float16(value));
    case DType::b8: return store(to, static_cast<unsigned char>(value != 0));
    case DType::i32: return store(to, static_cast<std::int32_t>(value));
    case DType::i64: return store(to, static_cast<std::int64_t>(value));
    case DType::i8: return store(to, static_cast<std::int8_t>(value));
    case DType::f8e4m3: return store(to, float8_e4m3(value));
  }
}

double rounded(DType dtype, double value) {
  switch (dtype) {
    case DType::f32: return static_cast<double>(static_cast<float>(value));
    case DType::bf16: return static_cast<double>(bfloat16(value));
    case DType::f16: return static_cast<double>(float16(value));
    default: return value;
  }
}

Array read(ConstTensorView view) {
  Array result(view.sizes());
  if (result.values.empty()) return result;
  const int last = view.rank() - 1;
  const std::int64_t width = last < 0 ? 1 : view.size(last), stride = last < 0 ? 0 : view.stride(last);
  Real* to = result.values.data();
  for (std::int64_t n = 0; n < result.elements(); n += width, to += width) {
    const char* from = address(view, index_of(n, view.sizes()));
    switch (view.dtype()) {
      case DType::f32: read_row<float>(from, stride, width, to); break;
      case DType::f64: read_row<double>(from, stride, width, to); break;
      case DType::bf16: read_row<bfloat16>(from, stride, width, to); break;
      case DType::f16: read_row<float16>(from, stride, width, to); break;
      case DType::b8:
        for (std::int64_t d = 0; d < width; ++d) to[d] = from[d * stride] != 0 ? 1 : 0;
        break;
      case DType::i32: read_row<std::int32_t>(from, stride, width, to); break;
      case DType::i64: read_row<std::int64_t>(from, stride, width, to); break;
      case DType::i8: read_row<std::int8_t>(from, stride, width, to); break;
      case DType::f8e4m3: read_row<float8_e4m3>(from, stride, width, to); break;
    }
  }
  return result;
}

void write(const Array& values, TensorView view) {
  std::size_t n = 0;
  each_index(view.sizes(), [&](const Dims& index) { set(view, index, static_cast<double>(values.values[n++])); });
}

bool same_bits(ConstTensorView a, ConstTensorView b) {
  if (a.dtype() != b.dtype() || !(a.sizes() == b.sizes())) return false;
  const auto elements = static_cast<std::int64_t>(count(a.sizes()));
  // Large tensors are compared often: whole rows where they lie together.
  const int last = a.rank() - 1;
  const bool whole_rows = last >= 0 && a.stride(last) == 1 && b.stride(last) == 1;
  const std::int64_t together = whole_rows ? a.size(last) : 1;
  for (std::int64_t n = 0; n < elements; n += together) {
    const Dims index = index_of(n, a.sizes());
    const std::size_t bytes = static_cast<std::size_t>(together) * size_of(a.dtype());
    if (std::memcmp(address(a, index), address(b, index), bytes) != 0) return false;
  }
  return true;
}

}  // namespace headway::test
