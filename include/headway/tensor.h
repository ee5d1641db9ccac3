// Tensor owns memory; TensorView and ConstTensorView borrow it. A view is a pointer, an element type, a device, sizes
// and strides in elements (of any sign; 0 repeats an element). Shape functions return views and never copy.
#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <iosfwd>
#include <memory>
#include <ranges>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "headway/cxx20.h"
#include "headway/dtype.h"
#include "headway/error.h"

// Makes compilers that can do so warn about a view that outlives its memory.
#if defined(__has_cpp_attribute) && __has_cpp_attribute(clang::lifetimebound)
#define HEADWAY_LIFETIMEBOUND [[clang::lifetimebound]]
#else
#define HEADWAY_LIFETIMEBOUND
#endif

#pragma GCC visibility push(default)
namespace headway {

// Sizes, strides or an index: up to 8 numbers, stored in place. {batch, vector.size(), 64} takes any integer types.
class Dims {
 public:
  static constexpr int max_rank = 8;

  // One of the numbers; InvalidArgument for an unsigned one past 2^63.
  struct Number {
    template <std::integral T>
    constexpr Number(T number)  // NOLINT(google-explicit-constructor)
        : value(static_cast<std::int64_t>(number)) {
      if (std::unsigned_integral<T> && value < 0) {
        throw_too_large(static_cast<std::uint64_t>(number));
      }
    }
    std::int64_t value;
  };

  Dims() = default;
  Dims(std::initializer_list<Number> values) {
    require_rank(values.size());
    for (const Number number : values) {
      values_[static_cast<std::size_t>(size_++)] = number.value;
    }
  }
  explicit Dims(std::span<const std::int64_t> values);

  int size() const { return size_; }
  bool empty() const { return size_ == 0; }
  // The size of an axis; negative axes count from the end, -1 is the last. InvalidArgument for an axis out of range.
  std::int64_t at(int axis) const {
    const int from_front = axis < 0 ? axis + size_ : axis;
    if (from_front < 0 || from_front >= size_) {
      throw_no_axis(axis, size_);
    }
    return values_[static_cast<std::size_t>(from_front)];
  }
  // Without the check.
  std::int64_t& operator[](int axis) { return values_[static_cast<std::size_t>(axis)]; }
  std::int64_t operator[](int axis) const { return values_[static_cast<std::size_t>(axis)]; }
  const std::int64_t* begin() const { return values_.data(); }
  const std::int64_t* end() const { return values_.data() + size_; }
  std::int64_t back() const { return values_[static_cast<std::size_t>(size_ - 1)]; }
  void push_back(std::int64_t value);
  bool operator==(const Dims& other) const;

 private:
  [[noreturn]] static void throw_too_large(std::uint64_t number);
  [[noreturn]] static void throw_no_axis(int axis, int rank);
  [[noreturn]] static void throw_too_many();
  static void require_rank(std::size_t count) {
    if (count > max_rank) {
      throw_too_many();
    }
  }

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

// The types of which a view can be made: the element types, and bytes, which then are bools (0 is false, anything else
// true), since std::vector<bool> does not store bools as elements in memory.
template <class T>
concept Viewable = Element<T> || std::same_as<T, std::byte> || std::same_as<T, char> || std::same_as<T, unsigned char>;

class Tensor;

// `Void` is void for a writable view, const void for a read-only one.
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
  requires(Viewable<std::remove_const_t<T>>&& std::is_convertible_v<T*, Void*>) BasicTensorView(T* data, Dims sizes)
      : BasicTensorView(data, dtype_in_memory<std::remove_const_t<T>>(), sizes) {}
  template <class T>
  requires(Viewable<std::remove_const_t<T>>&& std::is_convertible_v<T*, Void*>)
      BasicTensorView(T* data, Dims sizes, Dims strides)
      : BasicTensorView(data, dtype_in_memory<std::remove_const_t<T>>(), sizes, strides) {}

  // Over a std::vector, array or span, whose length must be the shape's: TensorView(vector, {2, 3}).
  template <std::ranges::contiguous_range Range>
  requires(std::ranges::sized_range<Range>&& std::ranges::borrowed_range<Range>&&
               Viewable<std::ranges::range_value_t<Range>>&&
                   std::is_convertible_v<std::add_pointer_t<std::ranges::range_reference_t<Range>>, Void*>)
      BasicTensorView(Range&& range HEADWAY_LIFETIMEBOUND, Dims sizes)
      : BasicTensorView(std::ranges::data(range), dtype_in_memory<std::ranges::range_value_t<Range>>(), sizes) {
    require_elements(static_cast<std::size_t>(std::ranges::size(range)));
  }

  // A writable view converts to a read-only one.
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
  std::int64_t size(int axis) const { return sizes_.at(axis); }  // axis -1 is the last
  std::int64_t stride(int axis) const { return strides_.at(axis); }
  std::int64_t elements() const { return product(sizes_); }
  bool is_contiguous() const;

