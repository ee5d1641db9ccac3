// Tensor: memory, values, copies and the sizes that it refuses.
#include "headway/tensor.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <sstream>
#include <type_traits>
#include <vector>

#include "headway/attention.h"
#include "support/array.h"

// Under the address sanitizer an impossible allocation fails as it does without it, instead of ending the test.
extern "C" const char* __asan_default_options() { return "allocator_may_return_null=1"; }

namespace headway::test {
namespace {

constexpr std::int64_t two_to(int power) { return std::int64_t{1} << power; }

TEST(Tensors, are_aligned_to_64_bytes_and_zero) {
  for (std::int64_t size : {1, 3, 17, 1000}) {
    const Tensor tensor({size, 3}, DType::f16);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(tensor.data()) % 64, 0u);
    for (Real value : read(tensor).values) EXPECT_EQ(value, 0);
  }
}

TEST(Tensors, take_their_values_in_row_major_order) {
  const Tensor tensor = Tensor::of<std::int32_t>({2, 3}, {1, 2, 3, 4, 5, 6});
  EXPECT_EQ(tensor.at<std::int32_t>({0, 2}), 3);
  EXPECT_EQ(tensor.at<std::int32_t>({1, 0}), 4);
  EXPECT_THROW(Tensor::of<float>({2, 2}, {1, 2, 3}), InvalidArgument);
}

TEST(Tensors, are_copied_by_clone_only) {
  Tensor tensor = Tensor::of<float>({2}, {1, 2});
  const Tensor copy_of_it = tensor.clone();
  tensor.at<float>({0}) = 5;
  EXPECT_EQ(copy_of_it.at<float>({0}), 1);
  const void* memory = tensor.data();
  const Tensor moved = std::move(tensor);
  EXPECT_EQ(moved.data(), memory);
  EXPECT_EQ(moved.at<float>({0}), 5);
}

TEST(Tensors, of_another_type_cannot_be_read_as_this_one) {
  const Tensor tensor({2}, DType::f64);
  EXPECT_THROW(tensor.as<float>(), TypeMismatch);
  EXPECT_THROW(tensor.at<std::int64_t>({0}), TypeMismatch);
  try {
    tensor.as<float16>();
    FAIL();
  } catch (const TypeMismatch& error) {
    EXPECT_NE(std::string(error.what()).find("f64"), std::string::npos);
    EXPECT_NE(std::string(error.what()).find("f16"), std::string::npos);
  }
}

TEST(Tensors, may_be_empty) {
  const Tensor none, flat({0, 5}, DType::bf16);
  EXPECT_EQ(none.elements(), 0);
  EXPECT_EQ(flat.elements(), 0);
  EXPECT_EQ(flat.size(1), 5);
}

TEST(Tensors, without_axes_hold_one_number) {
  const Tensor scalar = Tensor::of<double>(Dims{}, {2.5});
  EXPECT_EQ(scalar.elements(), 1);
  EXPECT_EQ(scalar.at<double>({}), 2.5);
}

TEST(Tensors, count_axes_from_the_end_too_and_refuse_those_they_lack) {
  const Tensor tensor({2, 3, 4});
  EXPECT_EQ(tensor.size(-1), 4);
  EXPECT_EQ(tensor.view().size(-3), 2);
  EXPECT_EQ(tensor.view().stride(-2), 4);
  EXPECT_EQ(tensor.view().transpose(-1, 0).sizes(), (Dims{4, 3, 2}));
  EXPECT_EQ(tensor.view().unsqueeze(-1).sizes(), (Dims{2, 3, 4, 1}));
  EXPECT_EQ(tensor.view().permute({-1, 0, 1}).sizes(), (Dims{4, 2, 3}));
  for (const int axis : {3, 7, -4, 1000, -1000}) {
    EXPECT_THROW(tensor.size(axis), InvalidArgument);
    EXPECT_THROW(tensor.view().size(axis), InvalidArgument);
    EXPECT_THROW(tensor.view().stride(axis), InvalidArgument);
    EXPECT_THROW(tensor.view().select(axis, 0), InvalidArgument);
  }
  EXPECT_THROW(tensor.view().permute({-1, 2, 0}), InvalidArgument);
}

TEST(Tensors, that_are_temporaries_are_read_but_never_written) {
  static_assert(std::is_convertible_v<Tensor&, TensorView>);
  static_assert(std::is_convertible_v<Tensor, ConstTensorView>);
  static_assert(!std::is_convertible_v<Tensor, TensorView>);
  static_assert(!std::is_convertible_v<const Tensor&, TensorView>);
  EXPECT_EQ(get(Tensor::of<float>({1}, {5}).view(), {0}), 5);
}

TEST(Sizes, are_made_of_any_integers) {
  const std::vector<float> values(6);
  const unsigned rows = 2;
  EXPECT_EQ(Tensor({rows, values.size() / rows}).sizes(), (Dims{2, 3}));
  EXPECT_THROW((Dims{std::uint64_t{1} << 63}), InvalidArgument);
}

TEST(Sizes, past_two_to_the_63_bytes_are_invalid) {
  EXPECT_EQ(checked_elements({two_to(31), two_to(30)}, DType::b8), two_to(61));
  EXPECT_EQ(checked_elements({two_to(60)}, DType::f32), two_to(60));
  EXPECT_THROW(checked_elements({two_to(61), 4}, DType::b8), InvalidArgument);
  EXPECT_THROW(checked_elements({two_to(61)}, DType::f32), InvalidArgument);
  EXPECT_THROW(checked_elements({two_to(40), two_to(40)}, DType::b8), InvalidArgument);
  EXPECT_THROW(checked_elements({two_to(62), two_to(62), two_to(62), 16}, DType::f64), InvalidArgument);
  EXPECT_EQ(checked_elements({0, two_to(62)}, DType::f64), 0);
}

TEST(Sizes, below_zero_are_invalid) {
  EXPECT_THROW(checked_elements({3, -1}, DType::f32), InvalidArgument);
  EXPECT_THROW(Tensor({-2}), InvalidArgument);
}

TEST(Sizes, of_more_than_eight_axes_are_invalid) {
  EXPECT_NO_THROW(Tensor({1, 1, 1, 1, 1, 1, 1, 1}));
  EXPECT_THROW(Tensor({1, 1, 1, 1, 1, 1, 1, 1, 1}), InvalidArgument);
}

TEST(OutOfMemoryError, comes_for_what_no_machine_has_and_the_next_call_works) {
  EXPECT_THROW(Tensor({two_to(50)}, DType::b8), OutOfMemory);
  EXPECT_THROW(Tensor::uninitialized({two_to(30), two_to(20)}, DType::f32), OutOfMemory);
  const Tensor one({1, 1, 1, 4});
  Tensor out({1, 1, 1, 4});
  EXPECT_NO_THROW(attention(one, one, one, out));
}

TEST(Conversion, goes_between_all_types) {
  const Tensor values = Tensor::of<double>({4}, {-2.75, 0, 1, 300.5});
  const Tensor integers = convert(values, DType::i32);
  EXPECT_EQ(integers.at<std::int32_t>({0}), -2);
  EXPECT_EQ(integers.at<std::int32_t>({3}), 300);
  for (DType type : {DType::f32, DType::bf16, DType::f16}) {
    const Tensor narrow = convert(values, type);
    EXPECT_EQ(get(narrow, {0}), -2.75);
    EXPECT_EQ(get(convert(narrow, DType::f64), {2}), 1);
  }
  EXPECT_EQ(get(convert(Tensor::of<bool>({2}, {true, false}), DType::f32), {0}), 1);
  // Exact in 64 bits, which a way through double is not.
  const std::int64_t large = two_to(53) + 1;
  EXPECT_EQ(convert(Tensor::of<std::int64_t>({1}, {large}), DType::i64).at<std::int64_t>({0}), large);
}

TEST(Conversion, rounds_a_double_to_a_half_once) {
  const double above_middle = 1 + 0x1p-9 + 0x1p-40;  // bf16: between 1 and 1 + 2^-7 lies 1 + 2^-8
  EXPECT_EQ(get(convert(Tensor::of<double>({1}, {above_middle}), DType::bf16), {0}), 1);
  EXPECT_EQ(get(convert(Tensor::of<double>({1}, {1 + 0x1p-8 + 0x1p-40}), DType::bf16), {0}), 1 + 0x1p-7);
}

TEST(Conversion, copies_through_any_strides) {
  const Tensor source = Tensor::of<float>({2, 3}, {1, 2, 3, 4, 5, 6});
  Tensor target({3, 2}, DType::f64);
  copy(source.view().transpose(0, 1).flip(0), target);
  EXPECT_TRUE(same_bits(target, Tensor::of<double>({3, 2}, {3, 6, 2, 5, 1, 4})));
  EXPECT_THROW(copy(source, target), InvalidArgument);
}

// A loop over t.as<float>()[i] up to t.elements(), as the quickstart writes it, took 96 ns an element when each of the
// two calls built a view. Inlined it takes about 1; the limit leaves room for sanitizers and busy machines.
TEST(Elements, are_reached_without_building_a_view_for_each) {
#ifndef __OPTIMIZE__
  GTEST_SKIP() << "a build without optimization inlines nothing";
#endif
  Tensor tensor({1000, 1000});
  double shortest = HUGE_VAL;
  for (int run = 0; run < 5; ++run) {
    const auto start = std::chrono::steady_clock::now();
    for (std::int64_t i = 0; i < tensor.elements(); ++i) {
      tensor.as<float>()[i] += 1;
    }
    const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - start;
    shortest = std::min(shortest, took.count() / static_cast<double>(tensor.elements()));
  }
  EXPECT_EQ(tensor.at<float>({999, 999}), 5);
  EXPECT_LT(shortest, 50) << "nanoseconds an element";
}

TEST(Printing, shows_numbers_and_shortens_long_axes) {
  std::ostringstream small, large;
  small << Tensor::of<float>({2, 2}, {1, 2, 3, 4.5f}).view();
  EXPECT_NE(small.str().find("4.5"), std::string::npos);
  large << Tensor({100000}).view();
  EXPECT_LT(large.str().size(), 1000u);
}

}  // namespace
}  // namespace headway::test
