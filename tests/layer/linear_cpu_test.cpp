// The CPU engine's linear map against float64 sums, on whichever instruction set HEADWAY_ISA names.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "engines/cpu/linear.h"
#include "engines/reference/linear.h"
#include "headway/headway.h"
#include "support/array.h"
#include "support/strided.h"

namespace headway::test {
namespace {

const DType float_types[] = {DType::f32, DType::f64, DType::bf16, DType::f16};
const Layout input_layouts[] = {Layout::contiguous, Layout::heads_inside, Layout::gaps,
                                Layout::reversed,   Layout::misaligned,   Layout::repeated};
const Layout output_layouts[] = {Layout::contiguous, Layout::heads_inside, Layout::gaps, Layout::reversed,
                                 Layout::misaligned};

class ThreadCount {
 public:
  ThreadCount() : before_(get_threads()) {}
  ~ThreadCount() { set_threads(before_); }
  ThreadCount(const ThreadCount&) = delete;
  ThreadCount& operator=(const ThreadCount&) = delete;

 private:
  int before_;
};

struct Shape {
  std::int64_t batch, length, in, out;
};

std::ostream& operator<<(std::ostream& stream, const Shape& shape) {
  return stream << shape.batch << " x " << shape.length << " rows, " << shape.in << " to " << shape.out;
}

// Small and odd ones, each side of a vector and of a panel; then past the sizes at which packing and chunks of depth
// begin.
const Shape shapes[] = {{1, 1, 1, 1},    {1, 1, 7, 64},     {1, 2, 65, 33},   {1, 3, 64, 200},  {2, 2, 63, 17},
                        {1, 5, 200, 1},  {1, 7, 16, 65},    {3, 3, 129, 47},  {1, 13, 31, 128}, {1, 64, 127, 95},
                        {2, 65, 96, 24}, {1, 130, 70, 130}, {5, 60, 65, 100}, {1, 199, 1, 199}, {1, 258, 300, 70},
                        {3, 173, 10, 9}, {1, 70, 1100, 40}, {2, 150, 270, 72}};

struct Tensors {
  Strided x, weight, bias, dy, y, dx, dweight, dbias;
};

Tensors make_tensors(const Shape& shape, DType dtype, Layout input, Layout output, unsigned seed) {
  Random random(seed);
  const auto draw = [&](const Dims& sizes) { return normal_strided(sizes, dtype, input, random); };
  return {.x = draw({shape.batch, shape.length, shape.in}),
          .weight = draw({shape.in, shape.out}),
          .bias = draw({shape.out}),
          .dy = draw({shape.batch, shape.length, shape.out}),
          .y = Strided({shape.batch, shape.length, shape.out}, dtype, output),
          .dx = Strided({shape.batch, shape.length, shape.in}, dtype, output),
          .dweight = Strided({shape.in, shape.out}, dtype, output),
          .dbias = Strided({shape.out}, dtype, output)};
}

void run(Tensors& t) {
  cpu::linear(t.x.view(), t.weight.view(), ConstTensorView(t.bias.view()), t.y.view());
  cpu::linear_backward(t.dy.view(), t.x.view(), t.weight.view(),
                       {.dx = t.dx.view(), .dweight = t.dweight.view(), .dbias = t.dbias.view()});
}

const std::pair<const char*, Strided Tensors::*> outputs[] = {
    {"y", &Tensors::y}, {"dx", &Tensors::dx}, {"dweight", &Tensors::dweight}, {"dbias", &Tensors::dbias}};

double compute_roundoff(DType dtype) { return dtype == DType::f64 ? 0x1p-53 : 0x1p-24; }
double storage_roundoff(DType dtype) {
  return dtype == DType::bf16 ? 0x1p-8 : dtype == DType::f16 ? 0x1p-11 : compute_roundoff(dtype);
}
double least_denormal(DType dtype) {
  return dtype == DType::f16 ? 0x1p-24 : dtype == DType::f64 ? 0x1p-1074 : dtype == DType::bf16 ? 0x1p-133 : 0x1p-149;
}

// Sums of products, exact for all that matters here, with what their error is measured by.
struct Sum {
  Real value = 0, terms = 0;

