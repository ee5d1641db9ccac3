// Every operation on pairs of bf16 against plain C++. Like checks.h it is compiled for one instruction set.
#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>

#include "engines/cpu/kernel/tile.h"
#include "engines/cpu/simd/vocabulary.h"
#include "simd/vocabulary_checks.h"

namespace headway::cpu {
namespace {

template <class S>
class PairChecks {
  using Operand = Operands<S>;
  using Vector = typename Operand::Vector;
  static constexpr int lanes = S::lanes;
  static_assert(PairOperands<Operand, S>);

 public:
  explicit PairChecks(const CheckReport& report) : report_(report) {}

  void run() {
    memory();
    products();
    arrangements();
    conversions();
    magnitudes();
  }

 private:
  struct Pairs {
    std::uint32_t pair[lanes];
  };
  static Pairs stored(Vector v) {
    Pairs all;
    std::memcpy(&all, &v, sizeof(all));
    return all;
  }
  void expect(const char* operation, int lane, std::uint64_t found, std::uint64_t expected) {
    report_.compared(operation, lane, found == expected, static_cast<double>(found), static_cast<double>(expected));
  }
  static std::uint16_t half(float x) {  // of a number that bf16 has
    std::uint32_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    return static_cast<std::uint16_t>(bits >> 16);
  }
  static std::uint32_t pair_of(std::uint32_t first, std::uint32_t second) { return first | second << 16; }
  bfloat16* row_before_end(int n) const {
    bfloat16* row = reinterpret_cast<bfloat16*>(report_.page_end) - n;
    for (int c = 0; c < n; ++c) {
      row[c].bits = static_cast<std::uint16_t>(0x3f00 + c);
    }
    return row;
  }

  void memory() {
    typename Operand::Scalar row[lanes];
    for (int l = 0; l < lanes; ++l) {
      row[l] = 0x3f803f00u + static_cast<std::uint32_t>(l);
    }
    typename Operand::Scalar copy[lanes];
    Operand::store(copy, Operand::load(row));
    const Pairs same = stored(Operand::broadcast(row + 3)), none = stored(Operand::zero());
    for (int l = 0; l < lanes; ++l) {
      expect("load and store of pairs", l, copy[l], row[l]);
      expect("broadcast of a pair", l, same.pair[l], row[3]);
      expect("zero of pairs", l, none.pair[l], 0);
    }
    Operand::clear_part(copy, 0);
    Operand::clear_part(copy + 1, 1);
    expect("clear_part 0", 0, copy[0], row[0] & 0xffff0000u);
    expect("clear_part 1", 0, copy[1], row[1] & 0xffffu);
    for (int n = 0; n <= 2 * lanes; ++n) {
      const bfloat16* numbers = row_before_end(n);
      const Pairs found = stored(Operand::load_first(numbers, n));
      for (int l = 0; l < lanes; ++l) {
        const std::uint32_t first = 2 * l < n ? numbers[2 * l].bits : 0;
        const std::uint32_t second = 2 * l + 1 < n ? numbers[2 * l + 1].bits : 0;
        expect("load_first of pairs", l, found.pair[l], pair_of(first, second));
      }
    }
    for (int n = 0; n <= lanes; ++n) {
      typename Operand::Scalar target[lanes] = {};
      Operand::store_first(target, n, Operand::load(row));
      for (int l = 0; l < lanes; ++l) {
        expect("store_first of pairs", l, target[l], l < n ? row[l] : 0);
      }
    }
  }

  // Numbers whose products and sums are exact, and denormals, which count as 0.
  void products() {
    typename Operand::Scalar a[lanes], b[lanes];
    float sums[lanes], expected[lanes];
    for (int l = 0; l < lanes; ++l) {
      const auto x = static_cast<float>(l + 1), y = static_cast<float>(3 - l), z = static_cast<float>(2 * l - 5);
      a[l] = pair_of(half(x), half(y));
      b[l] = pair_of(half(0.5f), half(z));
      sums[l] = static_cast<float>(100 * l);
      expected[l] = sums[l] + x * 0.5f + y * z;
    }
    a[0] = pair_of(0x0001, half(2));
    b[0] = pair_of(half(1e30f), half(4));
    expected[0] = sums[0] + 8;
    S::store(sums, Operand::multiply_add(Operand::load(a), Operand::load(b), S::load(sums)));
    for (int l = 0; l < lanes; ++l) {
      report_.compared("multiply_add of pairs", l, sums[l] == expected[l], sums[l], expected[l]);
    }
  }

