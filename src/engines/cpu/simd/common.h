// What every vocabulary and kernel header starts from.
//
// Kernels are compiled once per instruction set. A function that is not inlined there must not be shared with code
// built for another instruction set, so everything in simd/ and kernel/ lives in an anonymous namespace, uses no
// standard containers, and sees half types as bare bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#define HEADWAY_INLINE inline __attribute__((always_inline))
#define HEADWAY_NOINLINE __attribute__((noinline))
#define HEADWAY_UNROLL _Pragma("GCC unroll 32")
#define HEADWAY_LAMBDA __attribute__((always_inline))  // between a lambda's parameters and its body

namespace headway::cpu {
namespace {

// Storage of short types; conversions belong to the vocabularies. 8-bit numbers, int8 and float8 (e4m3), are those of
// quantised rows.
struct bfloat16 {
  std::uint16_t bits;
};
struct float16 {
  std::uint16_t bits;
};
struct int8 {
  std::int8_t bits;
};
struct float8 {
  std::uint8_t bits;
};

template <class S>
constexpr typename S::Scalar infinity = __builtin_inff();

// ---- What vocabularies without an instruction for it share ----
// S::Bits are unsigned integers as wide as the lanes.

// The first n elements of a row with zeros behind them: memory that a whole vector can be loaded from.
template <int lanes, class T>
struct PaddedRow {
  alignas(lanes * sizeof(T)) T elements[lanes];
};

template <int lanes, class T>
HEADWAY_INLINE PaddedRow<lanes, T> padded_row(const T* p, int n) {
  PaddedRow<lanes, T> row{};
  std::memcpy(row.elements, p, static_cast<std::size_t>(n) * sizeof(T));
  return row;
}

// a * 2^n for a near 1 and whole n of -166 or more (double: -1102), as a * 2^(n + extra) * 2^-extra: only the last
// product rounds, so that it is exact down to the denormals. From 2^88 on (double: 2^944) it gives infinity.
template <class S>
HEADWAY_INLINE typename S::Vector times_power_of_2_in_steps(typename S::Vector a, typename S::Vector n) {
  using Scalar = typename S::Scalar;
  using Bits = typename S::Bits;
  constexpr bool single = sizeof(Scalar) == 4;
  constexpr int mantissa_bits = single ? 23 : 52;
  constexpr int infinite_exponent = single ? 255 : 2047;
  constexpr int extra = single ? 40 : 80;
  constexpr int biased_zero = infinite_exponent / 2 + extra;
  // Beside this number the last bits are whole numbers: those of the sum are the exponent.
  constexpr Scalar whole = single ? 0x1.8p23 : 0x1.8p52;
  const auto exponent = S::min(n, S::set(infinite_exponent - biased_zero)) + S::set(whole + biased_zero);
  const Bits power = __builtin_bit_cast(Bits, exponent) << mantissa_bits;
  return a * __builtin_bit_cast(typename S::Vector, power) * S::set(single ? 0x1p-40 : 0x1p-80);
}

// The bits of bfloat16s in the lower halves of the lanes: to nearest even, denormals kept; a NaN keeps its upper bits
// and becomes quiet.
template <class S>
HEADWAY_INLINE typename S::Bits bfloat16_bits(typename S::Vector x) {
  using Vector = typename S::Vector;
  using Bits = typename S::Bits;
  const Bits bits = __builtin_bit_cast(Bits, x);
  const Vector rounded = __builtin_bit_cast(Vector, bits + ((bits >> 16) & 1u) + 0x7fffu);
  const Vector quiet = __builtin_bit_cast(Vector, bits | 0x00400000u);
  return __builtin_bit_cast(Bits, S::select(S::not_less_equal(x, x), quiet, rounded)) >> 16;
}

}  // namespace
}  // namespace headway::cpu
