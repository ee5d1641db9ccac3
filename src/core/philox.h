// Philox4x32-10 (Salmon et al., SC 2011): a counter-based generator. The random words are a pure function of a counter
// and a key, so every engine, thread count and tiling draws the same dropout mask.
#pragma once

#include <array>
#include <cstdint>

#include "core/host_device.h"

namespace headway {

struct Philox4x32 {
  using Counter = std::array<std::uint32_t, 4>;
  static constexpr int rounds = 10;

  // The four random words of a counter under a 64-bit key (low word first).
  HEADWAY_HOST_DEVICE static constexpr Counter words(Counter counter, std::uint64_t key) {
    auto key_low = static_cast<std::uint32_t>(key);
    auto key_high = static_cast<std::uint32_t>(key >> 32);
    for (int round = 0; round < rounds; ++round) {
      const std::uint64_t product_0 = std::uint64_t{0xD2511F53u} * counter[0];
      const std::uint64_t product_2 = std::uint64_t{0xCD9E8D57u} * counter[2];
      counter = {
          static_cast<std::uint32_t>(product_2 >> 32) ^ counter[1] ^ key_low, static_cast<std::uint32_t>(product_2),
          static_cast<std::uint32_t>(product_0 >> 32) ^ counter[3] ^ key_high, static_cast<std::uint32_t>(product_0)};
      key_low += 0x9E3779B9u;
      key_high += 0xBB67AE85u;
    }
    return counter;
  }
};

}  // namespace headway
