// Element types, and the formats of 16 and 8 bits as value types.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <iosfwd>

#include "headway/cxx20.h"

#pragma GCC visibility push(default)
namespace headway {

// The 8-bit types hold quantised keys and values (headway/serving.h); attention itself computes in the first four.
enum class DType : std::uint8_t { f32, f64, bf16, f16, b8, i32, i64, i8, f8e4m3 };

const char* name(DType dtype);     // "f32", "bf16", "bool", ...
std::size_t size_of(DType dtype);  // bytes of one element
constexpr bool is_float(DType dtype) { return dtype <= DType::f16; }
constexpr bool is_integer(DType dtype) { return dtype == DType::i32 || dtype == DType::i64; }  // of lengths and tables
constexpr bool is_8bit(DType dtype) { return dtype == DType::i8 || dtype == DType::f8e4m3; }
std::ostream& operator<<(std::ostream& stream, DType dtype);

// Conversions round to nearest, ties to even, keep denormals and signed zeros, overflow to infinity and turn every NaN
// into a quiet NaN of the same sign. From double they round once, not through float.
struct bfloat16 {
  std::uint16_t bits = 0;

  bfloat16() = default;
  explicit bfloat16(float value);
  explicit bfloat16(double value);
  explicit operator float() const { return std::bit_cast<float>(std::uint32_t{bits} << 16); }
  explicit operator double() const { return static_cast<float>(*this); }
  static bfloat16 from_bits(std::uint16_t bits);
};

struct float16 {
  std::uint16_t bits = 0;

  float16() = default;
  explicit float16(float value);
  explicit float16(double value);
  explicit operator float() const;
  explicit operator double() const { return static_cast<float>(*this); }
  static float16 from_bits(std::uint16_t bits);
};

// 4 bits of exponent, 3 of mantissa, as in the OCP 8-bit formats ("e4m3fn"): up to 448, no infinity. What rounds past
// 448 becomes NaN.
struct float8_e4m3 {
  std::uint8_t bits = 0;

  float8_e4m3() = default;
  explicit float8_e4m3(float value);
  explicit float8_e4m3(double value);
  explicit operator float() const;
  explicit operator double() const { return static_cast<float>(*this); }
  static float8_e4m3 from_bits(std::uint8_t bits);
};

// The DType of a C++ element type; has_dtype is false for types that no tensor holds.
template <class T>
inline constexpr bool has_dtype = false;
template <class T>
inline constexpr DType dtype_of = DType::f32;

#define HEADWAY_ELEMENT(type, tag)              \
  template <>                                   \
  inline constexpr bool has_dtype<type> = true; \
  template <>                                   \
  inline constexpr DType dtype_of<type> = DType::tag
HEADWAY_ELEMENT(float, f32);
HEADWAY_ELEMENT(double, f64);
HEADWAY_ELEMENT(bfloat16, bf16);
HEADWAY_ELEMENT(float16, f16);
HEADWAY_ELEMENT(bool, b8);
HEADWAY_ELEMENT(std::int32_t, i32);
HEADWAY_ELEMENT(std::int64_t, i64);
HEADWAY_ELEMENT(std::int8_t, i8);
HEADWAY_ELEMENT(float8_e4m3, f8e4m3);
#undef HEADWAY_ELEMENT

template <class T>
concept Element = has_dtype<T>;

}  // namespace headway
#pragma GCC visibility pop
