// Every operation of a vocabulary (engines/cpu/simd/vocabulary.h) against plain C++. A file that includes a vocabulary
// and then this is compiled for its instruction set, so nothing here may be shared with other files: no GoogleTest, no
// standard containers, everything in an anonymous namespace.
#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>

#include "engines/cpu/simd/common.h"
#include "engines/cpu/simd/vocabulary.h"
#include "simd/vocabulary_checks.h"

namespace headway::cpu {
namespace {

template <class To, class From>
To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// Equal bits, or both NaN.
inline bool same(float a, float b) {
  return (a != a && b != b) || bits_as<std::uint32_t>(a) == bits_as<std::uint32_t>(b);
}
inline bool same(double a, double b) {
  return (a != a && b != b) || bits_as<std::uint64_t>(a) == bits_as<std::uint64_t>(b);
}

// Numbers that differ in what they try: signs, ties, denormals, the ends of the range, and what is not a number.
template <class Scalar>
struct Numbers {
  static constexpr bool single = sizeof(Scalar) == 4;
  static constexpr Scalar infinity = static_cast<Scalar>(__builtin_inff());
  static constexpr Scalar values[] = {0,
                                      static_cast<Scalar>(-0.0),
                                      1,
                                      -1,
                                      static_cast<Scalar>(0.5),
                                      static_cast<Scalar>(1.5),
                                      static_cast<Scalar>(2.5),
                                      static_cast<Scalar>(-3.5),
                                      static_cast<Scalar>(1.0 / 3),
                                      static_cast<Scalar>(-1e-3),
                                      static_cast<Scalar>(12345.678),
                                      static_cast<Scalar>(single ? 8388607.5 : 4503599627370495.5),
                                      static_cast<Scalar>(single ? 0x1p-126 : 0x1p-1022),
                                      static_cast<Scalar>(single ? 0x1.8p-140 : 0x1.8p-1060),
                                      static_cast<Scalar>(single ? -0x1.fffffep127 : -0x1.fffffffffffffp1023),
                                      infinity,
                                      -infinity,
                                      static_cast<Scalar>(__builtin_nanf(""))};
  static constexpr int count = sizeof(values) / sizeof(values[0]);
  static Scalar at(int n) { return values[n % count]; }
};

template <class S>
class Checks {
  using Scalar = typename S::Scalar;
  using Vector = typename S::Vector;
  using Mask = typename S::Mask;
  using Values = Numbers<Scalar>;
  static constexpr int lanes = S::lanes;

 public:
  // fused: whether fma rounds once.
  Checks(const CheckReport& report, bool fused) : report_(report), fused_(fused) {}

  void run() {
    arithmetic();
    comparisons();
    masks();
    powers();
    rows<Scalar>();
    rows<float>();
    halves();
    if constexpr (FloatVocabulary<S>) {
      bytes();
      rounding();
    }
    transposition();
    words();
    optional();
  }

 private:
  struct Lanes {
    Scalar x[lanes];
    Scalar operator[](int l) const { return x[l]; }
  };
  static Lanes stored(Vector v) {
    Lanes all;
    S::store(all.x, v);
    return all;
  }
  // Another number in each lane.
  static Lanes numbers(int first) {
    Lanes all;
    for (int l = 0; l < lanes; ++l) {
      all.x[l] = Values::at(first + l);
    }
    return all;
  }
  static Lanes chosen(Mask m) { return stored(S::select(m, S::set(1), S::zero())); }

  void expect(const char* operation, int lane, Scalar found, Scalar expected) {
    report_.compared(operation, lane, same(found, expected), static_cast<double>(found), static_cast<double>(expected));
  }
  void expect_bits(const char* operation, std::uint64_t found, std::uint64_t expected) {
    report_.compared(operation, 0, found == expected, static_cast<double>(found), static_cast<double>(expected));
  }
  template <class Expected>
  void expect_all(const char* operation, Vector found, const Expected& expected) {
    const Lanes all = stored(found);
    for (int l = 0; l < lanes; ++l) {
      expect(operation, l, all[l], expected(l));
    }
  }

