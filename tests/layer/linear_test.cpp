// The linear map in plain loops: exact sums, one rounding, any strides.
#include "engines/reference/linear.h"

#include "layer_support.h"

namespace headway::test {
namespace {

TEST(Linear, is_x_times_w_plus_b) {
  const Tensor x = Tensor::of<float>({1, 2, 2}, {1, 2, 3, 4});
  const Tensor weight = Tensor::of<float>({2, 3}, {1, 0, 2, 0, 1, 3});
  const Tensor bias = Tensor::of<float>({3}, {10, 20, 30});
  Tensor y({1, 2, 3});
  reference::linear(x, weight, ConstTensorView(bias), y);
  EXPECT_EQ(numbers(y), (std::vector<double>{11, 22, 38, 13, 24, 48}));
  reference::linear(x, weight, std::nullopt, y);
  EXPECT_EQ(numbers(y), (std::vector<double>{1, 2, 8, 3, 4, 18}));
}

TEST(Linear, gradients_are_the_transposed_products) {
  const Tensor x = Tensor::of<float>({1, 2, 2}, {1, 2, 3, 4});
  const Tensor weight = Tensor::of<float>({2, 3}, {1, 0, 2, 0, 1, 3});
  const Tensor dy = Tensor::of<float>({1, 2, 3}, {1, 1, 1, 2, 0, -1});
  Tensor dx({1, 2, 2}), dweight({2, 3}), dbias({3});
  reference::linear_backward(dy, x, weight, {.dx = dx, .dweight = dweight, .dbias = dbias});
  EXPECT_EQ(numbers(dx), (std::vector<double>{3, 4, 0, -3}));
  EXPECT_EQ(numbers(dweight), (std::vector<double>{7, 1, -2, 10, 2, -2}));
  EXPECT_EQ(numbers(dbias), (std::vector<double>{3, 1, 0}));
}

TEST(Linear, sums_in_float64_and_rounds_once) {
  // 1 + 2^-30 - 1: lost in f32 sums, kept in float64.
  const Tensor x = Tensor::of<float>({1, 1, 3}, {1.0f, 0x1p-30f, -1.0f});
  const Tensor ones = Tensor::of<float>({3, 1}, {1, 1, 1});
  Tensor y({1, 1, 1});
  reference::linear(x, ones, std::nullopt, y);
  EXPECT_EQ(y.at<float>({0, 0, 0}), 0x1p-30f);
  // 2049 * 1 is no f16 number; ties go to even: 2048 + 1 -> 2048, 2048 + 3 -> 2052.
  const Tensor half_x = convert(Tensor::of<float>({1, 2, 2}, {2048, 1, 2048, 3}), DType::f16);
  const Tensor half_ones = convert(Tensor::of<float>({2, 1}, {1, 1}), DType::f16);
  Tensor half_y({1, 2, 1}, DType::f16);
  reference::linear(half_x, half_ones, std::nullopt, half_y);
  EXPECT_EQ(numbers(half_y), (std::vector<double>{2048, 2052}));
}

TEST(Linear, reads_and_writes_any_strides) {
  for (const DType dtype : float_types) {
    const Tensor x = random_tensor({2, 3, 4}, dtype, 1), weight = random_tensor({4, 5}, dtype, 2);
    const Tensor bias = random_tensor({5}, dtype, 3), dy = random_tensor({2, 3, 5}, dtype, 4);
    Tensor y({2, 3, 5}, dtype), dx({2, 3, 4}, dtype), dweight({4, 5}, dtype), dbias({5}, dtype);
    reference::linear(x, weight, ConstTensorView(bias), y);
    reference::linear_backward(dy, x, weight, {.dx = dx, .dweight = dweight, .dbias = dbias});

    // The same tensors stored with their axes in reverse order.
    Tensor sx({4, 3, 2}, dtype), sweight({5, 4}, dtype), sdy({5, 3, 2}, dtype), sbias({5, 2}, dtype);
    Tensor sy({5, 3, 2}, dtype), sdx({4, 3, 2}, dtype), sdweight({5, 4}, dtype), sdbias({5, 2}, dtype);
    const auto reversed = [](Tensor& t) { return t.rank() == 3 ? t.view().transpose(0, 2) : t.view().transpose(0, 1); };
    copy(x, reversed(sx));
    copy(weight, reversed(sweight));
    copy(dy, reversed(sdy));
    copy(bias, sbias.view().select(1, 1));
    reference::linear(reversed(sx), reversed(sweight), ConstTensorView(sbias.view().select(1, 1)), reversed(sy));
    reference::linear_backward(
        reversed(sdy), reversed(sx), reversed(sweight),
        {.dx = reversed(sdx), .dweight = reversed(sdweight), .dbias = sdbias.view().select(1, 0)});
    EXPECT_TRUE(same_bits(reversed(sy), y));
    EXPECT_TRUE(same_bits(reversed(sdx), dx));
    EXPECT_TRUE(same_bits(reversed(sdweight), dweight));
    EXPECT_TRUE(same_bits(sdbias.view().select(1, 0), dbias));
  }
}

TEST(Linear, rows_without_a_gradient_add_nothing_even_if_they_hold_nan) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const Tensor x = Tensor::of<float>({1, 2, 1}, {nan, 3});
  const Tensor weight = Tensor::of<float>({1, 2}, {1, 1});
  const Tensor dy = Tensor::of<float>({1, 2, 2}, {0, 0, 1, 2});
  Tensor dweight({1, 2});
  reference::linear_backward(dy, x, weight, {.dweight = dweight});
  EXPECT_EQ(numbers(dweight), (std::vector<double>{3, 6}));
}

TEST(Linear, a_huge_batch_of_empty_sequences_is_no_work) {
  const Dims sizes{std::int64_t{1} << 60, 0, 2};
  const Tensor x(sizes), weight({2, 2});
  Tensor y(sizes), dweight = random_tensor({2, 2}, DType::f32, 1);
  reference::linear(x, weight, std::nullopt, y);
  reference::linear_backward(y, x, weight, {.dweight = dweight});
  EXPECT_EQ(numbers(dweight), std::vector<double>(4, 0.0));
}

}  // namespace
}  // namespace headway::test
