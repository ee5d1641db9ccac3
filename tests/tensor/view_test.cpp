// Views: shape functions move a pointer and strides, never the numbers.
#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <sstream>
#include <type_traits>
#include <vector>

#include "headway/attention.h"
#include "headway/tensor.h"
#include "support/array.h"

namespace headway::test {
namespace {

// 0, 1, 2, ... in row-major order.
Tensor counting(const Dims& sizes) {
  Tensor result(sizes, DType::f32);
  for (std::int64_t n = 0; n < result.elements(); ++n) result.as<float>()[n] = static_cast<float>(n);
  return result;
}

std::vector<float> values(ConstTensorView view) {
  std::vector<float> result;
  for (Real value : read(view).values) result.push_back(static_cast<float>(value));
  return result;
}

using List = std::vector<float>;

TEST(Views, transpose_and_permute) {
  const Tensor tensor = counting({2, 3});
  EXPECT_EQ(values(tensor.view().transpose(0, 1)), (List{0, 3, 1, 4, 2, 5}));
  EXPECT_EQ(tensor.view().transpose(0, 1).sizes(), (Dims{3, 2}));
  EXPECT_FALSE(tensor.view().transpose(0, 1).is_contiguous());
  const ConstTensorView permuted = counting({2, 3, 4}).view().permute({2, 0, 1});
  EXPECT_EQ(permuted.sizes(), (Dims{4, 2, 3}));
  EXPECT_EQ(permuted.strides(), (Dims{1, 12, 4}));
}

TEST(Views, select_and_slice) {
  const Tensor tensor = counting({3, 4});
  EXPECT_EQ(values(tensor.view().select(0, 1)), (List{4, 5, 6, 7}));
  EXPECT_EQ(values(tensor.view().select(1, 3)), (List{3, 7, 11}));
  EXPECT_EQ(values(tensor.view().slice(1, 1, 3)), (List{1, 2, 5, 6, 9, 10}));
  EXPECT_EQ(tensor.view().slice(0, 2, 2).elements(), 0);
}

TEST(Views, flip_reads_backwards) {
  const Tensor tensor = counting({2, 3});
  EXPECT_EQ(values(tensor.view().flip(1)), (List{2, 1, 0, 5, 4, 3}));
  EXPECT_EQ(values(tensor.view().flip(0).flip(1)), (List{5, 4, 3, 2, 1, 0}));
  EXPECT_EQ(tensor.view().flip(1).stride(1), -1);
  EXPECT_EQ(counting({0, 3}).view().flip(0).elements(), 0);
}

TEST(Views, unsqueeze_and_unflatten) {
  const Tensor tensor = counting({2, 6});
  EXPECT_EQ(tensor.view().unsqueeze(0).sizes(), (Dims{1, 2, 6}));
  EXPECT_EQ(tensor.view().unsqueeze(2).sizes(), (Dims{2, 6, 1}));
  const ConstTensorView heads = tensor.view().unflatten(1, {3, 2});
  EXPECT_EQ(heads.sizes(), (Dims{2, 3, 2}));
  EXPECT_EQ(values(heads.select(1, 1)), (List{2, 3, 8, 9}));
  EXPECT_EQ(values(tensor.view().transpose(0, 1).unflatten(0, {3, 2}).select(0, 2)), (List{4, 10, 5, 11}));
}

TEST(Views, expand_repeats_with_stride_zero) {
  const Tensor tensor = counting({2, 1});
  const ConstTensorView wide = tensor.view().expand({3, 2, 4});
  EXPECT_EQ(wide.strides(), (Dims{0, 1, 0}));
  EXPECT_EQ(values(wide.select(0, 2)), (List{0, 0, 0, 0, 1, 1, 1, 1}));
}

TEST(Views, of_owned_memory_write_through) {
  Tensor tensor = counting({2, 2});
  tensor.view().transpose(0, 1).at<float>({0, 1}) = 42;
  EXPECT_EQ(tensor.at<float>({1, 0}), 42);
}

TEST(Views, know_when_they_are_contiguous) {
  const Tensor tensor = counting({2, 1, 3});
  EXPECT_TRUE(tensor.view().is_contiguous());
  EXPECT_TRUE(ConstTensorView(tensor.as<float>(), {2, 1, 3}, {3, 99, 1}).is_contiguous()) << "an axis of size 1";
  EXPECT_FALSE(tensor.view().flip(2).is_contiguous());
  EXPECT_FALSE(tensor.view().slice(2, 0, 2).is_contiguous());
}

TEST(Views, refuse_axes_indices_and_sizes_that_are_not_there) {
  const Tensor tensor = counting({2, 6});
  const ConstTensorView view = tensor.view();
  EXPECT_THROW(view.transpose(0, 2), InvalidArgument);
  EXPECT_THROW(view.transpose(-3, 0), InvalidArgument);
  EXPECT_THROW(view.permute({0}), InvalidArgument);
  EXPECT_THROW(view.permute({1, 1}), InvalidArgument);
  EXPECT_THROW(view.select(0, 2), InvalidArgument);
  EXPECT_THROW(view.select(0, -1), InvalidArgument);
  EXPECT_THROW(view.select(2, 0), InvalidArgument);
  EXPECT_THROW(view.slice(1, 3, 2), InvalidArgument);
  EXPECT_THROW(view.slice(1, 0, 7), InvalidArgument);
  EXPECT_THROW(view.slice(1, -1, 3), InvalidArgument);
  EXPECT_THROW(view.flip(2), InvalidArgument);
  EXPECT_THROW(view.unsqueeze(4), InvalidArgument);
  EXPECT_THROW(view.unflatten(1, {4, 2}), InvalidArgument);
  EXPECT_THROW(view.expand({3, 6}), InvalidArgument);
  EXPECT_THROW(view.expand({6}), InvalidArgument);
  EXPECT_THROW(ConstTensorView(tensor.as<float>(), {2, 6}, {1}), InvalidArgument);
}

TEST(Views, whose_elements_lie_further_apart_than_memory_reaches_are_refused) {
  constexpr std::int64_t highest = std::numeric_limits<std::int64_t>::max();
  constexpr std::int64_t lowest = std::numeric_limits<std::int64_t>::min();
  const Tensor tensor = counting({2, 6});
  for (const Dims& strides : {Dims{highest, 1}, Dims{lowest, 1}, Dims{highest / 4 + 1, 1}, Dims{1, highest / 5},
                              Dims{highest / 8, -highest / 20}, Dims{lowest / 4, lowest / 4}}) {
    EXPECT_THROW(ConstTensorView(tensor.as<float>(), {2, 6}, strides), InvalidArgument) << strides;
  }
  EXPECT_NO_THROW(ConstTensorView(tensor.as<float>(), {2, 6}, {highest / 8, 1}));
}

// An axis of size 1 has no use for its stride, and an empty view for none.
TEST(Views, take_strides_that_are_never_used_whatever_they_are) {
  for (const std::int64_t stride :
       {std::numeric_limits<std::int64_t>::max(), std::numeric_limits<std::int64_t>::min()}) {
    const Tensor tensor = counting({6});
    const ConstTensorView one(tensor.as<float>(), {1, 6}, {stride, 1});
    EXPECT_EQ(values(one.flip(0)), values(tensor));
    EXPECT_EQ(values(one.select(0, 0)), values(tensor));
    EXPECT_EQ(values(one.slice(0, 0, 1).unflatten(0, {1, 1})), values(tensor));
    const ConstTensorView none(tensor.as<float>(), {0, 6, 7}, {stride, stride, stride});
    EXPECT_EQ(none.flip(1).select(1, 5).slice(1, 3, 7).elements(), 0);
    EXPECT_EQ(none.unflatten(1, {2, 3}).elements(), 0);
  }
}

TEST(Views, print_their_sizes_as_tuples) {
  std::ostringstream text;
  text << Dims{2, 3, 4} << ' ' << Device{} << ' ' << Device{DeviceType::cuda, 1};
  EXPECT_EQ(text.str(), "(2, 3, 4) cpu cuda:1");
}

TEST(Views, of_ranges_have_as_many_elements_as_the_range) {
  std::vector<float> vector = {1, 2, 3, 4, 5, 6};
  const std::array<double, 2> array = {7, 8};
  const TensorView view(vector, {2, 3});
  view.at<float>({1, 2}) = 9;
  EXPECT_EQ(vector[5], 9);
  EXPECT_EQ(ConstTensorView(array, {2}).at<double>({1}), 8);
  EXPECT_EQ(ConstTensorView(std::span(vector).first(2), {2}).at<float>({1}), 2);
  EXPECT_THROW(TensorView(vector, {2, 2}), InvalidArgument);
  EXPECT_THROW(TensorView(vector, {7}), InvalidArgument);
  static_assert(!std::is_constructible_v<TensorView, const std::vector<float>&, Dims>);
  static_assert(!std::is_constructible_v<ConstTensorView, std::vector<float>, Dims>);  // it would be gone
  static_assert(!std::is_constructible_v<ConstTensorView, std::vector<bool>&, Dims>);
}

TEST(Views, of_bytes_are_bools) {
  const std::vector<std::uint8_t> bytes = {0, 1, 255, 2};
  const std::vector<std::byte> standard_bytes(4, std::byte{1});
  const char characters[2] = {0, 1};
  EXPECT_EQ(ConstTensorView(bytes, {4}).dtype(), DType::b8);
  EXPECT_EQ(ConstTensorView(standard_bytes, {2, 2}).dtype(), DType::b8);
  EXPECT_EQ(ConstTensorView(characters, {2}).dtype(), DType::b8);
  const Tensor ones = convert(Tensor::of<float>({4, 1}, {1, 2, 3, 4}), DType::f32);
  const Tensor out = attention(Tensor({1, 1}), Tensor({4, 1}), ones, {.mask = ConstTensorView(bytes, {1, 4})});
  EXPECT_FLOAT_EQ(out.at<float>({0, 0}), 3);  // the mean of what is not forbidden: 2, 3, 4
}

}  // namespace
}  // namespace headway::test