  void add(Real a, Real b) {
    value += a * b;
    terms += std::fabs(a * b);
  }
  // 16 units of the terms, and the rounding of the result.
  Real allowed(DType dtype) const {
    return 16 * compute_roundoff(dtype) * terms + storage_roundoff(dtype) * std::fabs(value) + least_denormal(dtype);
  }
};

void expect_near(double found, const Sum& sum, DType dtype, const char* what, const Dims& at) {
  EXPECT_LE(std::fabs(found - sum.value), sum.allowed(dtype))
      << what << at << ": found " << found << ", expected " << sum.value;
}

// Elements of an output: all of them, or about `most` spread over it.
void for_elements(ConstTensorView view, std::int64_t most, const std::function<void(const Dims&)>& visit) {
  const std::int64_t step = view.elements() / most + 1;
  for (std::int64_t n = 0; n < view.elements(); n += step) {
    visit(index_of(n, view.sizes()));
  }
}

void expect_float64_sums(Tensors& t, const Shape& shape, DType dtype, std::int64_t most) {
  const Array x = read(t.x.view()), weight = read(t.weight.view()), bias = read(t.bias.view()), dy = read(t.dy.view());
  for_elements(t.y.view(), most, [&](const Dims& at) {
    Sum sum;
    for (std::int64_t e = 0; e < shape.in; ++e) sum.add(x(at[0], at[1], e), weight(e, at[2]));
    sum.add(1, bias(at[2]));
    expect_near(get(t.y.view(), at), sum, dtype, "y", at);
  });
  for_elements(t.dx.view(), most, [&](const Dims& at) {
    Sum sum;
    for (std::int64_t o = 0; o < shape.out; ++o) sum.add(dy(at[0], at[1], o), weight(at[2], o));
    expect_near(get(t.dx.view(), at), sum, dtype, "dx", at);
  });
  const auto for_rows = [&](const auto& visit) {
    for (std::int64_t b = 0; b < shape.batch; ++b) {
      for (std::int64_t s = 0; s < shape.length; ++s) visit(b, s);
    }
  };
  for_elements(t.dweight.view(), most, [&](const Dims& at) {
    Sum sum;
    for_rows([&](std::int64_t b, std::int64_t s) { sum.add(x(b, s, at[0]), dy(b, s, at[1])); });
    expect_near(get(t.dweight.view(), at), sum, dtype, "dweight", at);
  });
  for_elements(t.dbias.view(), most, [&](const Dims& at) {
    Sum sum;
    for_rows([&](std::int64_t b, std::int64_t s) { sum.add(1, dy(b, s, at[0])); });
    expect_near(get(t.dbias.view(), at), sum, dtype, "dbias", at);
  });
}

TEST(LinearCpu, every_sum_is_within_16_units_of_its_terms) {
  unsigned seed = 1;
  for (const DType dtype : float_types) {
    for (const Shape& shape : shapes) {
      SCOPED_TRACE(::testing::Message() << shape << ' ' << dtype);
      Tensors t = make_tensors(shape, dtype, Layout::contiguous, Layout::contiguous, seed++);
      run(t);
      expect_float64_sums(t, shape, dtype, 300);
    }
  }
}

// Deeper than a chunk, wider and higher than a task.
TEST(LinearCpu, sums_of_several_chunks_and_tasks_stay_right) {
  for (const Shape& shape : {Shape{1, 301, 3000, 900}, Shape{2, 1200, 300, 1100}}) {
    SCOPED_TRACE(::testing::Message() << shape);
    Tensors t = make_tensors(shape, DType::f32, Layout::contiguous, Layout::contiguous, 7);
    run(t);
    expect_float64_sums(t, shape, DType::f32, 100);
  }
}

TEST(LinearCpu, long_sums_of_one_sign_keep_their_accuracy) {
  for (const double w : {0.1, 1.0 / 3.0, 0.7, 0.999999}) {
    const Shape shape{1, 5, 5000, 70};
    Tensors t = make_tensors(shape, DType::f32, Layout::contiguous, Layout::contiguous, 1);
    Random random(3);
    std::uniform_real_distribution<double> uniform(0.0, 1.0);
    for_elements(t.x.view(), 1 << 30, [&](const Dims& at) { set(t.x.view(), at, at[1] == 0 ? 1.0 : uniform(random)); });
    for_elements(t.weight.view(), 1 << 30,
                 [&](const Dims& at) { set(t.weight.view(), at, at[1] == 0 ? w : uniform(random)); });
    run(t);
    expect_float64_sums(t, shape, DType::f32, 1000);
  }
}

TEST(LinearCpu, strides_change_no_bit_and_no_byte_beside_the_outputs) {
  for (const DType dtype : float_types) {
    for (const Shape& shape : {Shape{3, 5, 21, 70}, Shape{4, 90, 37, 40}}) {
      for (const Layout input : input_layouts) {
        Tensors strided = make_tensors(shape, dtype, input, Layout::contiguous, 5);
        Tensors dense = make_tensors(shape, dtype, Layout::contiguous, Layout::contiguous, 5);
        for (auto tensor : {&Tensors::x, &Tensors::weight, &Tensors::bias, &Tensors::dy}) {
          copy((strided.*tensor).view(), (dense.*tensor).view());  // a repeated one holds the last of what was drawn
        }
        run(dense);
        for (const Layout output : output_layouts) {
          SCOPED_TRACE(::testing::Message() << shape << ' ' << dtype << ' ' << name(input) << " to " << name(output));
          Tensors result = make_tensors(shape, dtype, input, output, 5);
          run(result);
          for (const auto& [what, output_of] : outputs) {
            EXPECT_TRUE(same_bits((result.*output_of).view(), (dense.*output_of).view())) << what;
            EXPECT_TRUE((result.*output_of).surroundings_intact()) << what;
          }
        }
      }
    }
  }
}

TEST(LinearCpu, the_thread_count_changes_no_bit) {
  const ThreadCount restored;
  for (const DType dtype : float_types) {
    for (const Shape& shape : {Shape{1, 3, 400, 500}, Shape{2, 100, 300, 200}, Shape{1, 700, 300, 270}}) {
      set_threads(1);
      Tensors one = make_tensors(shape, dtype, Layout::contiguous, Layout::contiguous, 11);
      run(one);
      for (const int threads : {2, 3, 7}) {
        SCOPED_TRACE(::testing::Message() << shape << ' ' << dtype << ' ' << threads << " threads");
        set_threads(threads);
        Tensors many = make_tensors(shape, dtype, Layout::contiguous, Layout::contiguous, 11);
        run(many);
        for (const auto& [what, output] : outputs) {
          EXPECT_TRUE(same_bits((many.*output).view(), (one.*output).view())) << what;
        }
      }
    }
  }
}

TEST(LinearCpu, a_row_alone_has_the_bits_it_has_in_a_batch) {
  for (const DType dtype : float_types) {
    const Shape shape{3, 200, 150, 130};
    Tensors all = make_tensors(shape, dtype, Layout::contiguous, Layout::contiguous, 13);
    run(all);
    for (const std::int64_t row : {0, 1, 77, 198, 199}) {
      const auto only = [&](const Strided& tensor) { return tensor.view().slice(0, 1, 2).slice(1, row, row + 1); };
      Tensor y({1, 1, shape.out}, dtype), dx({1, 1, shape.in}, dtype);
      cpu::linear(only(all.x), std::as_const(all.weight).view(), ConstTensorView(all.bias.view()), y);
      cpu::linear_backward(only(all.dy), only(all.x), std::as_const(all.weight).view(), {.dx = dx});
      EXPECT_TRUE(same_bits(y, only(all.y))) << dtype << ' ' << row;
      EXPECT_TRUE(same_bits(dx, only(all.dx))) << dtype << ' ' << row;
    }
  }
}

TEST(LinearCpu, without_a_bias_nothing_is_added) {
  const Tensor x = Tensor::of<float>({1, 2, 2}, {1, 2, 3, 4}), weight = Tensor::of<float>({2, 3}, {1, 0, 2, 0, 1, 3});
  const Tensor bias = Tensor::of<float>({3}, {10, 20, 30});
  Tensor y({1, 2, 3});
  cpu::linear(x, weight, std::nullopt, y);
  EXPECT_TRUE(same_bits(y, Tensor::of<float>({1, 2, 3}, {1, 2, 8, 3, 4, 18})));
  cpu::linear(x, weight, ConstTensorView(bias), y);
  EXPECT_TRUE(same_bits(y, Tensor::of<float>({1, 2, 3}, {11, 22, 38, 13, 24, 48})));
}

TEST(LinearCpu, nan_and_infinity_reach_the_elements_they_belong_to_and_no_others) {
  const double nan = std::numeric_limits<double>::quiet_NaN(), infinity = std::numeric_limits<double>::infinity();
  for (const DType dtype : float_types) {
    for (const std::int64_t length : {6, 300}) {
      const Shape shape{1, length, 70, 75};
      Tensors t = make_tensors(shape, dtype, Layout::contiguous, Layout::contiguous, 17);
      set(t.x.view(), {0, 2, 69}, nan);
      set(t.dy.view(), {0, 3, 74}, infinity);
      set(t.weight.view(), {5, 7}, -infinity);
      run(t);
      for_elements(t.y.view(), 1 << 30, [&](const Dims& at) {
        EXPECT_EQ(std::isfinite(get(t.y.view(), at)), at[1] != 2 && at[2] != 7) << dtype << at;
        EXPECT_EQ(std::isnan(get(t.y.view(), at)), at[1] == 2) << dtype << at;
      });
      for_elements(t.dx.view(), 1 << 30, [&](const Dims& at) {
        EXPECT_EQ(std::isfinite(get(t.dx.view(), at)), at[1] != 3 && at[2] != 5) << dtype << at;
      });
      for_elements(t.dweight.view(), 1 << 30, [&](const Dims& at) {
        EXPECT_EQ(std::isfinite(get(t.dweight.view(), at)), at[0] != 69 && at[1] != 74) << dtype << at;
      });
      for_elements(t.dbias.view(), 1 << 30,
                   [&](const Dims& at) { EXPECT_EQ(get(t.dbias.view(), at) == infinity, at[0] == 74) << dtype << at; });
    }
  }
}

TEST(LinearCpu, rows_without_a_gradient_add_nothing_even_if_they_hold_nan) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const DType dtype : float_types) {
    for (const std::int64_t in : {1, 5, 300}) {
      const Shape shape{2, 170, in, 70};
      Tensors t = make_tensors(shape, dtype, Layout::contiguous, Layout::contiguous, 19);
      Tensors clean = make_tensors(shape, dtype, Layout::contiguous, Layout::contiguous, 19);
      for (const std::int64_t row : {0, 63, 64, 169}) {
        for (std::int64_t o = 0; o < shape.out; ++o) {
          set(t.dy.view(), {1, row, o}, o % 2 == 0 ? 0.0 : -0.0);
          set(clean.dy.view(), {1, row, o}, 0.0);
        }
        for (std::int64_t e = 0; e < in; ++e) {
          set(t.x.view(), {1, row, e}, nan);
        }
      }
      run(t);
      run(clean);
      EXPECT_TRUE(same_bits(t.dweight.view(), clean.dweight.view())) << dtype << ' ' << in;
      set(t.dy.view(), {1, 64, 69}, 1.0);  // one number in the row's last column is a gradient
      run(t);
      EXPECT_TRUE(std::isnan(get(t.dweight.view(), {0, 0}))) << dtype << ' ' << in;
    }
  }
}

