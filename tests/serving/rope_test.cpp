// RoPE against its formula in long double, over types, layouts, scalings and strides.
#include "headway/rope.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numbers>

#include "serving_support.h"

namespace headway::test {
namespace {

// The definition, from the header's text alone; frequencies as given.
Array expected_rope(const Array& x, const std::vector<std::vector<std::int64_t>>& positions, std::int64_t dims,
                    bool interleaved, const RopeFrequencies& found, bool back) {
  Array result = x;  // [B,H,S,D]
  const std::int64_t half = dims / 2;
  each_index(x.sizes(), [&](const Dims& at) {
    if (at[3] >= half) {
      return;
    }
    const std::int64_t n = at[3], first = interleaved ? 2 * n : n, second = interleaved ? 2 * n + 1 : n + half;
    const auto& row = positions[positions.size() == 1 ? 0 : static_cast<std::size_t>(at[0])];
    Real angle = static_cast<Real>(row[static_cast<std::size_t>(at[2])]) *
                 static_cast<Real>(found.frequencies[static_cast<std::size_t>(n)]);
    angle = back ? -angle : angle;
    const Real c = std::cos(angle) * found.attention_factor, s = std::sin(angle) * found.attention_factor;
    const Real a = x(at[0], at[1], at[2], first), b = x(at[0], at[1], at[2], second);
    result(at[0], at[1], at[2], first) = a * c - b * s;
    result(at[0], at[1], at[2], second) = b * c + a * s;
  });
  return result;
}

Real unit_of(DType dtype) {
  switch (dtype) {
    case DType::f64: return 0x1p-53L;
    case DType::bf16: return 0x1p-8L;
    case DType::f16: return 0x1p-11L;
    default: return 0x1p-24L;
  }
}

// Two products and their sum in float32 (float64), one rounding to the type; the angle is a float64.
void expect_near(ConstTensorView found, const Array& expected, const Array& x, Real largest_angle) {
  const Real unit = unit_of(found.dtype()), work = found.dtype() == DType::f64 ? 0x1p-53L : 0x1p-24L;
  each_index(expected.sizes(), [&](const Dims& at) {
    Real scale = 0;
    for (std::int64_t d = 0; d < x.size(3); ++d) {
      scale = std::max(scale, std::fabs(x(at[0], at[1], at[2], d)));
    }
    const Real wanted = expected(at[0], at[1], at[2], at[3]);
    const Real bound = std::fabs(wanted) * unit + 2 * scale * (4 * work + largest_angle * 0x1p-52L);
    ASSERT_LE(std::fabs(static_cast<Real>(get(found, at)) - wanted), bound + 1e-7L * (found.dtype() == DType::f16));
  });
}

TEST(Rope, rotates_pairs_as_the_definition_says_in_every_type_and_layout) {
  for (const DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16}) {
    for (const bool interleaved : {false, true}) {
      for (const std::int64_t dims : {0, 4, 16}) {
        const RopeConfig config{.base = 500.0, .dims = dims, .interleaved = interleaved};
        const Tensor x = random_tensor({2, 3, 37, 16}, dtype, 1);
        std::vector<std::vector<std::int64_t>> positions(2);
        std::vector<std::int64_t> flat;
        for (int b = 0; b < 2; ++b) {
          for (int s = 0; s < 37; ++s) {
            positions[static_cast<std::size_t>(b)].push_back(b == 0 ? 5 * s : 1000 - s);
            flat.push_back(positions[static_cast<std::size_t>(b)].back());
          }
        }
        const Tensor found = rope(x, Tensor::of({2, 37}, flat), config);
        const Array numbers = read(x);
        expect_near(found, expected_rope(numbers, positions, dims, interleaved, rope_frequencies(16, config), false),
                    numbers, 1000);
        const Tensor back = rope_backward(x, Tensor::of({2, 37}, flat), config);
        expect_near(back, expected_rope(numbers, positions, dims, interleaved, rope_frequencies(16, config), true),
                    numbers, 1000);
      }
    }
  }
}

TEST(Rope, far_positions_keep_their_angle) {
  const Tensor x = Tensor::of<float>({1, 2}, {1, 0});
  const std::int64_t far = std::int64_t{1} << 40;
  const Tensor y = rope(x, Tensor::of<std::int64_t>({1}, {far}));
  EXPECT_FLOAT_EQ(y.at<float>({0, 0}), static_cast<float>(std::cos(static_cast<double>(far))));
  EXPECT_FLOAT_EQ(y.at<float>({0, 1}), static_cast<float>(std::sin(static_cast<double>(far))));
}

TEST(Rope, strides_places_and_threads_change_no_bit) {
  const Tensor x = random_tensor({2, 5, 200, 64}, DType::f32, 2);
  std::vector<std::int32_t> places(200);
  for (int s = 0; s < 200; ++s) {
    places[static_cast<std::size_t>(s)] = 3 * s;
  }
  const Tensor positions = Tensor::of({200}, places);
  const Tensor expected = rope(x, positions);
  Tensor in_place = x.clone();
  rope(in_place, positions, in_place);
  EXPECT_TRUE(same_bits(in_place, expected));
  Tensor swapped({200, 64, 2, 5}, DType::f32), out({64, 200, 5, 2}, DType::f32);
  copy(x, swapped.view().permute({2, 3, 0, 1}));
  rope(swapped.view().permute({2, 3, 0, 1}), positions, out.view().permute({3, 2, 1, 0}));
  EXPECT_TRUE(same_bits(out.view().permute({3, 2, 1, 0}), expected));
  const int threads = get_threads();
  set_threads(1);
  EXPECT_TRUE(same_bits(rope(x, positions), expected));
  set_threads(threads);
  const Tensor one_row = rope(x.view().slice(2, 77, 78), positions.view().slice(0, 77, 78));
  EXPECT_TRUE(same_bits(one_row, expected.view().slice(2, 77, 78)));
}

TEST(Rope, scalings_divide_low_frequencies_and_keep_high_ones) {
  const RopeConfig yarn{.base = 10000, .scaling = RopeScaling::yarn, .factor = 4, .original_length = 4096};
  const RopeConfig llama{.base = 500000, .scaling = RopeScaling::llama3, .factor = 8, .original_length = 8192};
  for (const RopeConfig& config : {yarn, llama}) {
    const std::vector<double> scaled = rope_frequencies(128, config).frequencies;
    const std::vector<double> plain = rope_frequencies(128, {.base = config.base}).frequencies;
    ASSERT_EQ(scaled.size(), 64u);
    EXPECT_DOUBLE_EQ(scaled[0], plain[0]);
    EXPECT_DOUBLE_EQ(scaled[63], plain[63] / config.factor);
    for (std::size_t n = 1; n < 64; ++n) {
      EXPECT_LT(scaled[n], scaled[n - 1]);
    }
  }
  EXPECT_DOUBLE_EQ(rope_frequencies(128, yarn).attention_factor, 0.1 * std::log(4.0) + 1);
  EXPECT_DOUBLE_EQ(rope_frequencies(8, {.scaling = RopeScaling::linear, .factor = 3}).frequencies[1], 0.1 / 3);
  // Twice the length with factor 2: base * 3^(8/6).
  const RopeConfig dynamic{.scaling = RopeScaling::dynamic, .factor = 2, .original_length = 100, .length = 200};
  EXPECT_DOUBLE_EQ(rope_frequencies(8, dynamic).frequencies[1], std::pow(10000 * std::pow(3.0, 8.0 / 6), -0.25));
}

TEST(Rope, errors_say_what_was_expected_and_found) {
  const Tensor x({2, 4, 6}), positions = Tensor::of<std::int64_t>({4}, {0, 1, 2, 3});
  const auto refused = [&](const RopeConfig& config) {
    return error_text<InvalidArgument>([&] { rope(x, positions, config); });
  };
  EXPECT_EQ(refused({.dims = 3}), "rope: expected dims even and at most the head_dim 6, found 3");
  EXPECT_EQ(refused({.dims = 8}), "rope: expected dims even and at most the head_dim 6, found 8");
  EXPECT_EQ(refused({.base = 0}), "rope: expected a finite base above 0, found 0");
  EXPECT_EQ(refused({.scaling = RopeScaling::linear, .factor = -1}),
            "rope: expected a finite factor above 0, found -1");
  EXPECT_EQ(refused({.scaling = RopeScaling::yarn}),
            "rope: the scaling needs original_length (original_max_position_embeddings), found none");
  EXPECT_EQ(refused({.scaling = RopeScaling::dynamic}),
            "rope: dynamic scaling depends on the length of the text: expected length, found none");
  EXPECT_EQ(refused({.scaling = RopeScaling::llama3, .original_length = 10, .low_freq_factor = 4}),
            "rope: expected high_freq_factor above low_freq_factor 4, found 4");
  const auto text_of = [](auto&& action) { return error_text<InvalidArgument>(action); };
  EXPECT_EQ(text_of([&] {
              rope(x, Tensor::of<std::int64_t>({3}, {0, 1, 2}));
            }),
            "rope: positions has shape (3,), expected (4,) or (2, 4) for x (2, 4, 6)");
  EXPECT_EQ(text_of([&] { rope(Tensor({6}), positions); }), "rope: x has shape (6,), expected (..., S, D)");
  Tensor out({2, 4, 8});
  EXPECT_EQ(text_of([&] { rope(x, positions, out); }), "rope: out has shape (2, 4, 8), x has (2, 4, 6)");
  EXPECT_EQ(text_of([&] { rope(out.view().slice(2, 0, 6), positions, out.view().slice(2, 2, 8)); }),
            "rope: out overlaps an input in memory");
  EXPECT_EQ(error_text<TypeMismatch>([&] { rope(x, Tensor({4})); }),
            "rope: positions has type f32, expected integers (i32 or i64)");
  EXPECT_EQ(error_text<TypeMismatch>([&] {
              rope(Tensor({4, 6}, DType::i32), positions);
            }),
            "rope: x has type i32, expected f32, f64, bf16 or f16");
}

TEST(Rope, empty_arrays_are_legal) {
  EXPECT_EQ(rope(Tensor({3, 0, 8}), Tensor({0}, DType::i64)).sizes(), (Dims{3, 0, 8}));
  EXPECT_EQ(rope(Tensor({0, 2, 8}), Tensor({0, 2}, DType::i64)).sizes(), (Dims{0, 2, 8}));
  EXPECT_EQ(rope(Tensor({2, 0}), Tensor({2}, DType::i64)).sizes(), (Dims{2, 0}));
}

}  // namespace
}  // namespace headway::test
