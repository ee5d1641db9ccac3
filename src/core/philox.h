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

  struct RoundKey {
    std::uint32_t low, high;
  };
  using Schedule = std::array<RoundKey, rounds>;

  // The keys of all rounds from a 64-bit key.
  HEADWAY_HOST_DEVICE static constexpr Schedule schedule(std::uint64_t key) {
    Schedule keys{};
    RoundKey next = {static_cast<std::uint32_t>(key), static_cast<std::uint32_t>(key >> 32)};
    for (RoundKey& own : keys) {
      own = next;
      next = {next.low + 0x9E3779B9u, next.high + 0xBB67AE85u};
    }
    return keys;
  }

  // The two multiplications of a round: of counter words 0 and 2.
  HEADWAY_HOST_DEVICE static constexpr std::uint64_t product_0(std::uint32_t word) {
    return std::uint64_t{0xD2511F53u} * word;
  }
  HEADWAY_HOST_DEVICE static constexpr std::uint64_t product_2(std::uint32_t word) {
    return std::uint64_t{0xCD9E8D57u} * word;
  }
  HEADWAY_HOST_DEVICE static constexpr std::uint32_t low(std::uint64_t product) {
    return static_cast<std::uint32_t>(product);
  }
  HEADWAY_HOST_DEVICE static constexpr std::uint32_t high(std::uint64_t product) {
    return static_cast<std::uint32_t>(product >> 32);
  }

  HEADWAY_HOST_DEVICE static constexpr Counter round(const Counter& counter, RoundKey key) {
    const std::uint64_t from_0 = product_0(counter[0]), from_2 = product_2(counter[2]);
    return {high(from_2) ^ counter[1] ^ key.low, low(from_2), high(from_0) ^ counter[3] ^ key.high, low(from_0)};
  }

  // The four random words of a counter.
  HEADWAY_HOST_DEVICE static constexpr Counter words(Counter counter, const Schedule& keys) {
    for (const RoundKey& own : keys) {
      counter = round(counter, own);
    }
    return counter;
  }
  HEADWAY_HOST_DEVICE static constexpr Counter words(const Counter& counter, std::uint64_t key) {
    return words(counter, schedule(key));
  }
};

}  // namespace headway
