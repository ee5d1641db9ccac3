// Tensors and views: checked sizes, shape functions, ownership, conversion.
#include "headway/tensor.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "core/device_memory.h"
#include "core/elements.h"
#include "core/memory.h"
#include "core/out_of_memory.h"
#include "core/text.h"

namespace headway {

Dims::Dims(std::span<const std::int64_t> values) {
  for (const std::int64_t value : values) {
    push_back(value);
  }
}

void Dims::throw_too_many() {
  throw InvalidArgument(text("Dims: expected at most ", max_rank, " dimensions, found more"));
}

void Dims::throw_too_large(std::uint64_t number) {
  throw InvalidArgument(text("Dims: expected numbers below 2^63, found ", number));
}

void Dims::throw_no_axis(int axis, int rank) {
  throw InvalidArgument(text("tensor: expected an axis from ", -rank, " to ", rank - 1, ", found ", axis));
}

void Dims::push_back(std::int64_t value) {
  require_rank(static_cast<std::size_t>(size_) + 1);
  values_[static_cast<std::size_t>(size_++)] = value;
}

bool Dims::operator==(const Dims& other) const { return std::equal(begin(), end(), other.begin(), other.end()); }

std::int64_t checked_elements(const Dims& sizes, DType dtype) {
  bool negative = false, empty = false, overflows = false;
  std::int64_t elements = 1;
  for (const std::int64_t size : sizes) {
    negative |= size < 0;
    empty |= size == 0;
    overflows |= __builtin_mul_overflow(elements, size, &elements);
  }
  if (negative) {
    throw InvalidArgument(text("tensor: expected sizes of 0 or more, found ", sizes));
  }
  if (empty) {  // no bytes, whatever the other sizes are
    return 0;
  }
  if (std::int64_t bytes = 0;
      overflows || __builtin_mul_overflow(elements, static_cast<std::int64_t>(size_of(dtype)), &bytes)) {
    throw InvalidArgument(text("tensor: a ", dtype, " tensor of shape ", sizes, " has more than 2^63 bytes"));
  }
  return elements;
}

Dims contiguous_strides(const Dims& sizes) {
  Dims strides = sizes;
  std::int64_t stride = 1;
  for (int axis = sizes.size() - 1; axis >= 0; --axis) {
    strides[axis] = stride;
    // Sizes too large to be contiguous are refused where elements are counted; here they only must not overflow.
    if (__builtin_mul_overflow(stride, std::max<std::int64_t>(sizes[axis], 1), &stride)) {
      stride = 0;
    }
  }
  return strides;
}

namespace {

// The distance between the elements that are furthest apart must fit 63 bits in bytes: sums of indices times strides
// then never overflow.
void check_reach(const Dims& sizes, const Dims& strides, DType dtype) {
  constexpr std::int64_t never_too_far = std::int64_t{1} << 28;  // 2^56 elements an axis
  std::int64_t bits = 0;
  for (int axis = 0; axis < sizes.size(); ++axis) {
    bits |= sizes[axis] | (strides[axis] < 0 ? ~strides[axis] : strides[axis]);
  }
  if (bits < never_too_far) {
    return;
  }
  std::int64_t below = 0, above = 0;
  for (int axis = 0; axis < sizes.size(); ++axis) {
    std::int64_t reach = 0;
    std::int64_t& side = strides[axis] < 0 ? below : above;
    if (__builtin_mul_overflow(sizes[axis] - 1, strides[axis], &reach) ||
        __builtin_mul_overflow(reach, static_cast<std::int64_t>(size_of(dtype)), &reach) ||
        __builtin_add_overflow(side, reach, &side) || __builtin_sub_overflow(above, below, &reach)) {
      throw InvalidArgument(
          text("tensor: strides ", strides, " for shape ", sizes, " span more than 2^63 bytes of ", dtype));
    }
  }
}

}  // namespace

template <class Void>
BasicTensorView<Void>::BasicTensorView(Void* data, DType dtype, Dims sizes, Dims strides, Device device)
    : data_(data), dtype_(dtype), device_(device), sizes_(sizes), strides_(strides) {
  if (sizes.size() != strides.size()) {
    throw InvalidArgument(
        text("tensor: expected one stride for each size, found sizes ", sizes, " and strides ", strides));
  }
  const std::int64_t count = checked_elements(sizes, dtype);
  if (count > 0 && data == nullptr) {
    throw InvalidArgument(text("tensor: expected memory for shape ", sizes, ", found a null pointer"));
  }
  if (count > 0) {
    check_reach(sizes, strides, dtype);
  }
}

template <class Void>
bool BasicTensorView<Void>::is_contiguous() const {
  if (elements() == 0) {
    return true;
  }
  std::int64_t expected = 1;
  for (int axis = rank() - 1; axis >= 0; --axis) {
    if (sizes_[axis] != 1 && strides_[axis] != expected) {
      return false;
    }
    expected *= sizes_[axis];
  }
  return true;
}

template <class Void>
void BasicTensorView<Void>::throw_other_type(DType expected, DType found) {
  throw TypeMismatch(text("tensor: expected elements of type ", expected, ", found ", found));
}

template <class Void>
void BasicTensorView<Void>::require_elements(std::size_t found) const {
  if (static_cast<std::size_t>(elements()) != found) {
    throw InvalidArgument(text("tensor: shape ", sizes_, " has ", elements(), " elements, found memory of ", found));
  }
}

template <class Void>
void BasicTensorView<Void>::throw_outside(const Dims& index) const {
  if (device_ != Device{}) {
    throw Unsupported(text("tensor: expected elements in host memory, found them on ", device_));
  }
  throw InvalidArgument(text("tensor: index ", index, " is outside the shape ", sizes_));
}

template <class Void>
std::int64_t BasicTensorView<Void>::distance(int axis, std::int64_t index) const {
  return elements() > 0 ? index * strides_[axis] : 0;  // an empty view may have any strides
}

template <class Void>
BasicTensorView<Void> BasicTensorView<Void>::moved_by(std::int64_t elements, Dims sizes, Dims strides) const {
  using Byte = std::conditional_t<writable, char, const char>;
  Void* moved =
      data_ == nullptr ? data_ : static_cast<Byte*>(data_) + elements * static_cast<std::int64_t>(size_of(dtype_));
  return {moved, dtype_, sizes, strides, device_};
}

namespace {

// The axis counted from the front.
int checked_axis(const char* operation, int axis, int rank) {
  const int from_front = axis < 0 ? axis + rank : axis;
  if (from_front < 0 || from_front >= rank) {
    throw InvalidArgument(text(operation, ": expected an axis from ", -rank, " to ", rank - 1, ", found ", axis));
  }
  return from_front;
}

Dims without(const Dims& dims, int dropped) {
  Dims result;
  for (int axis = 0; axis < dims.size(); ++axis) {
    if (axis != dropped) {
      result.push_back(dims[axis]);
    }
  }
  return result;
}

// `dims` with the one entry at `axis` replaced by `inserted`.
Dims replaced(const Dims& dims, int axis, const Dims& inserted) {
  Dims result;
  for (int i = 0; i < dims.size(); ++i) {
    if (i != axis) {
      result.push_back(dims[i]);
      continue;
    }
    for (const std::int64_t value : inserted) {
      result.push_back(value);
    }
  }
  return result;
}

}  // namespace

template <class Void>
BasicTensorView<Void> BasicTensorView<Void>::transpose(int axis_a, int axis_b) const {
  axis_a = checked_axis("transpose", axis_a, rank());
  axis_b = checked_axis("transpose", axis_b, rank());
  Dims sizes = sizes_;
  Dims strides = strides_;
  std::swap(sizes[axis_a], sizes[axis_b]);
  std::swap(strides[axis_a], strides[axis_b]);
  return moved_by(0, sizes, strides);
}

template <class Void>
BasicTensorView<Void> BasicTensorView<Void>::permute(const Dims& order) const {
  Dims sizes;
  Dims strides;
  std::array<bool, Dims::max_rank> seen{};
  bool valid = order.size() == rank();
  for (int i = 0; valid && i < rank(); ++i) {
    const std::int64_t axis = order[i] < 0 ? order[i] + rank() : order[i];
    valid = axis >= 0 && axis < rank() && !seen[static_cast<std::size_t>(axis)];
    if (valid) {
      seen[static_cast<std::size_t>(axis)] = true;
      sizes.push_back(sizes_[static_cast<int>(axis)]);
      strides.push_back(strides_[static_cast<int>(axis)]);
    }
  }
  if (!valid) {
    throw InvalidArgument(text("permute: expected each axis of shape ", sizes_, " once, found order ", order));
  }
  return moved_by(0, sizes, strides);
}

template <class Void>
BasicTensorView<Void> BasicTensorView<Void>::select(int axis, std::int64_t index) const {
  axis = checked_axis("select", axis, rank());
  if (index < 0 || index >= sizes_[axis]) {
    throw InvalidArgument(text("select: expected an index from 0 to ", sizes_[axis] - 1, ", found ", index));
  }
  return moved_by(distance(axis, index), without(sizes_, axis), without(strides_, axis));
}

template <class Void>
BasicTensorView<Void> BasicTensorView<Void>::slice(int axis, std::int64_t begin, std::int64_t end) const {
  axis = checked_axis("slice", axis, rank());
  if (begin < 0 || end < begin || end > sizes_[axis]) {
    throw InvalidArgument(text("slice: expected 0 <= begin <= end <= ", sizes_[axis], ", found ", begin, " and ", end));
  }
  Dims sizes = sizes_;
  sizes[axis] = end - begin;
  return moved_by(end > begin ? distance(axis, begin) : 0, sizes, strides_);
}

template <class Void>
BasicTensorView<Void> BasicTensorView<Void>::flip(int axis) const {
  axis = checked_axis("flip", axis, rank());
  if (sizes_[axis] < 2 || elements() == 0) {
    return *this;
  }
  Dims strides = strides_;
  strides[axis] = -strides[axis];
  return moved_by(distance(axis, sizes_[axis] - 1), sizes_, strides);
}

template <class Void>
BasicTensorView<Void> BasicTensorView<Void>::unsqueeze(int axis) const {
  axis = checked_axis("unsqueeze", axis, rank() + 1);
  Dims sizes;
  Dims strides;
  for (int i = 0; i <= rank(); ++i) {
    if (i == axis) {
      sizes.push_back(1);
      strides.push_back(0);
    }
    if (i < rank()) {
      sizes.push_back(sizes_[i]);
      strides.push_back(strides_[i]);
    }
  }
  return moved_by(0, sizes, strides);
}

template <class Void>
BasicTensorView<Void> BasicTensorView<Void>::unflatten(int axis, const Dims& sizes) const {
  axis = checked_axis("unflatten", axis, rank());
  if (sizes.empty() || checked_elements(sizes, DType::b8) != sizes_[axis]) {
    throw InvalidArgument(text("unflatten: expected sizes whose product is ", sizes_[axis], ", found ", sizes));
  }
  Dims strides = contiguous_strides(sizes);
  for (int i = 0; i < strides.size(); ++i) {
    if (__builtin_mul_overflow(strides[i], strides_[axis], &strides[i])) {
      strides[i] = 0;  // of an axis of size 1, or of an empty view: never used
    }
  }
  return moved_by(0, replaced(sizes_, axis, sizes), replaced(strides_, axis, strides));
}

template <class Void>
BasicTensorView<Void> BasicTensorView<Void>::expand(const Dims& sizes) const {
  const int added = sizes.size() - rank();
  bool fits = added >= 0;
  Dims strides = sizes;
  for (int axis = 0; fits && axis < sizes.size(); ++axis) {
    const std::int64_t own = axis < added ? 1 : sizes_[axis - added];
    fits = own == sizes[axis] || own == 1;
    strides[axis] = own == sizes[axis] && axis >= added ? strides_[axis - added] : 0;
  }
  if (!fits) {
    throw InvalidArgument(text("expand: shape ", sizes_, " does not broadcast to ", sizes));
  }
  return moved_by(0, sizes, strides);
}

template class BasicTensorView<void>;
template class BasicTensorView<const void>;

void Tensor::Free::operator()(void* memory) const noexcept {
  if (device == Device{}) {
    give_back_memory(memory, bytes);
  } else {
    give_back_device_memory(memory, device, stream);
  }
}

Tensor Tensor::uninitialized(const Dims& sizes, DType dtype, Device device, void* stream) try {
  const auto bytes = static_cast<std::size_t>(checked_elements(sizes, dtype)) * size_of(dtype);
  const bool in_host_memory = device == Device{};
  Tensor result;
  result.memory_ = {in_host_memory ? take_memory(bytes) : take_device_memory(bytes, device, stream),
                    Free{bytes, device, stream}};
  if (in_host_memory && result.memory_ == nullptr) {
    throw OutOfMemory(text("tensor: could not allocate ", bytes, " bytes for a ", dtype, " tensor of shape ", sizes));
  }
  result.sizes_ = sizes;
  result.dtype_ = dtype;
  return result;
} catch (...) {
  throw_own_error("tensor");
}

Tensor::Tensor(const Dims& sizes, DType dtype, Device device, void* stream)
    : Tensor(uninitialized(sizes, dtype, device, stream)) {
  const std::size_t bytes = static_cast<std::size_t>(elements()) * size_of(dtype);
  if (device == Device{}) {
    std::memset(memory_.get(), 0, bytes);
  } else {
    clear_device_memory(memory_.get(), bytes, device, stream);
  }
}

Tensor Tensor::copied_from(const void* values, std::size_t count, const Dims& sizes, DType dtype) {
  Tensor result = uninitialized(sizes, dtype);
  if (static_cast<std::size_t>(result.elements()) != count) {
    throw InvalidArgument(
        text("tensor: shape ", sizes, " has ", result.elements(), " elements, found ", count, " values"));
  }
  if (count > 0) {
    std::memcpy(result.data(), values, count * size_of(dtype));
  }
  return result;
}

Tensor Tensor::clone() const { return copied_to(*this, device(), memory_.get_deleter().stream); }

namespace {

// Calls visit(from offset, to offset) for each index, the last axis fastest.
template <class Visit>
void for_each_pair(const Dims& sizes, const Dims& from, const Dims& to, int axis, std::int64_t from_offset,
                   std::int64_t to_offset, const Visit& visit) {
  if (axis == sizes.size()) {
    visit(from_offset, to_offset);
    return;
  }
  for (std::int64_t i = 0; i < sizes[axis]; ++i) {
    for_each_pair(sizes, from, to, axis + 1, from_offset + i * from[axis], to_offset + i * to[axis], visit);
  }
}

// At least one of the two is on a device; where their types differ, the copy goes through host memory.
void copy_with_conversion(const ConstTensorView& from, const TensorView& to, void* stream) {
  if (from.dtype() == to.dtype()) {
    return copy_with_device(from, to, stream);
  }
  if (from.device() == Device{}) {
    return copy_with_device(convert(from, to.dtype()), to, stream);
  }
  if (to.device() == Device{}) {
    return copy(copied_to(from, Device{}, stream), to);
  }
  throw Unsupported(text("copy: expected one type for memory on ", from.device(), " and ", to.device(), ", found ",
                         from.dtype(), " and ", to.dtype()));
}

}  // namespace

void copy(ConstTensorView from, TensorView to, void* stream) {
  if (from.sizes() != to.sizes()) {
    throw InvalidArgument(text("copy: expected equal shapes, found ", from.sizes(), " and ", to.sizes()));
  }
  if (from.elements() == 0) {
    return;
  }
  if (from.device() != Device{} || to.device() != Device{}) {
    return copy_with_conversion(from, to, stream);
  }
  if (from.dtype() == to.dtype() && from.is_contiguous() && to.is_contiguous()) {
    std::memcpy(to.data(), from.data(), static_cast<std::size_t>(from.elements()) * size_of(from.dtype()));
    return;
  }
  with_element_type(from.dtype(), [&](auto source) {
    with_element_type(to.dtype(), [&](auto target) {
      using Source = decltype(source);
      using Target = decltype(target);
      const auto* in = static_cast<const Source*>(from.data());
      auto* out = static_cast<Target*>(to.data());
      for_each_pair(from.sizes(), from.strides(), to.strides(), 0, 0, 0,
                    [&](std::int64_t read, std::int64_t write) { out[write] = converted<Target>(in[read]); });
    });
  });
}

Tensor copied_to(ConstTensorView from, Device device, void* stream) {
  Tensor result = Tensor::uninitialized(from.sizes(), from.dtype(), device, stream);
  copy(from, result, stream);
  return result;
}

Tensor convert(ConstTensorView from, DType dtype) {
  Tensor result = Tensor::uninitialized(from.sizes(), dtype);
  copy(from, result);
  return result;
}

}  // namespace headway
