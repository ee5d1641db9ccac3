// From a run-time element type to a compile-time one, and single elements read and written as any number.
#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>

#include "headway/tensor.h"

namespace headway {

// A bool is stored as one byte. Read as a number, every non-zero byte is true, even where another program stored
// something other than 0 or 1.
struct bool8 {
  std::uint8_t byte = 0;
};

// Calls action with an object of the element type, whose type is all that counts.
template <class Action>
decltype(auto) with_float_type(DType dtype, Action&& action) {
  switch (dtype) {
    case DType::f64: return action(double{});
    case DType::bf16: return action(bfloat16{});
    case DType::f16: return action(float16{});
    default: return action(float{});
  }
}

template <class Action>
decltype(auto) with_element_type(DType dtype, Action&& action) {
  switch (dtype) {
    case DType::b8: return action(bool8{});
    case DType::i32: return action(std::int32_t{});
    case DType::i64: return action(std::int64_t{});
    case DType::i8: return action(std::int8_t{});
    case DType::f8e4m3: return action(float8_e4m3{});
    default: return with_float_type(dtype, action);
  }
}

// Floats that C++ itself does not have: they are numbers after a conversion to float.
template <class T>
inline constexpr bool is_short_float =
    std::is_same_v<T, bfloat16> || std::is_same_v<T, float16> || std::is_same_v<T, float8_e4m3>;

// Value conversion between any two element types. Numbers to bool: not zero. Floats to integers truncate, saturate at
// the ends and give 0 for NaN.
template <class To, class From>
To converted(From value) {
  if constexpr (std::is_same_v<To, From>) {
    return value;
  } else if constexpr (std::is_same_v<From, bool8>) {
    return converted<To>(std::int32_t{value.byte != 0});
  } else if constexpr (std::is_same_v<To, bool8>) {
    return bool8{static_cast<std::uint8_t>(converted<double>(value) != 0.0)};
  } else if constexpr (is_short_float<From>) {
    return converted<To>(static_cast<float>(value));
  } else if constexpr (is_short_float<To>) {
    if constexpr (std::is_same_v<From, float>) {
      return To(value);
    } else {
      return To(static_cast<double>(value));
    }
  } else if constexpr (std::is_integral_v<To> && std::is_floating_point_v<From>) {
    constexpr auto lowest = std::numeric_limits<To>::lowest();
    constexpr auto highest = std::numeric_limits<To>::max();
    if (!(value >= static_cast<From>(lowest))) {
      return value != value ? To{0} : lowest;
    }
    return value >= static_cast<From>(highest) ? highest : static_cast<To>(value);
  } else {
    return static_cast<To>(value);
  }
}

// One element at an offset counted in elements.
inline double load_float(ConstTensorView view, std::int64_t offset) {
  return with_float_type(view.dtype(), [&](auto type) {
    return converted<double>(static_cast<const decltype(type)*>(view.data())[offset]);
  });
}

inline void store_float(TensorView view, std::int64_t offset, double value) {
  with_float_type(view.dtype(), [&](auto type) {
    using T = decltype(type);
    static_cast<T*>(view.data())[offset] = converted<T>(value);
  });
}

inline std::int64_t load_integer(ConstTensorView view, std::int64_t offset) {
  return view.dtype() == DType::i32 ? static_cast<const std::int32_t*>(view.data())[offset]
                                    : static_cast<const std::int64_t*>(view.data())[offset];
}

// An element of any type as a number.
inline double load_number(ConstTensorView view, std::int64_t offset) {
  return with_element_type(view.dtype(), [&](auto type) {
    return converted<double>(static_cast<const decltype(type)*>(view.data())[offset]);
  });
}

inline bool load_bool(ConstTensorView view, std::int64_t offset) {
  return static_cast<const std::uint8_t*>(view.data())[offset] != 0;
}

}  // namespace headway