  void arithmetic() {
    expect_all("zero", S::zero(), [](int) { return Scalar{0}; });
    for (int i = 0; i < Values::count; ++i) {
      const Lanes a = numbers(i);
      const Vector x = S::load(a.x);
      expect_all("load and store", x, [&](int l) { return a[l]; });
      expect_all("set", S::set(a[0]), [&](int) { return a[0]; });
      expect_all("abs", S::abs(x), [&](int l) {
        return sizeof(Scalar) == 4 ? static_cast<Scalar>(__builtin_fabsf(static_cast<float>(a[l])))
                                   : static_cast<Scalar>(__builtin_fabs(a[l]));
      });
      expect_all("round", S::round(x) + S::zero(), [&](int l) { return rounded(a[l]); });  // 0 may have either sign
      for (int j = 0; j < Values::count; ++j) {
        const Lanes b = numbers(j);
        const Vector y = S::load(b.x);
        expect_all("+", x + y, [&](int l) { return a[l] + b[l]; });
        expect_all("-", x - y, [&](int l) { return a[l] - b[l]; });
        expect_all("*", x * y, [&](int l) { return a[l] * b[l]; });
        expect_all("/", x / y, [&](int l) { return a[l] / b[l]; });
        expect_all("max", S::max(x, y), [&](int l) { return a[l] > b[l] ? a[l] : b[l]; });
        expect_all("min", S::min(x, y), [&](int l) { return a[l] < b[l] ? a[l] : b[l]; });
        const Lanes c = numbers(i + 3 * j + 1);
        const auto product = [&](int l) {
          volatile Scalar twice = a[l] * b[l];  // or the compiler might fuse it
          return !fused_ ? static_cast<Scalar>(twice + c[l]) : fused(a[l], b[l], c[l]);
        };
        expect_all("fma", S::fma(x, y, S::load(c.x)), product);
        expect("fma_scalar", 0, S::fma_scalar(a[0], b[0], c[0]), product(0));
      }
    }
  }
  static float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
  static double fused(double a, double b, double c) { return __builtin_fma(a, b, c); }
  // Ties to even; by whole numbers and their distance, not by the trick that a vocabulary may use.
  static Scalar rounded(Scalar x) {
    const Scalar size = x < 0 ? -x : x;
    if (!(size < (sizeof(Scalar) == 4 ? Scalar{0x1p23f} : static_cast<Scalar>(0x1p52)))) {
      return x;
    }
    const auto whole = static_cast<std::int64_t>(size);
    const Scalar rest = size - static_cast<Scalar>(whole);
    const bool up = rest > Scalar{0.5} || (rest == Scalar{0.5} && whole % 2 == 1);
    const auto result = static_cast<Scalar>(whole + (up ? 1 : 0));
    return (x < 0 ? -result : result) + Scalar{0};
  }

  void comparisons() {
    for (int i = 0; i < Values::count; ++i) {
      for (int j = 0; j < Values::count; ++j) {
        const Lanes a = numbers(i), b = numbers(j);
        const Vector x = S::load(a.x), y = S::load(b.x);
        const auto one_if = [](bool yes) { return yes ? Scalar{1} : Scalar{0}; };
        const auto all = [&](const char* operation, Mask m, const auto& holds) {
          const Lanes found = chosen(m);
          bool any = false;
          for (int l = 0; l < lanes; ++l) {
            expect(operation, l, found[l], one_if(holds(a[l], b[l])));
            any |= holds(a[l], b[l]);
          }
          expect_bits("any", S::any(m), any);
        };
        all("less", S::less(x, y), [](Scalar p, Scalar q) { return p < q; });
        all("less_equal", S::less_equal(x, y), [](Scalar p, Scalar q) { return p <= q; });
        all("not_less_equal", S::not_less_equal(x, y), [](Scalar p, Scalar q) { return !(p <= q); });
        all("equal", S::equal(x, y), [](Scalar p, Scalar q) { return p == q; });
        all("both", S::both(S::less_equal(x, y), S::less_equal(y, x)),
            [](Scalar p, Scalar q) { return p <= q && q <= p; });
        expect_all("select", S::select(S::less(x, y), x, y), [&](int l) { return a[l] < b[l] ? a[l] : b[l]; });
      }
    }
  }

