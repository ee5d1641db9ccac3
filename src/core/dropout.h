// Dropout as a pure function of (seed, b, h, i, j): Philox4x32-10 with key = seed and the counter (j / 4, i, h, b), low
// 32 bits each; word j % 4 of the result decides. An element is kept when its word is at least round(p * 2^32).
#pragma once

#include <cmath>
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

}  // namespace headway
