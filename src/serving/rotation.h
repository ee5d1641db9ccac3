// Rotating single rows, for rope() and the cache.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/elements.h"
#include "headway/rope.h"

namespace headway {

constexpr std::int64_t parallel_elements = std::int64_t{1} << 15;  // rows of fewer in all are not worth a second thread

// Rows are rotated in this type.
template <class T>
using RotationType = std::conditional_t<std::is_same_v<T, double>, double, float>;

// rope_frequencies with error texts that begin with the given operation.
RopeFrequencies rope_frequencies(const char* operation, std::int64_t head_dim, const RopeConfig& config);

// The pairs of rows of one head_dim, and their frequencies.
class RopePairs {
 public:
  RopePairs(const char* operation, std::int64_t head_dim, const RopeConfig& config)
      : found_(rope_frequencies(operation, head_dim, config)), interleaved_(config.interleaved) {}

  std::int64_t count() const { return static_cast<std::int64_t>(found_.frequencies.size()); }
  std::int64_t dims() const { return 2 * count(); }
  bool interleaved() const { return interleaved_; }
  const RopeFrequencies& frequencies() const { return found_; }

  // Cosines, then sines, of one position, times the attention factor: 2 * count() numbers. The opposite position
  // rotates back.
  template <class Number>
  void turn(std::int64_t position, Number* cos_sin) const;

 private:
  RopeFrequencies found_;
  bool interleaved_;
};

// bfloat16(float) where a compiler can make vectors of it.
inline bfloat16 rounded_to_bfloat16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const std::uint32_t quiet = (bits >> 16) | 0x0040u;
  return std::bit_cast<bfloat16>(static_cast<std::uint16_t>(value != value ? quiet : rounded));
}

template <class To, class From>
To rounded_to(From value) {
  if constexpr (std::is_same_v<To, bfloat16> && std::is_same_v<From, float>) {
    return rounded_to_bfloat16(value);
  } else {
    return converted<To>(value);
  }
}

// out = row, rotated; both of `width` elements. out may be row itself, or of a wider type. Strides are numbers, or
// std::integral_constant<std::int64_t, 1>, with which the compiler vectorises the loops.
template <class T, class Out, class Stride, class OutStride>
void rotate_row(const RopePairs& pairs, const RotationType<T>* cos_sin, std::int64_t width, const T* row, Stride stride,
                Out* out, OutStride out_stride) {
  using Number = RotationType<T>;
  const std::int64_t count = pairs.count();
  const Number* cosines = cos_sin;
  const Number* sines = cos_sin + count;
  const auto rotate = [&](std::int64_t n, std::int64_t a, std::int64_t b) {
    const auto x = converted<Number>(row[a * stride]);
    const auto y = converted<Number>(row[b * stride]);
    out[a * out_stride] = rounded_to<Out>(x * cosines[n] - y * sines[n]);
    out[b * out_stride] = rounded_to<Out>(y * cosines[n] + x * sines[n]);
  };
  if (pairs.interleaved()) {
    for (std::int64_t n = 0; n < count; ++n) {
      rotate(n, 2 * n, 2 * n + 1);
    }
  } else {
    for (std::int64_t n = 0; n < count; ++n) {
      rotate(n, n, n + count);
    }
  }
  for (std::int64_t d = pairs.dims(); d < width; ++d) {
    out[d * out_stride] = converted<Out>(row[d * stride]);
  }
}

}  // namespace headway
