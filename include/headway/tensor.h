// Tensor owns memory; TensorView and ConstTensorView borrow it. A view is a pointer, an element type, a device, sizes
// and strides in elements (of any sign; 0 repeats an element). Shape functions return views and never copy.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <iosfwd>
#include <memory>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "headway/cxx20.h"
#include "headway/dtype.h"
#include "headway/error.h"

#pragma GCC visibility push(default)
namespace headway {

// Sizes or strides: up to 8 numbers, stored in place.
class Dims {
 public:
  static constexpr int max_rank = 8;

  Dims() = default;
  Dims(std::initializer_list<std::int64_t> values) : Dims(std::span(values.begin(), values.size())) {}
  explicit Dims(std::span<const std::int64_t> values);

  int size() const { return size_; }
  bool empty() const { return size_ == 0; }
  std::int64_t& operator[](int axis) { return values_[static_cast<std::size_t>(axis)]; }
  std::int64_t operator[](int axis) const { return values_[static_cast<std::size_t>(axis)]; }
  const std::int64_t* begin() const { return values_.data(); }
  const std::int64_t* end() const { return values_.data() + size_; }
  std::int64_t back() const { return values_[static_cast<std::size_t>(size_ - 1)]; }
  void push_back(std::int64_t value);
  bool operator==(const Dims& other) const;

 private:
  std::array<std::int64_t, max_rank> values_{};
  int size_ = 0;
};

std::ostream& operator<<(std::ostream& stream, const Dims& dims);  // (2, 3, 4)

// The number of elements; InvalidArgument when a size is negative, or when the elements' bytes pass 2^63.
std::int64_t checked_elements(const Dims& sizes, DType dtype);
Dims contiguous_strides(const Dims& sizes);

enum class DeviceType : std::uint8_t { cpu, cuda };

struct Device {
  DeviceType type = DeviceType::cpu;
  int index = 0;
  bool operator==(const Device&) const = default;
};

std::ostream& operator<<(std::ostream& stream, Device device);  // cpu, cuda:0

// `Void` is void for a view that may be written, const void for one that may not.
template <class Void>
class BasicTensorView {
 public:
  static constexpr bool writable = !std::is_const_v<Void>;

  BasicTensorView() = default;
  BasicTensorView(Void* data, DType dtype, Dims sizes, Device device = {})
      : BasicTensorView(data, dtype, sizes, contiguous_strides(sizes), device) {}
  BasicTensorView(Void* data, DType dtype, Dims sizes, Dims strides, Device device = {});

  // Over memory of a known element type: TensorView(pointer, {2, 3}) or, with strides, (pointer, {2, 3}, {3, 1}).
  template <class T>
  requires(Element<std::remove_const_t<T>>&& std::is_convertible_v<T*, Void*>) BasicTensorView(T* data, Dims sizes)
      : BasicTensorView(data, dtype_of<std::remove_const_t<T>>, sizes) {}
  template <class T>
  requires(Element<std::remove_const_t<T>>&& std::is_convertible_v<T*, Void*>)
      BasicTensorView(T* data, Dims sizes, Dims strides)
      : BasicTensorView(data, dtype_of<std::remove_const_t<T>>, sizes, strides) {}

  // What may be written may be read.
  template <class Other>
  requires(!writable && !std::is_const_v<Other>)
      BasicTensorView(const BasicTensorView<Other>& other)  // NOLINT(google-explicit-constructor)
      : BasicTensorView(other.data(), other.dtype(), other.sizes(), other.strides(), other.device()) {}

  Void* data() const { return data_; }
  DType dtype() const { return dtype_; }
  Device device() const { return device_; }
  int rank() const { return sizes_.size(); }
  const Dims& sizes() const { return sizes_; }
  const Dims& strides() const { return strides_; }
  std::int64_t size(int axis) const { return sizes_[axis]; }
  std::int64_t stride(int axis) const { return strides_[axis]; }
  std::int64_t elements() const;
  bool is_contiguous() const;

  // The typed pointer; TypeMismatch when the view holds something else.
  template <Element T>
  auto* as() const {
    require_dtype(dtype_of<T>);
    using Pointer = std::conditional_t<writable, T*, const T*>;
    return static_cast<Pointer>(data_);
  }

  // One element, in host memory: view.at<float>({0, 2}).
  template <Element T>
  auto& at(const Dims& index) const {
    return as<T>()[offset(index)];
  }

