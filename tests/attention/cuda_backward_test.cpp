// Gradients of half types on the CUDA engine in the shapes for which it has kernels of its own: several tiles of keys
// and queries, ragged ends, grouped heads, packs, every mask and modifier.
#include <gtest/gtest.h>

#include <cmath>
#include <future>
#include <string>
#include <utility>
#include <vector>

#include "attention/cuda_engine.h"
#include "support/inputs.h"

namespace headway::test {
namespace {

class CudaBackward : public CudaEngine {
 protected:
  static Call on_cuda(const Inputs& inputs, AttentionOptions options) {
    options.engine = Engine::cuda;
    return inputs.call(options);
  }

  static Tensor grad_out_of(const Call& call) {
    Random random(5);
    return normal(call.out_sizes(), call.q.dtype(), random);
  }

  // Calls run one after another; what the oracle says to each is found beside, since it takes longer by far.
  class Checks {
   public:
    void add(const Call& call, std::string what) {
      Random random(1);
      Results results = call.run(!call.packing);
      Tensor grad_out = normal(call.out_sizes(), call.q.dtype(), random);
      GradientTensors gradients = call.gradients(grad_out, results);
      running_.push_back(
          std::async(std::launch::async, [call, what = std::move(what), results = std::move(results),
                                          grad_out = std::move(grad_out), gradients = std::move(gradients)]() mutable {
            SCOPED_TRACE(what);
            expect_forward(call, results);
            expect_backward(call, grad_out, gradients);
          }));
    }

   private:
    std::vector<std::future<void>> running_;  // each is waited for when it goes
  };