  void masks() {
    for (std::uint64_t bits : {std::uint64_t{0}, ~std::uint64_t{0}, std::uint64_t{0x5a5a5a5a5a5a5a5a}, std::uint64_t{1},
                               std::uint64_t{1} << (lanes - 1), ~std::uint64_t{0} << lanes % 64}) {
      const Lanes found = chosen(S::mask_from_bits(bits));
      for (int l = 0; l < lanes; ++l) {
        expect("mask_from_bits", l, found[l], static_cast<Scalar>(bits >> l & 1));
      }
    }
  }

  // What common.h promises of every vocabulary: numbers near 1, and exponents whose product is 0, denormal or normal.
  void powers() {
    constexpr bool single = sizeof(Scalar) == 4;
    for (const Scalar a :
         {Scalar{1}, static_cast<Scalar>(1.4142135), static_cast<Scalar>(0.70710678), static_cast<Scalar>(1.0000001)}) {
      for (int n = single ? -166 : -1102; n < (single ? 88 : 944); ++n) {
        const Scalar expected = single ? static_cast<Scalar>(__builtin_ldexpf(static_cast<float>(a), n))
                                       : static_cast<Scalar>(__builtin_ldexp(a, n));
        expect("times_power_of_2", 0, stored(S::times_power_of_2(S::set(a), S::set(static_cast<Scalar>(n))))[lanes - 1],
               expected);
      }
    }
    const Scalar nan = stored(S::times_power_of_2(S::set(Values::at(Values::count - 1)), S::set(1)))[0];
    expect("times_power_of_2", 0, nan, Values::at(Values::count - 1));
  }

  // Rows that end where memory does: n elements are read, or written, and not one more.
  template <class In>
  void rows() {
    for (int n = 0; n <= lanes; ++n) {
      In* row = reinterpret_cast<In*>(report_.page_end) - n;
      for (int c = 0; c < n; ++c) {
        row[c] = static_cast<In>(0.25 * (c + 1));
      }
      expect_all("load_first", S::load_first(row, n),
                 [&](int l) { return l < n ? static_cast<Scalar>(row[l]) : Scalar{0}; });
      if constexpr (Stores<S, In>) {
        S::store_first(row, n, S::set(-7));
        In* inside = reinterpret_cast<In*>(report_.page_end) - 2 * lanes;
        for (int c = 0; c < 2 * lanes; ++c) {
          inside[c] = static_cast<In>(9);
        }
        S::store_first(inside, n, S::set(-7));
        for (int c = 0; c < lanes; ++c) {
          expect("store_first", c, static_cast<Scalar>(inside[c]), static_cast<Scalar>(c < n ? -7 : 9));
        }
      }
    }
  }

  // ---- Half types ----