TEST(LinearCpu, empty_axes_give_zeros_or_nothing) {
  const Dims huge{std::int64_t{1} << 60, 0, 2};
  const Tensor none(huge), weight({2, 2});
  Tensor y(huge), dweight = filled({2, 2}, DType::f32, 7), dbias = filled({2}, DType::f32, 7);
  cpu::linear(none, weight, std::nullopt, y);
  cpu::linear_backward(y, none, weight, {.dx = y, .dweight = dweight, .dbias = dbias});
  EXPECT_TRUE(same_bits(dweight, Tensor({2, 2})));
  EXPECT_TRUE(same_bits(dbias, Tensor({2})));

  // No inputs: y is the bias. No outputs: dx is 0.
  const Tensor x({2, 3, 0}), no_rows({0, 2}), bias = Tensor::of<float>({2}, {3, 4});
  Tensor bias_only = filled({2, 3, 2}, DType::f32, 7);
  cpu::linear(x, no_rows, ConstTensorView(bias), bias_only);
  for_elements(bias_only, 100, [&](const Dims& at) { EXPECT_EQ(get(bias_only, at), at[2] == 0 ? 3 : 4); });
  const Tensor dy({2, 3, 0}), no_columns({2, 0});
  Tensor dx = filled({2, 3, 2}, DType::f32, 7);
  cpu::linear_backward(dy, Tensor({2, 3, 2}), no_columns, {.dx = dx});
  EXPECT_TRUE(same_bits(dx, Tensor({2, 3, 2})));
}