  static void expect_all_kinds(const Shape& shape, DType dtype) {
    const Inputs inputs = random_inputs(shape, dtype);
    const std::vector<OptionSet> kinds = all_kinds(shape);
    Checks checks;
    for (const OptionSet& kind : kinds)
      checks.add(on_cuda(inputs, kind.options), kind.name + " " + std::to_string(shape.head_dim));
  }
};

// Tiles are of 64 or 128 queries and keys; head dims that are padded up to 64, 128 and 256.
TEST_F(CudaBackward, is_within_the_contracts_bounds_with_every_option) {
  expect_all_kinds(
      {.batch = 2, .heads = 2, .kv_heads = 1, .queries = 140, .keys = 150, .head_dim = 40, .value_dim = 64},
      DType::bf16);
  expect_all_kinds(
      {.batch = 2, .heads = 2, .kv_heads = 1, .queries = 150, .keys = 140, .head_dim = 64, .value_dim = 32},
      DType::f16);
  expect_all_kinds(
      {.batch = 2, .heads = 2, .kv_heads = 2, .queries = 70, .keys = 140, .head_dim = 128, .value_dim = 80},
      DType::bf16);
  expect_all_kinds({.batch = 2, .heads = 2, .kv_heads = 1, .queries = 130, .keys = 70, .head_dim = 72, .value_dim = 40},
                   DType::f16);
  expect_all_kinds(
      {.batch = 2, .heads = 2, .kv_heads = 1, .queries = 70, .keys = 80, .head_dim = 200, .value_dim = 256},
      DType::bf16);
  expect_all_kinds(
      {.batch = 1, .heads = 2, .kv_heads = 2, .queries = 140, .keys = 70, .head_dim = 256, .value_dim = 136},
      DType::f16);
}

TEST_F(CudaBackward, is_within_the_contracts_bounds_over_many_tiles) {
  for (std::int64_t dim : {64, 128, 256}) {
    Shape shape{.batch = 1, .heads = 2, .kv_heads = 1, .queries = 300, .keys = 420, .head_dim = dim, .value_dim = dim};
    if (dim == 256) shape.queries = 200, shape.keys = 260;  // its tiles are smaller
    const Inputs inputs = random_inputs(shape, DType::bf16);
    Checks checks;
    for (const Window& window : {Window{}, Window{100, 0}, Window{150, 70}, Window{200, {}}})
      for (Causal causal : {Causal::none, Causal::top_left, Causal::bottom_right}) {
        // A window that looks ahead says nothing new under a causal mask.
        if (causal != Causal::none && window.right.value_or(0) > 0) continue;
        checks.add(on_cuda(inputs, {.causal = causal, .window = window}), std::to_string(dim));
      }
  }
}

TEST_F(CudaBackward, takes_packs_of_sequences_of_any_length) {
  Random random(3);
  const Packing packing{{0, 130, 131, 131, 400, 470}, {0, 5, 200, 330, 330, 600}};
  for (std::int64_t dim : {64, 128, 256}) {
    const Tensor q = normal({470, 4, dim}, DType::bf16, random), k = normal({600, 2, dim}, DType::bf16, random),
                 v = normal({600, 2, dim}, DType::bf16, random);
    AttentionOptions options{.engine = Engine::cuda};
    Checks checks;
    for (Causal causal : {Causal::none, Causal::top_left, Causal::bottom_right}) {
      options.causal = causal;
      checks.add(Call{q, k, v, options, packing}, std::to_string(dim));
    }
    options.causal = Causal::none;
    options.window = Window{40, 70};
    options.softcap = 2.0;
    checks.add(Call{q, k, v, options, packing}, "softcap " + std::to_string(dim));
  }
}

TEST_F(CudaBackward, gives_the_same_bits_every_time_and_in_any_batch) {
  for (std::int64_t dim : {64, 128, 256})
    for (Causal causal : {Causal::none, Causal::bottom_right}) {
      const Shape shape{
          .batch = 3, .heads = 8, .kv_heads = 2, .queries = 600, .keys = 1100, .head_dim = dim, .value_dim = dim};
      const Inputs inputs = random_inputs(shape, DType::bf16);
      const Call call = on_cuda(inputs, {.causal = causal});
      const Tensor grad_out = grad_out_of(call);
      const Results results = call.run();
      const GradientTensors gradients = call.gradients(grad_out, results);
      int different = 0;
      for (int run = 0; run < 50; ++run) different += !same_bits(call.gradients(grad_out, results), gradients);
      EXPECT_EQ(different, 0) << dim;
      const auto item = [](const Tensor& tensor) { return tensor.view().slice(0, 1, 2); };
      const Call alone{item(inputs.q), item(inputs.k), item(inputs.v), call.options, {}};
      const GradientTensors own = alone.gradients(item(grad_out), alone.run());
      EXPECT_TRUE(same_bits(own.dq, item(gradients.dq)));
      EXPECT_TRUE(same_bits(own.dk, item(gradients.dk)));
      EXPECT_TRUE(same_bits(own.dv, item(gradients.dv)));
    }
}

// Keys and values that no row sees, and rows of padding.
TEST_F(CudaBackward, does_not_see_what_is_forbidden) {
  const double bad[] = {NAN, INFINITY, -INFINITY};
  for (const auto& [dim, modifiers] : {std::pair{64, false}, {64, true}, {256, false}, {256, true}}) {
    const Shape shape{
        .batch = 2, .heads = 2, .kv_heads = 1, .queries = 140, .keys = 300, .head_dim = dim, .value_dim = dim};
    for (OptionSet& kind : mask_kinds(shape)) {
      SCOPED_TRACE(kind.name + " " + std::to_string(dim));
      if (modifiers) {
        kind.options.softcap = 3.0;
        kind.options.dropout = 0.25;
        kind.options.seed = 7;
      }
      Inputs inputs = random_inputs(shape, DType::bf16);
      const Call call = on_cuda(inputs, kind.options);
      Tensor grad_out = grad_out_of(call);
      const Results results = call.run();
      const GradientTensors clean = call.gradients(grad_out, results);
      const Spec spec = call.spec();
      int poisoned = 0;
      for (std::int64_t b = 0; b < shape.batch; ++b) {
        for (std::int64_t j = 0; j < shape.keys; ++j) {
          bool seen = false;
          for (std::int64_t h = 0; h < shape.heads; ++h)
            for (std::int64_t i = 0; i < shape.queries && !seen; ++i) seen = allowed(spec, b, h, i, j);
          if (seen) continue;
          const auto n = static_cast<std::size_t>(poisoned++);
          for (std::int64_t d = 0; d < shape.head_dim; ++d) {
            set(inputs.k, {b, 0, j, d}, bad[n % 3]);
            set(inputs.v, {b, 0, j, d}, bad[(n + 1) % 3]);
          }
        }
        for (std::int64_t h = 0; h < shape.heads; ++h)
          for (std::int64_t i = 0; i < shape.queries; ++i) {
            bool sees = false;
            for (std::int64_t j = 0; j < shape.keys && !sees; ++j) sees = allowed(spec, b, h, i, j);
            if (sees) continue;
            ++poisoned;
            for (std::int64_t d = 0; d < shape.head_dim; ++d) set(grad_out, {b, h, i, d}, NAN);
          }
      }
      EXPECT_GT(poisoned, 0);
      EXPECT_TRUE(same_bits(call.gradients(grad_out, results), clean));
    }
  }
}

// Gradients [1,1,S,D]: NaN where hit(i, d) says that a poisoned row reaches them, else what they were before.
template <class Hit>
void expect_nan_where(const Tensor& now, const Tensor& before, const char* what, const Hit& hit) {
  for (std::int64_t i = 0; i < now.size(2); ++i)
    for (std::int64_t d = 0; d < now.size(3); ++d) {
      const auto value = static_cast<double>(get(now, {0, 0, i, d}));
      if (hit(i, d))
        EXPECT_TRUE(std::isnan(value)) << what << ' ' << i << ' ' << d;
      else
        EXPECT_EQ(value, static_cast<double>(get(before, {0, 0, i, d}))) << what << ' ' << i << ' ' << d;
    }
}

// The pairs of a causal mask, by tile: NaN in grad_out reaches exactly the rows and features that it should.
TEST_F(CudaBackward, carries_a_nan_exactly_where_it_belongs) {
  for (const auto& [dim, masked] : {std::pair{64, false}, {64, true}, {256, false}, {256, true}}) {
    const Shape shape{
        .batch = 1, .heads = 1, .kv_heads = 1, .queries = 300, .keys = 300, .head_dim = dim, .value_dim = dim};
    const Inputs inputs = random_inputs(shape, DType::bf16);
    const Tensor mask = filled({1, 1, 300, 300}, DType::b8, 1.0);
    AttentionOptions options{.causal = Causal::top_left};
    if (masked) options.mask = mask;
    const Call call = on_cuda(inputs, options);
    Tensor grad_out = grad_out_of(call);
    const Results results = call.run();
    const GradientTensors clean = call.gradients(grad_out, results);
    const std::int64_t row = 170, feature = 9;
    set(grad_out, {0, 0, row, feature}, NAN);
    const GradientTensors gradients = call.gradients(grad_out, results);
    expect_nan_where(gradients.dq, clean.dq, "dq", [&](std::int64_t i, std::int64_t) { return i == row; });
    expect_nan_where(gradients.dk, clean.dk, "dk", [&](std::int64_t i, std::int64_t) { return i <= row; });
    expect_nan_where(gradients.dv, clean.dv, "dv",
                     [&](std::int64_t i, std::int64_t d) { return i <= row && d == feature; });
  }
}

// Weights of such a row are NaN where it sees a key, and 0 where it does not: also inside of a tile.
TEST_F(CudaBackward, keeps_a_row_that_is_not_a_number_from_keys_that_it_does_not_see) {
  for (const int dim : {64, 128, 256}) {
    const Shape shape{
        .batch = 1, .heads = 1, .kv_heads = 1, .queries = 300, .keys = 300, .head_dim = dim, .value_dim = dim};
    Inputs inputs = random_inputs(shape, DType::bf16);
    const Call call = on_cuda(inputs, {.causal = Causal::top_left});
    const Tensor grad_out = grad_out_of(call);
    const GradientTensors clean = call.gradients(grad_out, call.run());
    const std::int64_t row = 170;
    set(inputs.q, {0, 0, row, 5}, NAN);
    const GradientTensors gradients = call.gradients(grad_out, call.run());
    expect_nan_where(gradients.dq, clean.dq, "dq", [&](std::int64_t i, std::int64_t) { return i == row; });
    expect_nan_where(gradients.dk, clean.dk, "dk", [&](std::int64_t i, std::int64_t) { return i <= row; });
    expect_nan_where(gradients.dv, clean.dv, "dv", [&](std::int64_t i, std::int64_t) { return i <= row; });
  }
}

TEST_F(CudaBackward, is_told_by_the_plan_and_what_it_leaves_to_others_with_the_reason) {
  static double anything;
  const auto plan = [](std::int64_t dim) {
    const ConstTensorView q(&anything, DType::bf16, {1, 8, 500, dim}, Device{DeviceType::cuda, 0});
    return explain(q, q, q, {}, {.backward = true});
  };
  if (plan(64).instruction_set != "compute capability 9.0") GTEST_SKIP() << "not a Hopper GPU";
  for (std::int64_t dim : {64, 128, 256}) {
    EXPECT_EQ(plan(dim).kernel, "hopper_backward");
    EXPECT_EQ(plan(dim).key_block, dim == 256 ? 64 : 128);
    EXPECT_EQ(plan(dim).stages, 2);
    EXPECT_GT(plan(dim).shared_bytes, 200000);
  }
  EXPECT_NE(plan(100).kernel.find("head_dim 100"), std::string::npos) << plan(100).kernel;
}

}  // namespace
}  // namespace headway::test