  // The typed pointer; TypeMismatch when the view holds something else.
  template <Element T>
  auto* as() const {
    if (dtype_ != dtype_of<T>) {
      throw_other_type(dtype_of<T>, dtype_);
    }
    using Pointer = std::conditional_t<writable, T*, const T*>;
    return static_cast<Pointer>(data_);
  }

  // One element, in host memory: view.at<float>({0, 2}).
  template <Element T>
  auto& at(const Dims& index) const {
    return as<T>()[offset(index)];
  }

  // Axes may be counted from the end: transpose(-2, -1).
  BasicTensorView transpose(int axis_a, int axis_b) const;
  BasicTensorView permute(const Dims& order) const;
  BasicTensorView select(int axis, std::int64_t index) const;                   // drops the axis
  BasicTensorView slice(int axis, std::int64_t begin, std::int64_t end) const;  // [begin, end)
  BasicTensorView flip(int axis) const;                                         // in reverse order
  BasicTensorView unsqueeze(int axis) const;                                    // a new axis of size 1; -1: the last
  BasicTensorView unflatten(int axis, const Dims& sizes) const;                 // one axis into several
  BasicTensorView expand(const Dims& sizes) const;                              // NumPy broadcasting, stride 0

 private:
  friend class Tensor;

  // The number of elements of a shape that was checked. (Unsigned: of an empty one the other sizes may be anything.)
  static std::int64_t product(const Dims& sizes) {
    std::uint64_t count = 1;
    for (const std::int64_t size : sizes) {
      count *= static_cast<std::uint64_t>(size);
    }
    return static_cast<std::int64_t>(count);
  }
  [[noreturn]] static void throw_other_type(DType expected, DType found);

  template <Viewable T>
  static constexpr DType dtype_in_memory() {
    if constexpr (Element<T>) {
      return dtype_of<T>;
    } else {
      return DType::b8;
    }
  }
  void require_elements(std::size_t found) const;
  [[noreturn]] void throw_outside(const Dims& index) const;
  std::int64_t offset(const Dims& index) const {
    bool inside = index.size() == rank() && device_ == Device{};
    std::int64_t result = 0;
    for (int axis = 0; inside && axis < rank(); ++axis) {
      inside = index[axis] >= 0 && index[axis] < sizes_[axis];
      result += inside ? index[axis] * strides_[axis] : 0;
    }
    if (!inside) {
      throw_outside(index);
    }
    return result;
  }
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

// Owns contiguous memory, 64-byte aligned, on the host or on a CUDA device. Moving is free; to copy, call clone().
// Device memory is allocated and freed in the order of `stream` (a cudaStream_t; null: the default stream), which must
// live as long as the tensor; work on other streams must be finished before the tensor is destroyed.
class Tensor {
 public:
  Tensor() = default;  // shape (0), f32, in host memory
  Tensor(Tensor&&) noexcept = default;
  Tensor& operator=(Tensor&&) noexcept = default;
  Tensor(const Tensor&) = delete;  // a copy is spelled clone()
  Tensor& operator=(const Tensor&) = delete;
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
  // A temporary cannot be an output; a view of it may be read until the expression ends.
  TensorView view() & HEADWAY_LIFETIMEBOUND { return {memory_.get(), dtype_, sizes_, device()}; }
  ConstTensorView view() const& HEADWAY_LIFETIMEBOUND { return {memory_.get(), dtype_, sizes_, device()}; }
  operator TensorView() & HEADWAY_LIFETIMEBOUND { return view(); }  // NOLINT(google-explicit-constructor)
  operator TensorView() && = delete;  // of a temporary, which would take what is written with it
  operator ConstTensorView() const& HEADWAY_LIFETIMEBOUND { return view(); }  // NOLINT(google-explicit-constructor)

  void* data() { return memory_.get(); }
  const void* data() const { return memory_.get(); }
  DType dtype() const { return dtype_; }
  Device device() const { return memory_.get_deleter().device; }
  const Dims& sizes() const { return sizes_; }
  int rank() const { return sizes_.size(); }
  std::int64_t size(int axis) const { return sizes_.at(axis); }  // axis -1 is the last
  std::int64_t elements() const { return TensorView::product(sizes_); }
  template <Element T>
  T* as() HEADWAY_LIFETIMEBOUND {
    require_dtype(dtype_of<T>);
    return static_cast<T*>(memory_.get());
  }
  template <Element T>
  const T* as() const HEADWAY_LIFETIMEBOUND {
    require_dtype(dtype_of<T>);
    return static_cast<const T*>(memory_.get());
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
  void require_dtype(DType expected) const {
    if (dtype_ != expected) {
      TensorView::throw_other_type(expected, dtype_);
    }
  }
  static Tensor copied_from(const void* values, std::size_t count, const Dims& sizes, DType dtype);

  std::unique_ptr<void, Free> memory_;
  Dims sizes_{0};
  DType dtype_ = DType::f32;
};

// Copies between views of equal sizes, converting the element type (floating to integer truncates; types must be equal
// between two devices). With a device involved the copy is queued on `stream`, and waited for if `to` is in host
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