// Dot products of bf16 take denormals for 0: what comes near them must go another way, whichever operand it is in.
TEST(LinearCpu, tiny_numbers_keep_their_accuracy) {
  const Shape shape{2, 40, 70, 75};
  for (const DType dtype : {DType::f32, DType::bf16}) {
    for (const auto& [x_exponent, weight_exponent, dy_exponent] :
         {std::tuple{-60, -60, -60}, {-126, 3, 3}, {3, -126, 3}, {3, 3, -126}, {-45, -45, -45}}) {
      SCOPED_TRACE(::testing::Message() << dtype << ' ' << x_exponent << ' ' << weight_exponent << ' ' << dy_exponent);
      Tensors t = make_tensors(shape, dtype, Layout::contiguous, Layout::contiguous, 29);
      const auto shrink = [](TensorView view, int exponent) {
        for_elements(view, 1 << 30, [&](const Dims& at) { set(view, at, std::ldexp(get(view, at), exponent)); });
      };
      shrink(t.x.view(), x_exponent);
      shrink(t.weight.view(), weight_exponent);
      shrink(t.dy.view(), dy_exponent);
      shrink(t.bias.view(), -140);
      run(t);
      expect_float64_sums(t, shape, dtype, 500);
    }
  }
}

TEST(LinearCpu, a_row_of_tiny_numbers_changes_no_other_row) {
  const Shape shape{1, 50, 70, 75};
  Tensors plain = make_tensors(shape, DType::bf16, Layout::contiguous, Layout::contiguous, 31);
  Tensors mixed = make_tensors(shape, DType::bf16, Layout::contiguous, Layout::contiguous, 31);
  for (const std::int64_t row : {0, 17, 18, 49}) {
    set(mixed.x.view(), {0, row, 5}, 0x1p-130);
    set(mixed.dy.view(), {0, row, 5}, 0x1p-130);
  }
  run(plain);
  run(mixed);
  const auto rows = [](const Strided& tensor, std::int64_t begin, std::int64_t end) {
    return tensor.view().slice(1, begin, end);
  };
  for (const auto& [begin, end] : {std::pair<std::int64_t, std::int64_t>{1, 17}, {19, 49}}) {
    EXPECT_TRUE(same_bits(rows(mixed.y, begin, end), rows(plain.y, begin, end)));
    EXPECT_TRUE(same_bits(rows(mixed.dx, begin, end), rows(plain.dx, begin, end)));
  }
}

