// Every operation of tile registers against plain C++. Like checks.h it is compiled for one instruction set.
#pragma once

#include <cstdint>
#include <cstring>

#include "engines/cpu/simd/vocabulary.h"
#include "simd/vocabulary_checks.h"

namespace headway::cpu {
namespace {

template <class Tiles>
class TileChecks {
  static_assert(TileRegisters<Tiles>);

 public:
  explicit TileChecks(const CheckReport& report) : report_(report) {}

  void run() {
    const typename Tiles::InUse in_use;
    constexpr int ld = 20;  // words from one row to the next
    std::uint32_t a[16 * ld], b[16 * ld];
    float sums[16 * ld];
    for (int r = 0; r < 16; ++r) {
      for (int c = 0; c < 16; ++c) {
        a[r * ld + c] = pair_of(number(r + c), number(r - c));
        b[r * ld + c] = pair_of(number(2 * r - c), number(3 + c));
        sums[r * ld + c] = static_cast<float>(10 * r + c);
      }
    }
    constexpr std::int64_t stride = ld * 4;
    Tiles::template load<0>(sums, stride);
    Tiles::template load_passing<4>(a, stride);
    Tiles::template load<6>(b, stride);
    Tiles::template zero<1>();
    Tiles::template multiply_add<0, 4, 6>();
    Tiles::template multiply_add<1, 4, 6>();
    float found[16 * ld] = {}, products[16 * ld] = {};
    Tiles::template store<0>(found, stride);
    Tiles::template store<1>(products, stride);
    for (int r = 0; r < 16; ++r) {
      for (int c = 0; c < 16; ++c) {
        float expected = 0;  // whole numbers: every order of sums is exact
        for (int k = 0; k < 16; ++k) {
          expected += number(r + k) * number(2 * k - c) + number(r - k) * number(3 + c);
        }
        compare("multiply_add of tiles, to zero", c, products[r * ld + c], expected);
        compare("multiply_add of tiles", c, found[r * ld + c], expected + sums[r * ld + c]);
      }
      compare("store of a tile, behind a row", 0, found[r * ld + 16], 0);
    }
  }

 private:
  static float number(int n) { return static_cast<float>(n % 7); }
  static std::uint32_t bits_of(float x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    return bits >> 16;
  }
  static std::uint32_t pair_of(float first, float second) { return bits_of(first) | bits_of(second) << 16; }
  void compare(const char* operation, int lane, float found, float expected) {
    report_.compared(operation, lane, found == expected, found, expected);
  }

  const CheckReport& report_;
};

}  // namespace
}  // namespace headway::cpu
