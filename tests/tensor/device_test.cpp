// Tensors in the memory of a CUDA device, and copies from and to it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "attention/cuda_engine.h"
#include "headway/headway.h"

namespace headway::test {
namespace {

constexpr Device gpu{DeviceType::cuda, 0};

class DeviceTensor : public testing::Test {
 protected:
  void SetUp() override { skip_without_cuda(); }
};

Tensor counted(const Dims& sizes) {
  Tensor result(sizes, DType::f32);
  for (std::int64_t n = 0; n < result.elements(); ++n) result.as<float>()[n] = static_cast<float>(n);
  return result;
}

bool equal(ConstTensorView a, ConstTensorView b) {
  const Tensor left = convert(a, DType::f64), right = convert(b, DType::f64);
  return left.sizes() == right.sizes() &&
         std::memcmp(left.data(), right.data(), static_cast<std::size_t>(left.elements()) * sizeof(double)) == 0;
}

template <class Error, class Action>
std::string error_of(const Action& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  return "no such error";
}

TEST_F(DeviceTensor, begins_as_zeros_and_says_where_it_is) {
  const Tensor there({3, 5}, DType::bf16, gpu);
  EXPECT_EQ(there.device(), gpu);
  EXPECT_EQ(there.view().device(), gpu);
  EXPECT_TRUE(equal(there, Tensor({3, 5})));
  EXPECT_EQ(Tensor({0, 4}, DType::f32, gpu).elements(), 0);
}

TEST_F(DeviceTensor, comes_back_as_it_went) {
  const Tensor here = counted({4, 6, 5});
  Tensor there = copied_to(here, gpu);
  EXPECT_TRUE(equal(there, here));
  EXPECT_TRUE(equal(there.clone(), here));
  EXPECT_EQ(there.clone().device(), gpu);
  const Tensor moved = std::move(there);
  EXPECT_EQ(copied_to(moved, Device{}).device(), Device{});
  EXPECT_TRUE(equal(copied_to(moved, Device{}), here));
}

TEST_F(DeviceTensor, of_every_layout_is_copied_both_ways) {
  const Tensor here = counted({4, 6, 5});
  const Tensor there = copied_to(here, gpu);
  const auto odd = [](auto view) { return view.transpose(0, 2).slice(1, 1, 5).flip(0); };
  EXPECT_TRUE(equal(odd(there.view()), odd(here.view())));
  EXPECT_TRUE(equal(copied_to(odd(here.view()), gpu), odd(here.view())));
  Tensor target({4, 6, 5}, DType::f32, gpu), expected({4, 6, 5});
  copy(odd(here.view()), odd(target.view()));
  copy(odd(here.view()), odd(expected.view()));
  EXPECT_TRUE(equal(target, expected));
  Tensor second({4, 6, 5}, DType::f32, gpu);
  copy(odd(there.view()), odd(second.view()));
  EXPECT_TRUE(equal(second, expected));
}

TEST_F(DeviceTensor, is_converted_on_its_way) {
  const Tensor here = counted({3, 4});
  Tensor halves({3, 4}, DType::f16, gpu);
  copy(here, halves);
  EXPECT_TRUE(equal(halves, here));
  EXPECT_EQ(convert(halves, DType::f64).device(), Device{});
  Tensor wide({3, 4}, DType::f64, gpu);
  EXPECT_EQ(error_of<Unsupported>([&] { copy(halves, wide); }),
            "copy: expected one type for memory on cuda:0 and cuda:0, found f16 and f64");
}

TEST_F(DeviceTensor, refuses_what_it_cannot_do_in_words) {
  const Tensor there = copied_to(counted({2}), gpu);
  EXPECT_EQ(error_of<Unsupported>([&] { there.at<float>({1}); }),
            "tensor: expected elements in host memory, found them on cuda:0");
  const std::string none = error_of<Unsupported>([] { Tensor({2}, DType::f32, {DeviceType::cuda, 99}); });
  EXPECT_EQ(none.rfind("tensor: there is no cuda:99: CUDA has ", 0), 0u) << none;
  const std::string full = error_of<OutOfMemory>([] { Tensor({std::int64_t{1} << 50}, DType::f64, gpu); });
  EXPECT_EQ(full.rfind("tensor: allocating 9007199254740992 bytes for a tensor on cuda:0: CUDA says cudaError", 0), 0u)
      << full;
  EXPECT_NO_THROW(Tensor({2}, DType::f32, gpu));
}

TEST(TensorWithoutDevice, says_that_there_is_none) {
  const auto there = engines();
  if (std::find(there.begin(), there.end(), Engine::cuda) != there.end()) {
    GTEST_SKIP() << "there is a CUDA device";
  }
  const std::string text = error_of<Unsupported>([] { Tensor({2}, DType::f32, gpu); });
  EXPECT_TRUE(text == "tensor: there is no cuda:0: CUDA has no device here" ||
              text == "tensor: expected host memory, found cuda:0, and the CUDA engine is not built into this library")
      << text;
}

}  // namespace
}  // namespace headway::test