  static double half_value(unsigned bits, int exponent_bits, int mantissa_bits) {
    const int bias = (1 << (exponent_bits - 1)) - 1;
    const int exponent = static_cast<int>(bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
    const double mantissa = static_cast<double>(bits & ((1u << mantissa_bits) - 1));
    const double sign = (bits >> (exponent_bits + mantissa_bits) & 1) != 0 ? -1 : 1;
    if (exponent == (1 << exponent_bits) - 1) {
      return mantissa == 0 ? sign * __builtin_inf() : __builtin_nan("");
    }
    const double size = exponent == 0
                            ? __builtin_ldexp(mantissa, 1 - bias - mantissa_bits)
                            : __builtin_ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
    return sign < 0 ? -size : size;
  }
  static double value_of(float16 x) { return half_value(x.bits, 5, 10); }
  static double value_of(bfloat16 x) { return half_value(x.bits, 8, 7); }
  static double value_of(int8 x) { return x.bits; }
  static double value_of(float8 x) {  // e4m3: no infinity, one NaN
    const double size = (x.bits & 0x7f) == 0x7f ? __builtin_nan("") : e4m3(x.bits & 0x7fu);
    return (x.bits & 0x80) != 0 ? -size : size;
  }
  static double e4m3(unsigned bits) {
    const int exponent = static_cast<int>(bits >> 3);
    const double mantissa = bits & 7;
    return exponent == 0 ? __builtin_ldexp(mantissa, -9) : __builtin_ldexp(mantissa + 8, exponent - 10);
  }

  template <class In, class Bits>
  void loads_of(const char* operation, int patterns) {
    for (int first = 0; first < patterns; first += lanes) {
      for (const int n : {lanes, lanes - 1}) {
        In* row = reinterpret_cast<In*>(report_.page_end) - n;
        for (int c = 0; c < n; ++c) {
          row[c].bits = static_cast<Bits>(first + c);
        }
        expect_all(operation, S::load_first(row, n),
                   [&](int l) { return l < n ? static_cast<Scalar>(value_of(row[l])) : Scalar{0}; });
      }
    }
  }
  void halves() {
    loads_of<float16, std::uint16_t>("load_first of float16", 1 << 16);
    loads_of<bfloat16, std::uint16_t>("load_first of bfloat16", 1 << 16);
  }
  void bytes() {
    loads_of<int8, std::int8_t>("load_first of int8", 1 << 8);
    loads_of<float8, std::uint8_t>("load_first of float8", 1 << 8);
  }

  // The nearest number with so many bits, ties to even: by the distance to a multiple of the last place, in double.
  static double nearest(float x, int mantissa_bits, int least_exponent, double limit) {
    if (x - x != 0 || x == 0) {
      return x;
    }
    int exponent = 0;
    __builtin_frexp(x, &exponent);  // |x| in [2^(exponent - 1), 2^exponent)
    const int last = exponent - 1 - mantissa_bits > least_exponent ? exponent - 1 - mantissa_bits : least_exponent;
    const double units = __builtin_ldexp(static_cast<double>(x), -last);
    const auto whole = static_cast<std::int64_t>(units < 0 ? -units : units);
    const double rest = (units < 0 ? -units : units) - static_cast<double>(whole);
    const bool up = rest > 0.5 || (rest == 0.5 && whole % 2 == 1);
    const double size = __builtin_ldexp(static_cast<double>(whole + (up ? 1 : 0)), last);
    return __builtin_copysign(size >= limit ? __builtin_inf() : size, x);
  }
  template <class Half>
  void store_rounded(const char* operation, float x, double expected) {
    Half row[lanes + 1];
    for (Half& half : row) {
      half.bits = 0x1234;
    }
    S::store_first(row, lanes, S::set(static_cast<Scalar>(x)));
    const double found = value_of(row[lanes - 1]);
    report_.compared(operation, 0, same(found, expected) && row[lanes].bits == 0x1234, found, expected);
  }
  void rounding() {
    for (unsigned n = 0; n < 1u << 16; n += 3) {
      for (const unsigned low : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0x1000u, 0x1001u, 0x0fffu, 0xf000u, 0xffffu}) {
        const auto x = bits_as<float>(n << 16 | low);
        store_rounded<bfloat16>("store_first of bfloat16", x, nearest(x, 7, -133, 0x1p128));
        store_rounded<float16>("store_first of float16", x, nearest(x, 10, -24, 0x1p16));
      }
    }
    for (unsigned n = 0; n < 0x7c00; ++n) {  // between neighbours
      const double x = half_value(n, 5, 10), next = half_value(n + 1, 5, 10);
      const auto middle = static_cast<float>(n + 1 == 0x7c00 ? 65520 : (x + next) / 2);
      store_rounded<float16>("store_first of float16", middle, nearest(middle, 10, -24, 0x1p16));
    }
    for (int n = 0; n <= lanes; ++n) {
      bfloat16 row[lanes];
      float16 other[lanes];
      for (int c = 0; c < lanes; ++c) {
        row[c].bits = other[c].bits = 0x1234;
      }
      S::store_first(row, n, S::set(1));
      S::store_first(other, n, S::set(1));
      for (int c = 0; c < lanes; ++c) {
        expect_bits("store_first of bfloat16", row[c].bits, c < n ? 0x3f80 : 0x1234);
        expect_bits("store_first of float16", other[c].bits, c < n ? 0x3c00 : 0x1234);
      }
    }
  }

