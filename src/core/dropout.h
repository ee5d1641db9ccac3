// Dropout as a pure function of (seed, b, h, i, j): Philox4x32-10 with key = seed and the counter (j / 4, i, h, b), low
// 32 bits each; word j % 4 of the result decides. An element is kept when its word is at least round(p * 2^32).
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "core/philox.h"

namespace headway {

struct Dropout {
  std::uint64_t seed = 0;
  std::uint64_t threshold = 0;  // round(p * 2^32); 0 drops nothing
  double kept_scale = 1.0;      // 1 / (1 - p), and 0 for p = 1

  Dropout() = default;
  Dropout(double probability, std::uint64_t key)
      : seed(key),
        threshold(static_cast<std::uint64_t>(std::llround(probability * 0x1p32))),
        kept_scale(probability < 1.0 ? 1.0 / (1.0 - probability) : 0.0) {}

  bool active() const { return kept_scale != 1.0; }

  // What the weight of (b, h, i, j) is multiplied by: 0 or 1 / (1 - p).
  double factor(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const {
    const Philox4x32::Counter counter = {static_cast<std::uint32_t>(j >> 2), static_cast<std::uint32_t>(i),
                                         static_cast<std::uint32_t>(h), static_cast<std::uint32_t>(b)};
    const std::uint32_t word = Philox4x32::words(counter, seed)[static_cast<std::size_t>(j & 3)];
    return word >= threshold ? kept_scale : 0.0;
  }
};

// For many pairs that share rows and keys: before the third round a counter's words depend on its row alone or on its
// four keys alone. Both parts are computed once, which leaves 15 of 20 multiplications per pair.
struct RowDraw {
  std::uint32_t high, low;

  HEADWAY_HOST_DEVICE static constexpr RowDraw of(const Philox4x32::Schedule& keys, std::uint32_t i, std::uint32_t h) {
    using Philox = Philox4x32;
    const std::uint64_t product = Philox::product_0(Philox::high(Philox::product_2(h)) ^ i ^ keys[0].low);
    return {Philox::high(product) ^ keys[1].high, Philox::low(product)};
  }
};

struct QuadDraw {
  std::uint32_t into_2, into_0, high, low;

  // Of keys 4 * quad to 4 * quad + 3.
  HEADWAY_HOST_DEVICE static constexpr QuadDraw of(const Philox4x32::Schedule& keys, std::uint32_t quad,
                                                   std::uint32_t h, std::uint32_t b) {
    using Philox = Philox4x32;
    const std::uint64_t first = Philox::product_0(quad);
    const std::uint64_t second = Philox::product_2(Philox::high(first) ^ b ^ keys[0].high);
    const std::uint64_t third =
        Philox::product_0(Philox::high(second) ^ Philox::low(Philox::product_2(h)) ^ keys[1].low);
    return {Philox::low(first), Philox::low(second) ^ keys[2].low, Philox::high(third) ^ keys[2].high,
            Philox::low(third)};
  }

  // The counter of the row and the four keys after the third round.
  static constexpr int rounds = 3;
  HEADWAY_HOST_DEVICE constexpr Philox4x32::Counter with(const RowDraw& row) const {
    const std::uint64_t product = Philox4x32::product_2(row.high ^ into_2);
    return {Philox4x32::high(product) ^ into_0, Philox4x32::low(product), row.low ^ high, low};
  }
};

}  // namespace headway
