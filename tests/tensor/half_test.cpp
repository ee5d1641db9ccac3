// The two half types: every pattern to float, and to a half from every value where rounding decides.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "headway/dtype.h"

namespace headway {
namespace {

struct Format {
  int exponent_bits, fraction_bits;

  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  int largest_exponent() const { return (1 << exponent_bits) - 1; }

  // The value of a pattern from the definition of a binary interchange format.
  double decode(std::uint16_t bits) const {
    const int exponent = (bits >> fraction_bits) & largest_exponent();
    const int fraction = bits & ((1 << fraction_bits) - 1);
    const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
    if (exponent == largest_exponent())
      return fraction == 0 ? sign * std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN();
    if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias() - fraction_bits);
    return sign * std::ldexp(fraction + (1 << fraction_bits), exponent - bias() - fraction_bits);
  }

  // The nearest pattern to a finite value, by search among the neighbours; ties go to the even pattern.
  std::uint16_t nearest(double value) const {
    const auto infinity = static_cast<std::uint16_t>(largest_exponent() << fraction_bits);
    const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    const double size = std::abs(value);
    std::uint16_t below = 0, above = infinity;  // decode(below) <= size < decode(above)
    while (above - below > 1) {
      const auto middle = static_cast<std::uint16_t>((above + below) / 2);
      (decode(middle) <= size ? below : above) = middle;
    }
    // Past the largest finite number the next one would be 2^(largest exponent - bias).
    const double next = above == infinity ? std::ldexp(1.0, largest_exponent() - bias()) : decode(above);
    const double to_below = size - decode(below), to_above = next - size;
    const bool up = to_above < to_below || (to_above == to_below && below % 2 == 1);
    return static_cast<std::uint16_t>(sign | (up ? above : below));
  }
};

template <class Half>
struct FormatOf;
template <>
struct FormatOf<float16> {
  static constexpr Format format{5, 10};
};
template <>
struct FormatOf<bfloat16> {
  static constexpr Format format{8, 7};
};

template <class Half>
class HalfTypes : public testing::Test {
 protected:
  static constexpr Format format = FormatOf<Half>::format;

