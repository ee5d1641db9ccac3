// Element types: names, sizes, and the roundings of the formats of 16 and 8 bits.
#include "headway/dtype.h"

#include <cmath>
#include <ostream>

namespace headway {
namespace {

// Rounds to float so that a second rounding to fewer bits gives what one rounding would: an inexact result gets an odd
// last bit ("round to odd"), which no later tie can mistake for exact.
float to_float_odd(double value) {
  const auto rounded = static_cast<float>(value);
  const auto bits = std::bit_cast<std::uint32_t>(rounded);
  if (std::isnan(value) || static_cast<double>(rounded) == value || (bits & 1) != 0) {
    return rounded;
  }
  const bool rounded_away = std::fabs(static_cast<double>(rounded)) > std::fabs(value);
  return std::bit_cast<float>(rounded_away ? bits - 1 : bits + 1);
}

std::uint16_t bfloat16_bits(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if (std::isnan(value)) {
    return static_cast<std::uint16_t>((bits >> 16) | 0x0040u);
  }
  const std::uint32_t half_minus_tie = 0x7fffu + ((bits >> 16) & 1u);
  return static_cast<std::uint16_t>((bits + half_minus_tie) >> 16);
}

std::uint16_t float16_bits(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {  // NaN
    return static_cast<std::uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x01ffu));
  }
  if (magnitude >= 0x477ff000u) {  // 65520 and above, where rounding reaches 2^16: infinity
    return static_cast<std::uint16_t>(sign | 0x7c00u);
  }
  if (magnitude >= 0x38800000u) {  // 2^-14 and above: normal; the carry of the rounding runs into the exponent
    const std::uint32_t rebased = magnitude - 0x38000000u;
    return static_cast<std::uint16_t>(sign | ((rebased + 0x0fffu + ((rebased >> 13) & 1u)) >> 13));
  }
  // Below: a multiple of 2^-24. Adding 0.5 puts that multiple, correctly rounded, into the last bits of a float.
  const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
  return static_cast<std::uint16_t>(sign |
                                    (std::bit_cast<std::uint32_t>(shifted) - std::bit_cast<std::uint32_t>(0.5f)));
}

std::uint8_t float8_bits(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 24) & 0x80u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > std::bit_cast<std::uint32_t>(464.0f)) {  // NaN, or nearer to 480, which is no number, than to 448
    return static_cast<std::uint8_t>(sign | 0x7fu);
  }
  if (magnitude >= std::bit_cast<std::uint32_t>(0x1p-6f)) {  // normal
    const std::uint32_t rebased = magnitude - (std::uint32_t{127 - 7} << 23);
    return static_cast<std::uint8_t>(sign | ((rebased + 0x7ffffu + ((rebased >> 20) & 1u)) >> 20));
  }
  // Below: a multiple of 2^-9. Adding 2^14 puts that multiple, correctly rounded, into the last bits of a float.
  const float shifted = std::bit_cast<float>(magnitude) + 0x1p14f;
  return static_cast<std::uint8_t>(sign |
                                   (std::bit_cast<std::uint32_t>(shifted) - std::bit_cast<std::uint32_t>(0x1p14f)));
}

}  // namespace

const char* name(DType dtype) {
  switch (dtype) {
    case DType::f32: return "f32";
    case DType::f64: return "f64";
    case DType::bf16: return "bf16";
    case DType::f16: return "f16";
    case DType::b8: return "bool";
    case DType::i32: return "i32";
    case DType::i64: return "i64";
    case DType::i8: return "i8";
    case DType::f8e4m3: return "f8e4m3";
  }
  return "unknown";
}

std::size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::b8:
    case DType::i8:
    case DType::f8e4m3: return 1;
    case DType::bf16:
    case DType::f16: return 2;
    case DType::f32:
    case DType::i32: return 4;
    case DType::f64:
    case DType::i64: return 8;
  }
  return 1;
}

std::ostream& operator<<(std::ostream& stream, DType dtype) { return stream << name(dtype); }

bfloat16::bfloat16(float value) : bits(bfloat16_bits(value)) {}
bfloat16::bfloat16(double value) : bits(bfloat16_bits(to_float_odd(value))) {}
bfloat16 bfloat16::from_bits(std::uint16_t bits) {
  bfloat16 result;
  result.bits = bits;
  return result;
}

float16::float16(float value) : bits(float16_bits(value)) {}
float16::float16(double value) : bits(float16_bits(to_float_odd(value))) {}
float16 float16::from_bits(std::uint16_t bits) {
  float16 result;
  result.bits = bits;
  return result;
}

float16::operator float() const {
  const std::uint32_t sign = std::uint32_t{bits & 0x8000u} << 16;
  const std::uint32_t magnitude = bits & 0x7fffu;
  if (magnitude >= 0x7c00u) {  // infinity, NaN
    const std::uint32_t quiet = magnitude > 0x7c00u ? 0x00400000u : 0u;
    return std::bit_cast<float>(sign | 0x7f800000u | ((magnitude & 0x03ffu) << 13) | quiet);
  }
  if (magnitude >= 0x0400u) {
    return std::bit_cast<float>(sign | ((magnitude << 13) + 0x38000000u));
  }
  const float value = static_cast<float>(magnitude) * 0x1p-24f;
  return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(value));
}

float8_e4m3::float8_e4m3(float value) : bits(float8_bits(value)) {}
float8_e4m3::float8_e4m3(double value) : bits(float8_bits(to_float_odd(value))) {}
float8_e4m3 float8_e4m3::from_bits(std::uint8_t bits) {
  float8_e4m3 result;
  result.bits = bits;
  return result;
}

float8_e4m3::operator float() const {
  const std::uint32_t sign = std::uint32_t{bits & 0x80u} << 24;
  const std::uint32_t magnitude = bits & 0x7fu;
  if (magnitude == 0x7fu) {
    return std::bit_cast<float>(sign | 0x7fc00000u);
  }
  if (magnitude >= 0x08u) {
    return std::bit_cast<float>(sign | ((magnitude << 20) + (std::uint32_t{127 - 7} << 23)));
  }
  const float value = static_cast<float>(magnitude) * 0x1p-9f;
  return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(value));
}

}  // namespace headway