  void transposition() {
    Vector rows[lanes];
    for (int r = 0; r < lanes; ++r) {
      Lanes row;
      for (int l = 0; l < lanes; ++l) {
        row.x[l] = static_cast<Scalar>(100 * r + l);
      }
      rows[r] = S::load(row.x);
    }
    S::transpose(rows);
    for (int r = 0; r < lanes; ++r) {
      expect_all("transpose", rows[r], [&](int l) { return static_cast<Scalar>(100 * l + r); });
    }
    if constexpr (SumsLanes<S>) {
      for (int r = 0; r < lanes; ++r) {
        rows[r] = S::set(static_cast<Scalar>(r + 1));
      }
      expect_all("lane_sums", S::lane_sums(rows), [](int l) { return static_cast<Scalar>((l + 1) * lanes); });
    }
  }

  // ---- Words ----

  struct Words {
    std::uint64_t word[S::word_lanes];
  };
  static Words stored_words(typename S::Words v) {
    static_assert(sizeof(v) == sizeof(Words));
    return bits_as<Words>(v);
  }
  static constexpr std::uint64_t low_bits = 0xffffffff;

  void words() {
    constexpr std::uint64_t starts[] = {0, 5, 0xfffffffd, 0x123456789abcdef0};
    for (const std::uint64_t start : starts) {
      const auto a = S::consecutive_words(start);
      const Words x = stored_words(a);
      for (const std::uint32_t factor : {0u, 1u, 0xD2511F53u, 0xffffffffu}) {
        const auto b = S::words(factor);
        const Words y = stored_words(b), product = stored_words(S::multiply_low_words(a, b));
        const Words high = stored_words(S::high_words(S::multiply_low_words(a, b)));
        const Words all = stored_words(S::exclusive_or(a, b, S::words(0x0f0f0f0fu)));
        for (int l = 0; l < S::word_lanes; ++l) {
          const std::uint64_t word = start + static_cast<std::uint64_t>(l);
          expect_bits("consecutive_words", x.word[l] & low_bits, word & low_bits);
          expect_bits("words", y.word[l] & low_bits, factor);
          expect_bits("multiply_low_words", product.word[l], (word & low_bits) * factor);
          expect_bits("high_words", high.word[l] & low_bits, (word & low_bits) * factor >> 32);
          expect_bits("exclusive_or", all.word[l] & low_bits, (word & low_bits) ^ factor ^ 0x0f0f0f0fu);
        }
      }
      for (const std::uint64_t limit :
           {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{6}, std::uint64_t{0x9abcdef2}, low_bits, low_bits + 1}) {
        std::uint64_t expected = 0, both = 0;
        for (int l = 0; l < S::word_lanes; ++l) {
          const bool enough = ((start + static_cast<std::uint64_t>(l)) & low_bits) >= limit;
          const bool ones_enough = 1 >= limit;
          expected |= static_cast<std::uint64_t>(enough) << l;
          both |= static_cast<std::uint64_t>(ones_enough) << (S::word_lanes + l);
        }
        expect_bits("low_words_at_least", S::low_words_at_least(a, limit), expected);
        if constexpr (ComparesTwoWords<S>) {
          expect_bits("low_words_at_least of two", S::low_words_at_least(a, S::words(1), limit), expected | both);
        }
      }
    }
  }

  // ---- What only some offer ----