  static bool is_nan(std::uint16_t bits) { return std::isnan(format.decode(bits)); }
  static std::uint16_t from_float(float value) { return Half(value).bits; }
  static std::uint16_t from_double(double value) { return Half(value).bits; }
};
using Halves = testing::Types<float16, bfloat16>;
TYPED_TEST_SUITE(HalfTypes, Halves);

TYPED_TEST(HalfTypes, every_pattern_has_its_value) {
  for (int bits = 0; bits < 65536; ++bits) {
    const auto pattern = static_cast<std::uint16_t>(bits);
    const TypeParam half = TypeParam::from_bits(pattern);
    const double exact = this->format.decode(pattern);
    const auto value = static_cast<float>(half);
    if (std::isnan(exact)) {
      ASSERT_TRUE(std::isnan(value) && std::isnan(static_cast<double>(half))) << bits;
      ASSERT_EQ(std::signbit(value), bits >= 0x8000) << bits;
    } else {
      ASSERT_EQ(static_cast<double>(value), exact) << bits;
      ASSERT_EQ(static_cast<double>(half), exact) << bits;
      ASSERT_EQ(std::signbit(value), bits >= 0x8000) << bits;
    }
  }
}

TYPED_TEST(HalfTypes, every_pattern_survives_the_way_to_float_and_double_and_back) {
  for (int bits = 0; bits < 65536; ++bits) {
    const auto pattern = static_cast<std::uint16_t>(bits);
    const TypeParam half = TypeParam::from_bits(pattern);
    const std::uint16_t back = this->from_float(static_cast<float>(half));
    const std::uint16_t back_from_double = this->from_double(static_cast<double>(half));
    if (this->is_nan(pattern)) {
      // A quiet NaN of the same sign.
      for (std::uint16_t one : {back, back_from_double}) {
        ASSERT_TRUE(this->is_nan(one)) << bits;
        ASSERT_EQ(one & 0x8000, bits & 0x8000) << bits;
        ASSERT_NE(one & (1 << (this->format.fraction_bits - 1)), 0) << bits;
      }
    } else {
      ASSERT_EQ(back, pattern);
      ASSERT_EQ(back_from_double, pattern);
    }
  }
}

TYPED_TEST(HalfTypes, round_to_nearest_even_on_both_sides_of_every_midpoint) {
  const int finite = this->format.largest_exponent() << this->format.fraction_bits;
  for (int bits = 0; bits < finite; ++bits) {
    const double low = this->format.decode(static_cast<std::uint16_t>(bits));
    const double high = bits + 1 < finite ? this->format.decode(static_cast<std::uint16_t>(bits + 1))
                                          : std::ldexp(1.0, this->format.largest_exponent() - this->format.bias());
    const double middle = low + (high - low) / 2;
    for (double sign : {1.0, -1.0}) {
      for (double value : {middle, std::nextafter(middle, low), std::nextafter(middle, high)})
        ASSERT_EQ(this->from_double(sign * value), this->format.nearest(sign * value)) << bits << ' ' << value;
      const auto middle_float = static_cast<float>(middle);
      for (float value : {middle_float, std::nextafterf(middle_float, 0.0f), std::nextafterf(middle_float, INFINITY)}) {
        if (std::isinf(value)) continue;
        ASSERT_EQ(this->from_float(static_cast<float>(sign) * value),
                  this->format.nearest(sign * static_cast<double>(value)))
            << bits << ' ' << value;
      }
    }
  }
}

// A double just above a midpoint becomes the midpoint as a float, from where ties-to-even goes down.
TYPED_TEST(HalfTypes, a_double_is_rounded_once) {
  const double middle = 1 + std::ldexp(0.5, -this->format.fraction_bits);
  const double above = middle + 0x1p-40;
  ASSERT_EQ(static_cast<double>(static_cast<float>(above)), middle)
      << "the test needs a value that float cannot tell apart";
  EXPECT_EQ(static_cast<double>(TypeParam(middle)), 1.0);
  EXPECT_EQ(static_cast<double>(TypeParam(above)), 1 + std::ldexp(1.0, -this->format.fraction_bits));
  // The same among the denormals, and where float itself has denormals.
  const double smallest = this->format.decode(1);
  EXPECT_EQ(this->from_double(smallest / 2), 0);
  EXPECT_EQ(this->from_double(std::nextafter(smallest / 2, 1.0)), 1);
  EXPECT_EQ(this->from_double(-std::nextafter(smallest / 2, 1.0)), 0x8001);
  EXPECT_EQ(this->from_double(1e-300), 0);
  EXPECT_EQ(this->from_double(-1e-300), 0x8000);
}

TYPED_TEST(HalfTypes, overflow_to_infinity_and_keep_signed_zero) {
  const auto infinity = static_cast<std::uint16_t>(this->format.largest_exponent() << this->format.fraction_bits);
  EXPECT_EQ(this->from_double(1e300), infinity);
  EXPECT_EQ(this->from_double(-1e300), infinity | 0x8000);
  EXPECT_EQ(this->from_float(std::numeric_limits<float>::max()), infinity);
  EXPECT_EQ(this->from_float(INFINITY), infinity);
  EXPECT_EQ(this->from_double(-INFINITY), infinity | 0x8000);
  EXPECT_EQ(this->from_float(-0.0f), 0x8000);
  EXPECT_EQ(this->from_double(-0.0), 0x8000);
}

TYPED_TEST(HalfTypes, random_values_round_to_the_nearest) {
  std::mt19937_64 random(1);
  std::uniform_real_distribution<double> fraction(-1, 1);
  std::uniform_int_distribution<int> exponent(-140, 130);
  for (int n = 0; n < 200000; ++n) {
    const double value = std::ldexp(fraction(random), exponent(random));
    ASSERT_EQ(this->from_double(value), this->format.nearest(value)) << value;
    const auto single = static_cast<float>(value);
    if (std::isfinite(single)) {
      ASSERT_EQ(this->from_float(single), this->format.nearest(static_cast<double>(single))) << single;
    }
  }
}

TEST(DTypes, have_names_and_sizes) {
  EXPECT_STREQ(name(DType::f32), "f32");
  EXPECT_STREQ(name(DType::f64), "f64");
  EXPECT_STREQ(name(DType::bf16), "bf16");
  EXPECT_STREQ(name(DType::f16), "f16");
  EXPECT_STREQ(name(DType::b8), "bool");
  EXPECT_STREQ(name(DType::i32), "i32");
  EXPECT_STREQ(name(DType::i64), "i64");
  EXPECT_EQ(size_of(DType::f32), 4u);
  EXPECT_EQ(size_of(DType::f64), 8u);
  EXPECT_EQ(size_of(DType::bf16), 2u);
  EXPECT_EQ(size_of(DType::f16), 2u);
  EXPECT_EQ(size_of(DType::b8), 1u);
  EXPECT_EQ(size_of(DType::i32), 4u);
  EXPECT_EQ(size_of(DType::i64), 8u);
}

}  // namespace
}  // namespace headway
