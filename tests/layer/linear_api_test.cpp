// linear and linear_backward as users call them: any rank that a layer has, and errors that name what is wrong.
#include "layer_support.h"

namespace headway::test {
namespace {

TEST(LinearMaps, take_rows_with_and_without_a_batch) {
  const Tensor x = Tensor::of<float>({2, 2}, {1, 2, 3, 4}), weight = Tensor::of<float>({2, 3}, {1, 0, 2, 0, 1, 3});
  const Tensor bias = Tensor::of<float>({3}, {10, 20, 30});
  EXPECT_EQ(numbers(linear(x, weight, bias)), (std::vector<double>{11, 22, 38, 13, 24, 48}));
  EXPECT_EQ(numbers(linear(x.view().unsqueeze(1), weight)), (std::vector<double>{1, 2, 8, 3, 4, 18}));
  const Tensor dy = Tensor::of<float>({2, 3}, {1, 1, 1, 2, 0, -1});
  Tensor dx({2, 2}), dweight({2, 3}), dbias({3});
  linear_backward(dy, x, weight, {.dx = dx, .dweight = dweight, .dbias = dbias});
  EXPECT_EQ(numbers(dx), (std::vector<double>{3, 4, 0, -3}));
  EXPECT_EQ(numbers(dweight), (std::vector<double>{7, 1, -2, 10, 2, -2}));
  EXPECT_EQ(numbers(dbias), (std::vector<double>{3, 1, 0}));
}

TEST(LinearMaps, say_what_they_expected_and_found) {
  Tensor x({2, 2}), weight({2, 3}), y({2, 3});
  const auto text_of = [](const auto& call) -> std::string {
    try {
      call();
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  };
  EXPECT_EQ(text_of([&] {
              linear(x, Tensor({3, 3}), {}, y);
            }),
            "linear: expected a weight of shape [in,out] for x of shape (2, 2), found (3, 3)");
  EXPECT_EQ(text_of([&] { linear(Tensor({2}), weight, {}, y); }),
            "linear: expected x of shape [rows,in] or [B,S,in], found (2,)");
  EXPECT_EQ(text_of([&] { linear(x, weight, Tensor({2}), y); }), "linear: bias has shape (2,), expected (3,)");
  EXPECT_EQ(text_of([&] { linear(x, Tensor({2, 3}, DType::f64), {}, y); }), "linear: weight has type f64, x has f32");
  EXPECT_EQ(text_of([&] { linear(x, Tensor({2, 2}), {}, x); }), "linear: y overlaps an input");
  EXPECT_EQ(text_of([&] { linear_backward(y, x, weight, {.dweight = x}); }),
            "linear_backward: dweight has shape (2, 2), expected (2, 3)");
}

}  // namespace
}  // namespace headway::test