TEST(LinearCpu, reports_growing_shares_and_stops_when_told) {
  const Shape shape{1, 600, 100, 200};
  Tensors t = make_tensors(shape, DType::f32, Layout::contiguous, Layout::contiguous, 37);
  std::vector<double> shares;
  LinearCall reports{"a layer", [&](double share) {
                       shares.push_back(share);
                       return true;
                     }};
  const ConstTensorView x = t.x.view(), weight = t.weight.view(), dy = t.dy.view();
  linear(Engine::automatic, x, weight, std::nullopt, t.y.view(), reports);
  ASSERT_FALSE(shares.empty());
  EXPECT_EQ(shares.back(), 1);
  shares.clear();
  linear_backward(Engine::automatic, dy, x, weight, {.dx = t.dx.view(), .dweight = t.dweight.view()}, reports);
  EXPECT_GE(shares.size(), 2u);
  EXPECT_TRUE(std::is_sorted(shares.begin(), shares.end()));
  EXPECT_EQ(shares.back(), 1);
  reports.progress = [](double) { return false; };
  for (const Engine engine : {Engine::automatic, Engine::reference}) {
    try {
      linear(engine, x, weight, std::nullopt, t.y.view(), reports);
      ADD_FAILURE() << "not cancelled";
    } catch (const Cancelled& cancelled) {
      EXPECT_EQ(std::string(cancelled.what()).rfind("a layer: cancelled", 0), 0u) << cancelled.what();
    }
  }
}

TEST(LinearCpu, halves_are_rounded_once) {
  // 2048 + 1 -> 2048 and 2048 + 3 -> 2052 in f16; a sum in f16 would lose every 1 after the first.
  const Tensor x = convert(Tensor::of<float>({1, 2, 2}, {2048, 1, 2048, 3}), DType::f16);
  const Tensor ones = convert(filled({2, 1}, DType::f32, 1), DType::f16);
  Tensor y({1, 2, 1}, DType::f16);
  cpu::linear(x, ones, std::nullopt, y);
  EXPECT_EQ(get(y, {0, 0, 0}), 2048);
  EXPECT_EQ(get(y, {0, 1, 0}), 2052);
}

TEST(Linear, runs_the_reference_loops_when_they_are_asked_for) {
  const Shape shape{1, 40, 300, 20};
  Tensors t = make_tensors(shape, DType::f32, Layout::contiguous, Layout::contiguous, 23);
  Tensor defined({1, 40, 20}), asked({1, 40, 20}), automatic({1, 40, 20});
  const ConstTensorView x = t.x.view(), weight = t.weight.view();
  reference::linear(x, weight, std::nullopt, defined);
  linear(Engine::reference, x, weight, std::nullopt, asked);
  linear(Engine::automatic, x, weight, std::nullopt, automatic);
  EXPECT_TRUE(same_bits(asked, defined));
  EXPECT_FALSE(same_bits(automatic, defined));  // sums in f32
}

}  // namespace
}  // namespace headway::test