  BasicTensorView transpose(int axis_a, int axis_b) const;
  BasicTensorView permute(const Dims& order) const;
  BasicTensorView select(int axis, std::int64_t index) const;                   // drops the axis
  BasicTensorView slice(int axis, std::int64_t begin, std::int64_t end) const;  // [begin, end)
  BasicTensorView flip(int axis) const;                                         // reads backwards
  BasicTensorView unsqueeze(int axis) const;                                    // a new axis of size 1
  BasicTensorView unflatten(int axis, const Dims& sizes) const;                 // one axis into several
  BasicTensorView expand(const Dims& sizes) const;                              // NumPy broadcasting, stride 0

 private:
  void require_dtype(DType expected) const;
  std::int64_t offset(const Dims& index) const;
  std::int64_t distance(int axis, std::int64_t index) const;  // in elements
  BasicTensorView moved_by(std::int64_t elements, Dims sizes, Dims strides) const;

  Void* data_ = nullptr;
  DType dtype_ = DType::f32;
  Device device_;
  Dims sizes_{0};
  Dims strides_{1};
};

extern template class BasicTensorView<void>;
extern template class BasicTensorView<const void>;
using TensorView = BasicTensorView<void>;
using ConstTensorView = BasicTensorView<const void>;

// Owns contiguous memory, 64-byte aligned: host memory, or a CUDA device's. Moving is free, copying is spelled clone().
// A device's memory is taken and given back in the order of `stream` (a cudaStream_t; null: the default stream), which
// has to live as long as the tensor; work on other streams has to be done before the tensor goes.
class Tensor {
 public:
  Tensor() = default;  // shape (0), f32, in host memory
  explicit Tensor(const Dims& sizes, DType dtype = DType::f32, Device device = {}, void* stream = nullptr);  // zeros
  static Tensor uninitialized(const Dims& sizes, DType dtype, Device device = {}, void* stream = nullptr);

  // Tensor::of<float>({2, 2}, {1, 2, 3, 4})
  template <Element T>
  static Tensor of(const Dims& sizes, std::initializer_list<T> values) {
    return copied_from(values.begin(), values.size(), sizes, dtype_of<T>);
  }
  template <Element T>
  requires(!std::is_same_v<T, bool>) static Tensor of(const Dims& sizes, const std::vector<T>& values) {
    return copied_from(values.data(), values.size(), sizes, dtype_of<T>);
  }

  Tensor clone() const;  // on the same device, in the order of the same stream
  TensorView view() { return {memory_.get(), dtype_, sizes_, device()}; }
  ConstTensorView view() const { return {memory_.get(), dtype_, sizes_, device()}; }
  operator TensorView() { return view(); }             // NOLINT(google-explicit-constructor)
  operator ConstTensorView() const { return view(); }  // NOLINT(google-explicit-constructor)

  void* data() { return memory_.get(); }
  const void* data() const { return memory_.get(); }
  DType dtype() const { return dtype_; }
  Device device() const { return memory_.get_deleter().device; }
  const Dims& sizes() const { return sizes_; }
  int rank() const { return sizes_.size(); }
  std::int64_t size(int axis) const { return sizes_[axis]; }
  std::int64_t elements() const { return view().elements(); }
  template <Element T>
  T* as() {
    return view().as<T>();
  }
  template <Element T>
  const T* as() const {
    return view().as<T>();
  }
  template <Element T>
  T& at(const Dims& index) {
    return view().at<T>(index);
  }
  template <Element T>
  const T& at(const Dims& index) const {
    return view().at<T>(index);
  }

 private:
  struct Free {
    std::size_t bytes;
    Device device;
    void* stream;
    void operator()(void* memory) const noexcept;
  };
  static Tensor copied_from(const void* values, std::size_t count, const Dims& sizes, DType dtype);

  std::unique_ptr<void, Free> memory_;
  Dims sizes_{0};
  DType dtype_ = DType::f32;
};

// Copies between views of equal sizes, converting the element type (floating to integer truncates; not from one
// device's memory to a device's). With a device it is queued on `stream`, and waited for where `to` lies in host
// memory.
void copy(ConstTensorView from, TensorView to, void* stream = nullptr);
// The same numbers as another type, in host memory.
Tensor convert(ConstTensorView from, DType dtype);
// The same numbers, contiguous, on a device or in host memory (Device{}).
Tensor copied_to(ConstTensorView from, Device device, void* stream = nullptr);

// The numbers with their shape, long axes shortened as NumPy does.
std::ostream& operator<<(std::ostream& stream, const ConstTensorView& view);

}  // namespace headway
#pragma GCC visibility pop
