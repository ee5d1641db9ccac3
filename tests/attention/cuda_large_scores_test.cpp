// Scores of any finite size on the CUDA engine: rows are as exact softmax gives them, and gradients follow, whichever
// kernel does them; rows with ordinary scores beside them keep their bits.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "attention/cuda_engine.h"
#include "support/inputs.h"
#include "support/run.h"

namespace headway::test {
namespace {

constexpr double unit_of(DType dtype) {
  return dtype == DType::bf16 ? 0x1p-8 : dtype == DType::f16 ? 0x1p-11 : dtype == DType::f32 ? 0x1p-18 : 0x1p-40;
}

bool is_finite(ConstTensorView view) {
  const std::vector<Real> values = read(view).values;
  return std::all_of(values.begin(), values.end(), [](Real value) { return std::isfinite(value); });
}

// Every fourth query is ordinary; of the others each one's scores are all of one sign, and of two sizes: a fifth of the
// keys have the full size. So a row's weight is shared equally by the keys whose scores are highest, and rounding does
// not change that. Products pass 2^24 in units of log2 by far.
struct LargeScores {
  Inputs inputs;
  std::vector<bool> ordinary;  // by query

  LargeScores(const Shape& shape, DType dtype, bool all_ordinary = false)
      : inputs(random_inputs(shape, dtype)), ordinary(static_cast<std::size_t>(shape.queries)) {
    const double key_size = 2048, query_size = dtype == DType::f16 ? 16384 : dtype == DType::f64 ? 0x1p50 : 0x1p40;
    for (std::int64_t j = 0; j < shape.keys; ++j) fill(inputs.k, j, j % 5 == 2 ? key_size : key_size / 2);
    for (std::int64_t i = 0; i < shape.queries; ++i) {
      const bool small = all_ordinary || i % 4 == 3;
      ordinary[static_cast<std::size_t>(i)] = i % 4 == 3;
      fill(inputs.q, i, small ? 0x1p-13 : i % 4 == 1 ? -query_size : query_size);
    }
  }

 private:
  static void fill(Tensor& tensor, std::int64_t row, double value) {
    for (std::int64_t b = 0; b < tensor.size(0); ++b)
      for (std::int64_t h = 0; h < tensor.size(1); ++h)
        for (std::int64_t d = 0; d < tensor.size(3); ++d) set(tensor, {b, h, row, d}, value);
  }
};

class CudaLargeScores : public CudaEngine {
 protected:
  // The contract's bounds grow with the scores, and say nothing of such rows; these do not.
  static void expect_near(const char* what, ConstTensorView actual, const Bounded& exact, double factor) {
    Array bound = exact.terms;
    for (Real& one : bound.values) one = one * factor + 1e-30L;
    EXPECT_TRUE(within(actual, exact.value.reshaped(actual.sizes()), bound.reshaped(actual.sizes()))) << what;
  }

  static void expect_forward_near(const Call& call, const Results& results) {
    const Forward exact = forward(call.spec());
    expect_near("out", results.out, exact.out, 4 * unit_of(call.q.dtype()));
    Array bound = exact.lse.value;
    for (Real& one : bound.values) one = std::isinf(one) ? 0 : std::abs(one) * 0x1p-20L + 0x1p-10L;
    EXPECT_TRUE(within(results.lse, exact.lse.value.reshaped(results.lse.sizes()), bound.reshaped(results.lse.sizes())))
        << "lse";
  }

  static void expect_gradients_near(const Call& call, const Results& results) {
    Random random(5);
    const Tensor grad_out = normal(call.out_sizes(), call.q.dtype(), random);
    const GradientTensors gradients = call.gradients(grad_out, results);
    const Backward exact = backward(call.spec(), read(grad_out));
    const double factor = 8 * unit_of(call.q.dtype());
    expect_near("dq", gradients.dq, exact.dq, factor);
    expect_near("dk", gradients.dk, exact.dk, factor);
    expect_near("dv", gradients.dv, exact.dv, factor);
    if (gradients.dbias) expect_near("dbias", *gradients.dbias, *exact.dbias, factor);
    if (gradients.dsinks) expect_near("dsinks", *gradients.dsinks, *exact.dsinks, factor);
  }