  void optional() {
    if constexpr (FindsNonzeroBytes<S>) {
      for (int n = 0; n <= 64; ++n) {
        std::uint8_t* row = reinterpret_cast<std::uint8_t*>(report_.page_end) - n;
        std::uint64_t expected = 0;
        for (int c = 0; c < n; ++c) {
          row[c] = static_cast<std::uint8_t>(c % 3 == 0 ? 0 : c % 3 == 1 ? 1 : 0x80);
          expected |= static_cast<std::uint64_t>(row[c] != 0) << c;
        }
        expect_bits("nonzero_bytes", S::nonzero_bytes(row, n), expected);
      }
    }
    if constexpr (TransposesBits<S>) {
      std::uint64_t bits[64], from[64];
      std::uint64_t state = 1;
      for (int r = 0; r < 64; ++r) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        bits[r] = from[r] = r < S::lanes * S::panel_vectors ? state : 0;
      }
      S::transpose_bits(bits);
      for (int j = 0; j < 64; ++j) {
        std::uint64_t expected = 0;
        for (int r = 0; r < 64; ++r) {
          expected |= (from[r] >> j & 1) << r;
        }
        expect_bits("transpose_bits", bits[j], expected);
      }
    }
    if constexpr (LoadsAlternating<S>) {
      bfloat16 row[2 * lanes];
      for (int c = 0; c < 2 * lanes; ++c) {
        row[c].bits = static_cast<std::uint16_t>(0x3f80 + c);
      }
      Vector even, odd;
      S::load_alternating(row, even, odd);
      expect_all("load_alternating", even, [&](int l) { return static_cast<Scalar>(value_of(row[2 * l])); });
      expect_all("load_alternating", odd, [&](int l) { return static_cast<Scalar>(value_of(row[2 * l + 1])); });
      S::merge_alternating(even, odd);
      expect_all("merge_alternating", even, [&](int l) { return static_cast<Scalar>(value_of(row[l])); });
      expect_all("merge_alternating", odd, [&](int l) { return static_cast<Scalar>(value_of(row[lanes + l])); });
    }
    if constexpr (requires(Vector x) { S::fraction(x); }) {
      for (const float x : {0.0f, 0.25f, -0.25f, 3.75f, -3.75f, 100.5f, __builtin_inff()}) {
        const auto whole =
            static_cast<float>(static_cast<int>(x >= 0 || x == static_cast<float>(static_cast<int>(x)) ? x : x - 1));
        // + 0: a fraction of 0 may have either sign.
        expect("fraction", 0, stored(S::fraction(S::set(x)))[lanes - 1] + 0.0f, x > 1000 ? 0 : x - whole);
        if (x < 1000) {
          expect("times_whole_power_of_2", 0, stored(S::times_whole_power_of_2(S::set(1.5f), S::set(x)))[lanes - 1],
                 __builtin_ldexpf(1.5f, static_cast<int>(whole)));
        }
      }
    }
    if constexpr (requires { S::no_bits(); }) {
      looked_up_powers();
    }
  }

  // The index is in the last five bits of its number, all of whose bits, shifted by 18, are added to the power's.
  void looked_up_powers() {
    alignas(64) std::uint32_t powers[32];
    for (std::uint32_t k = 0; k < 32; ++k) {
      powers[k] = 0x3f800000u + (k << 16) - (k << 18);
    }
    for (std::uint32_t k = 0; k < 32; ++k) {
      const auto index = bits_as<float>(k);
      const float expected = 3.0f * bits_as<float>(0x3f800000u + (k << 16));
      expect("times_looked_up_power", 0, stored(S::times_looked_up_power(S::set(3), S::set(index), powers))[lanes - 1],
             expected);
    }
    const auto none = S::or_different_bits(S::no_bits(), S::set(5), S::set(5));
    expect_bits("or_different_bits of equal ones", S::any(S::any_bits_from(none, 0)), false);
    const auto some = S::or_different_bits(S::no_bits(), S::set(bits_as<float>(0x10u)), S::zero());
    expect_bits("any_bits_from", S::any(S::any_bits_from(some, 4)), true);
    expect_bits("any_bits_from", S::any(S::any_bits_from(some, 5)), false);
    const auto more = S::or_different_bits(some, S::set(bits_as<float>(0x20u)), S::zero());
    expect_bits("or_different_bits keeps", S::any(S::any_bits_from(more, 5)), true);
  }

  const CheckReport& report_;
  bool fused_;
};

}  // namespace
}  // namespace headway::cpu