  void arrangements() {
    const Vector low = Operand::load_first(row_before_end(2 * lanes), 2 * lanes);
    bfloat16 others[2 * lanes];
    for (int c = 0; c < 2 * lanes; ++c) {
      others[c].bits = static_cast<std::uint16_t>(0x4100 + c);
    }
    const Vector high = Operand::load_first(others, 2 * lanes);
    Vector x, y;
    Operand::interleave(low, high, x, y);
    for (int l = 0; l < lanes; ++l) {
      const auto at = static_cast<std::uint32_t>(l);
      expect("interleave", l, stored(x).pair[l], pair_of(0x3f00 + at, 0x4100 + at));
      expect("interleave", l, stored(y).pair[l], pair_of(0x3f00 + at + lanes, 0x4100 + at + lanes));
    }
    for (int n = 0; n <= 2 * lanes; ++n) {
      typename Operand::Scalar target[2 * lanes] = {};
      Operand::store_interleaved(target, n, low, high);
      for (int c = 0; c < 2 * lanes; ++c) {
        const auto at = static_cast<std::uint32_t>(c);
        expect("store_interleaved", c, target[c], c < n ? pair_of(0x3f00 + at, 0x4100 + at) : 0);
      }
    }
    for (int n = 0; n <= lanes; ++n) {
      const bfloat16* row = row_before_end(n);
      const Pairs both = stored(Operand::rows_paired(row, others, n)),
                  one = stored(Operand::rows_paired(row, nullptr, n));
      for (int l = 0; l < lanes; ++l) {
        const std::uint32_t first = l < n ? row[l].bits : 0;
        expect("rows_paired", l, both.pair[l], pair_of(first, l < n ? others[l].bits : 0));
        expect("rows_paired of one row", l, one.pair[l], first);
      }
    }
    Vector rows[lanes];
    for (int r = 0; r < lanes; ++r) {
      typename Operand::Scalar row[lanes];
      for (int l = 0; l < lanes; ++l) {
        row[l] = static_cast<std::uint32_t>(100 * r + l);
      }
      rows[r] = Operand::load(row);
    }
    Operand::transpose(rows);
    for (int r = 0; r < lanes; ++r) {
      for (int l = 0; l < lanes; ++l) {
        expect("transpose of pairs", l, stored(rows[r]).pair[l], static_cast<std::uint32_t>(100 * l + r));
      }
    }
  }

  void conversions() {
    float first[lanes], second[lanes];
    for (int l = 0; l < lanes; ++l) {  // ties to even: 1 + 2^-8 and 1 + 3 * 2^-8 lie between neighbours
      first[l] = (l % 2 == 0 ? 0x1.01p0f : 0x1.03p0f) * static_cast<float>(1 << l % 8);
      second[l] = -static_cast<float>(l);
    }
    const Pairs pairs = stored(Operand::pairs(S::load(first), S::load(second)));
    const Pairs ordered = stored(Operand::rounded(S::load(first), S::load(second)));
    for (int l = 0; l < lanes; ++l) {
      const std::uint32_t even = half((l % 2 == 0 ? 1.0f : 0x1.04p0f) * static_cast<float>(1 << l % 8));
      expect("pairs", l, pairs.pair[l], pair_of(even, half(second[l])));
      expect("rounded, front", l, ordered.pair[l / 2] >> 16 * (l % 2) & 0xffff, even);
      expect("rounded, back", l, ordered.pair[(lanes + l) / 2] >> 16 * (l % 2) & 0xffff, half(second[l]));
    }
    bfloat16 numbers[2 * lanes] = {};
    const float values[] = {1, -3, 0, 0x1p20f, __builtin_inff(), 0.375f};
    for (int c = 0; c < 6; ++c) {
      numbers[c].bits = half(values[c]);
    }
    for (const double power : {0.25, 8.0, -0.5}) {
      const Pairs found = stored(Operand::times_power(Operand::load_first(numbers, 2 * lanes), power));
      for (int c = 0; c < 6; ++c) {
        expect("times_power", c, found.pair[c / 2] >> 16 * (c % 2) & 0xffff,
               half(values[c] * static_cast<float>(power)));
      }
    }
  }

  void magnitudes() {
    bfloat16 numbers[2 * lanes] = {};
    typename Operand::Magnitudes seen;
    seen.see(Operand::load_first(numbers, 2 * lanes));
    expect("Magnitudes of zeros, below", 0, seen.any_below(0x7fff), false);
    expect("Magnitudes of zeros, from", 0, seen.any_from(1), false);
    numbers[5].bits = half(-0.5f);
    numbers[2 * lanes - 1].bits = half(4);
    seen.see(Operand::load_first(numbers, 2 * lanes));
    expect("any_below", 0, seen.any_below(half(0.5f)), false);
    expect("any_below", 0, seen.any_below(static_cast<std::uint16_t>(half(0.5f) + 1)), true);
    expect("any_from", 0, seen.any_from(half(4)), true);
    expect("any_from", 0, seen.any_from(static_cast<std::uint16_t>(half(4) + 1)), false);
  }

  const CheckReport& report_;
};

}  // namespace
}  // namespace headway::cpu