  // Options that leave the scores of a row's keys as they are to each other.
  static std::vector<OptionSet> kinds(const Shape& shape, DType dtype) {
    std::vector<OptionSet> kinds(8);
    kinds[0].name = "all keys";
    kinds[1].name = "bottom_right";
    kinds[1].options.causal = Causal::bottom_right;
    kinds[2].name = "window";
    kinds[2].options.window = Window{60, 20};
    kinds[3].name = "sinks";
    kinds[3].options.sinks = kinds[3].keep(filled({shape.heads}, DType::f32, 3.0));
    kinds[4].name = "mask";
    Random random(3);
    Tensor mask({shape.batch, 1, shape.queries, shape.keys}, DType::b8);
    fill_bool(mask, random, 0.7);
    kinds[4].options.mask = kinds[4].keep(std::move(mask));
    kinds[5].name = "a bias that forbids";
    Tensor bias({1, shape.heads, shape.queries, shape.keys}, dtype);
    for (std::int64_t i = 0; i < shape.queries; ++i)
      for (std::int64_t j = i % 7; j < shape.keys; j += 7)
        for (std::int64_t h = 0; h < shape.heads; ++h) set(bias, {0, h, i, j}, -INFINITY);
    kinds[5].options.bias = kinds[5].keep(std::move(bias));
    kinds[6].name = "dropout";
    kinds[6].options.dropout = 0.25;
    kinds[6].options.seed = 7;
    kinds[7].name = "a sink above some scores and below others";
    kinds[7].options.sinks = kinds[7].keep(filled({shape.heads}, DType::f32, 0x1p25));
    for (OptionSet& kind : kinds) kind.options.engine = Engine::cuda;
    return kinds;
  }
};

TEST_F(CudaLargeScores, equal_ones_give_the_mean) {
  struct Case {
    DType dtype;
    std::int64_t head_dim;
    double size;
  };
  for (const auto& [dtype, head_dim, size] :
       {Case{DType::f16, 64, 300}, Case{DType::f16, 64, 2000}, Case{DType::f16, 128, 900}, Case{DType::f16, 256, 60000},
        Case{DType::bf16, 64, 24576}, Case{DType::bf16, 128, 24576}, Case{DType::bf16, 64, 1e6},
        Case{DType::bf16, 256, 3e4}, Case{DType::bf16, 64, 1e18}, Case{DType::f32, 64, 1e18}})
    for (double sign : {1.0, -1.0})
      for (std::int64_t keys : {128, 1000}) {
        SCOPED_TRACE(std::string(name(dtype)) + " " + std::to_string(head_dim) + " " + std::to_string(sign * size) +
                     " " + std::to_string(keys));
        const Tensor q = filled({1, 1, 64, head_dim}, dtype, sign * size);
        const Tensor k = filled({1, 1, keys, head_dim}, dtype, size), v = filled(k.sizes(), dtype, 1.0);
        const Call call{q, k, v, {.engine = Engine::cuda}, {}};
        const Results results = call.run();
        EXPECT_TRUE(same_bits(results.out, filled(results.out.sizes(), dtype, 1.0)));
        // Tensor cores cut each of the 16 sums of 16 products that make one of 256 features.
        const double one = rounded(dtype, size);
        const double score = sign * one * one * std::sqrt(static_cast<double>(head_dim));
        EXPECT_NEAR(get(results.lse, {0, 0, 5}), score + std::log(keys), std::abs(score) * 0x1p-19 + 0x1p-20);
      }
}

TEST_F(CudaLargeScores, give_what_exact_softmax_gives) {
  for (DType dtype : {DType::bf16, DType::f16})
    for (std::int64_t head_dim : {64, 128, 256})
      for (std::int64_t keys : {200, 900}) {
        const Shape shape{
            .batch = 1, .heads = 2, .kv_heads = 1, .queries = 70, .keys = keys, .head_dim = head_dim, .value_dim = 64};
        const LargeScores large(shape, dtype);
        for (const OptionSet& kind : kinds(shape, dtype)) {
          SCOPED_TRACE(std::string(name(dtype)) + " " + std::to_string(head_dim) + " " + std::to_string(keys) + " " +
                       kind.name);
          const Call call = large.inputs.call(kind.options);
          expect_forward_near(call, call.run());
        }
      }
  const Shape longest{
      .batch = 1, .heads = 1, .kv_heads = 1, .queries = 9, .keys = 8300, .head_dim = 128, .value_dim = 128};
  const LargeScores large(longest, DType::bf16);
  const Call call = large.inputs.call({.engine = Engine::cuda});
  expect_forward_near(call, call.run());
}

// Whatever the rounding of such scores does to the weights, they sum to 1.
TEST_F(CudaLargeScores, have_weights_that_sum_to_1_under_every_modifier) {
  const Shape shape{.batch = 1, .heads = 2, .kv_heads = 1, .queries = 70, .keys = 900, .head_dim = 64, .value_dim = 64};
  const Tensor slopes = Tensor::of<float>({2}, {0.5f, 1e7f});
  Random random(2);
  const Tensor small = normal({70, 900}, DType::f32, random);
  Tensor lowest = filled({70, 900}, DType::bf16, -3.3e38);
  for (std::int64_t i = 0; i < 70; i += 2) set(lowest, {i, 3 * i}, -3.2e38);
  for (DType dtype : {DType::bf16, DType::f16}) {
    LargeScores large(shape, dtype);
    large.inputs.v = filled(large.inputs.v.sizes(), dtype, 1.0);
    for (AttentionOptions options :
         {AttentionOptions{.alibi_slopes = slopes}, AttentionOptions{.softcap = 1e9}, AttentionOptions{.softcap = 30.0},
          AttentionOptions{.bias = small}, AttentionOptions{.bias = lowest},
          AttentionOptions{.bias = lowest, .alibi_slopes = slopes}, AttentionOptions{.scale = 1e22},
          AttentionOptions{.causal = Causal::bottom_right, .alibi_slopes = slopes}}) {
      if (dtype == DType::bf16 && options.scale) continue;  // passes 1e38
      options.engine = Engine::cuda;
      const Results results = large.inputs.call(options).run();
      const Array ones(results.out.sizes(), 1), bound(results.out.sizes(), 2 * unit_of(dtype));
      EXPECT_TRUE(within(results.out, ones, bound)) << name(dtype);
      EXPECT_TRUE(is_finite(results.lse));
    }
  }
}

TEST_F(CudaLargeScores, change_no_bit_of_other_rows) {
  for (DType dtype : {DType::bf16, DType::f16, DType::f32})
    for (std::int64_t head_dim : {64, 128, 256}) {
      const Shape shape{
          .batch = 1, .heads = 2, .kv_heads = 1, .queries = 140, .keys = 300, .head_dim = head_dim, .value_dim = 64};
      const LargeScores mixed(shape, dtype), plain(shape, dtype, true);
      Random random(4);
      const Tensor grad_out = normal({1, 2, 140, 64}, dtype, random);
      for (const OptionSet& kind : kinds(shape, dtype)) {
        SCOPED_TRACE(std::string(name(dtype)) + " " + std::to_string(head_dim) + " " + kind.name);
        const Call with = mixed.inputs.call(kind.options), without = plain.inputs.call(kind.options);
        const Results a = with.run(), b = without.run();
        const GradientTensors da = with.gradients(grad_out, a), db = without.gradients(grad_out, b);
        const auto row = [](const Tensor& tensor, std::int64_t i) { return tensor.view().select(2, i); };
        for (std::int64_t i = 0; i < shape.queries; ++i)
          if (mixed.ordinary[static_cast<std::size_t>(i)]) {
            EXPECT_TRUE(same_bits(row(a.out, i), row(b.out, i))) << i;
            EXPECT_TRUE(same_bits(row(a.lse, i), row(b.lse, i))) << i;
            EXPECT_TRUE(same_bits(row(da.dq, i), row(db.dq, i))) << i;
          }
      }
    }
}

TEST_F(CudaLargeScores, have_the_gradients_of_exact_softmax) {
  struct Case {
    DType dtype;
    std::int64_t head_dim, value_dim;
  };
  for (const auto& [dtype, head_dim, value_dim] :
       {Case{DType::bf16, 64, 64}, Case{DType::f16, 128, 64}, Case{DType::bf16, 256, 128}, Case{DType::f16, 30, 20},
        Case{DType::f32, 64, 64}, Case{DType::f32, 200, 24}, Case{DType::f64, 16, 16}}) {
    const Shape shape{.batch = 2,
                      .heads = 2,
                      .kv_heads = 1,
                      .queries = 70,
                      .keys = 150,
                      .head_dim = head_dim,
                      .value_dim = value_dim};
    const LargeScores large(shape, dtype);
    for (const OptionSet& kind : kinds(shape, dtype)) {
      SCOPED_TRACE(std::string(name(dtype)) + " " + std::to_string(head_dim) + " " + kind.name);
      const Call call = large.inputs.call(kind.options);
      expect_gradients_near(call, call.run());
    }
  }
}

TEST_F(CudaLargeScores, have_the_weights_of_exact_softmax_when_found_from_lse) {
  for (DType dtype : {DType::bf16, DType::f16, DType::f32}) {
    const Shape shape{
        .batch = 2, .heads = 2, .kv_heads = 1, .queries = 70, .keys = 150, .head_dim = 64, .value_dim = 64};
    const LargeScores large(shape, dtype);
    for (const OptionSet& kind : kinds(shape, dtype)) {
      if (kind.options.dropout > 0) continue;
      SCOPED_TRACE(std::string(name(dtype)) + " " + kind.name);
      const Call call = large.inputs.call(kind.options);
      const Results results = call.run();
      const Bounded exact = forward(call.spec()).weights;
      expect_near("weights", run_weights_in(call.q, call.k, {0, 70, 0, 150}, kind.options, results.lse), exact,
                  0x1p-10);
      Bounded mean{Array({2, 70, 150}), Array({2, 70, 150}), {}, {}};
      for (std::int64_t n = 0; n < mean.value.elements(); ++n) {
        const Dims at = index_of(n, mean.value.sizes());
        for (std::int64_t h = 0; h < 2; ++h)
          mean.value.values[static_cast<std::size_t>(n)] += exact.value(at[0], h, at[1], at[2]) / 2;
      }
      mean.terms = mean.value;
      Tensor found({2, 70, 150}, dtype);
      run_mean_weights(call.q, call.k, results.lse, found, kind.options);
      expect_near("mean", found, mean, std::max(4 * unit_of(dtype), 0x1p-10));
    }
  }
}

TEST_F(CudaLargeScores, have_finite_gradients) {
  for (DType dtype : {DType::bf16, DType::f16, DType::f32})
    for (double size : {1e2, 1e4, 1e5, 1e18}) {
      if (dtype == DType::f16 && size > 6e4) continue;
      SCOPED_TRACE(std::string(name(dtype)) + " " + std::to_string(size));
      Inputs inputs = random_inputs(
          {.batch = 1, .heads = 2, .kv_heads = 2, .queries = 20, .keys = 40, .head_dim = 16, .value_dim = 16}, dtype);
      for (Tensor* tensor : {&inputs.q, &inputs.k})
        for (std::int64_t n = 0; n < tensor->elements(); ++n) {
          const Dims index = index_of(n, tensor->sizes());
          set(*tensor, index, get(*tensor, index) * size / 4);
        }
      const Call call = inputs.call({.engine = Engine::cuda});
      const Tensor grad_out = filled(call.out_sizes(), dtype, 1.0);
      const GradientTensors gradients = call.gradients(grad_out);
      // A row's weights sum to 1, so the sum of dV over the keys is the number of queries.
      for (std::int64_t h = 0; h < 2; ++h) {
        Real sum = 0;
        for (std::int64_t j = 0; j < 40; ++j) sum += get(gradients.dv, {0, h, j, 3});
        EXPECT_NEAR(static_cast<double>(sum), 20.0, 20.0 * 0x1p-6);
      }
      EXPECT_TRUE(is_finite(gradients.dq) && is_finite(gradients.dk));
    }
}

}  // namespace
}  // namespace headway::test
