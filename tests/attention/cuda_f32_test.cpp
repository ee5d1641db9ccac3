// f32 on the CUDA engine's tensor cores, where every number is the sum of three bf16 parts: the contract's bounds for
// exact f32 arithmetic, numbers that have no such parts, and calls that other kernels take.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "attention/cuda_engine.h"
#include "support/inputs.h"

namespace headway::test {
namespace {

class CudaF32 : public CudaEngine {
 protected:
  static Call on_cuda(const Inputs& inputs, AttentionOptions options = {}) {
    options.engine = Engine::cuda;
    return inputs.call(options);
  }

  // What such a call would run on the device: the tensors themselves lie in host memory.
  static Plan plan_of(const Call& call, bool backward) {
    alignas(16) static double anything[2];
    const auto on_device = [](const ConstTensorView& view) {
      return ConstTensorView(anything, view.dtype(), view.sizes(), Device{DeviceType::cuda, 0});
    };
    return explain(on_device(call.q), on_device(call.k), on_device(call.v), call.options, {.backward = backward});
  }
  static bool is_split(const Call& call) {
    return plan_of(call, false).kernel.starts_with("f32 tiles in three bf16 parts");
  }

  // Its tiles do not depend on masks and modifiers, which lie in host memory.
  static std::string backward_kernel(Call call) {
    call.options = {.engine = Engine::cuda, .batch_invariant = call.options.batch_invariant};
    return plan_of(call, true).kernel;
  }
  static bool has_hopper() {
    const Inputs some = random_inputs({.batch = 1, .heads = 1, .kv_heads = 1, .queries = 100, .keys = 100});
    return plan_of(on_cuda(some), false).instruction_set == "compute capability 9.0";
  }

  // Every element becomes value(old one, number of the element).
  static void change(Tensor& tensor, const std::function<float(float, std::int64_t)>& value) {
    auto* data = static_cast<float*>(tensor.data());
    for (std::int64_t n = 0; n < tensor.elements(); ++n) data[n] = value(data[n], n);
  }
};

// Tiles are of 64 or 128 queries and 32 or 16 keys, in a backward of 64 or 32 rows and 32 or 16 of the other side.
TEST_F(CudaF32, is_within_the_contracts_bounds_with_every_option) {
  for (const Shape& shape :
       {Shape{.batch = 2, .heads = 2, .kv_heads = 1, .queries = 140, .keys = 150, .head_dim = 33, .value_dim = 64},
        Shape{.batch = 2, .heads = 2, .kv_heads = 2, .queries = 70, .keys = 90, .head_dim = 128, .value_dim = 72},
        Shape{.batch = 2, .heads = 2, .kv_heads = 1, .queries = 70, .keys = 50, .head_dim = 256, .value_dim = 200}}) {
    const Inputs inputs = random_inputs(shape);
    const std::vector<OptionSet> kinds = all_kinds(shape);
    for (const OptionSet& kind : kinds) {
      SCOPED_TRACE(kind.name + " " + std::to_string(shape.head_dim));
      expect_contract(on_cuda(inputs, kind.options));
    }
  }
}

TEST_F(CudaF32, is_within_the_contracts_bounds_for_every_kind_of_width) {
  for (std::int64_t dim : {1, 2, 15, 16, 17, 31, 64, 65, 80, 96, 112, 127, 129, 136, 192, 250, 256}) {
    SCOPED_TRACE(dim);
    const std::int64_t value_dim = dim % 2 == 0 ? dim : dim / 2 + 1;
    expect_contract(on_cuda(random_inputs({.batch = 1,
                                           .heads = 2,
                                           .kv_heads = 1,
                                           .queries = 67,
                                           .keys = 101,
                                           .head_dim = dim,
                                           .value_dim = value_dim}),
                            {.causal = Causal::bottom_right}));
  }
}

// More rows than the kernel for few queries takes: it has tiles of 16 rows, and wants no more of them than there are
// multiprocessors.
TEST_F(CudaF32, is_within_the_contracts_bounds_over_many_tiles) {
  for (std::int64_t dim : {64, 128, 256}) {
    SCOPED_TRACE(dim);
    const Inputs inputs = random_inputs(
        {.batch = 1, .heads = 8, .kv_heads = 4, .queries = 300, .keys = 650, .head_dim = dim, .value_dim = dim});
    for (const Window& window : {Window{}, Window{400, 70}}) {
      const Call call = on_cuda(inputs, {.window = window});
      EXPECT_TRUE(is_split(call));
      expect_contract(call);
    }
  }
}

// A width, lengths and heads of each of the kernels' tiles, drawn, each with an option: every kind has its turn.
TEST_F(CudaF32, is_within_the_contracts_bounds_for_drawn_shapes) {
  Random random(11);
  const auto between = [&](std::int64_t least, std::int64_t most) {
    return least + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(most - least + 1));
  };
  for (std::size_t turn = 0; turn < 28; ++turn) {
    const std::int64_t widest = std::int64_t{32} << turn % 4;  // 32, 64, 128, 256
    const std::int64_t group = between(1, 3), kv_heads = between(1, 2);
    const Shape shape{.batch = between(1, 2),
                      .heads = kv_heads * group,
                      .kv_heads = kv_heads,
                      .queries = between(65, 260),
                      .keys = between(40, 260),
                      .head_dim = between(widest / 2 + 1, widest),
                      .value_dim = between(1, widest)};
    const Inputs inputs = random_inputs(shape, DType::f32, turn + 1);
    const std::vector<OptionSet> kinds = all_kinds(shape);
    const OptionSet& kind = kinds[turn % kinds.size()];
    SCOPED_TRACE(kind.name + " " + std::to_string(shape.head_dim) + " " + std::to_string(shape.queries) + " x " +
                 std::to_string(shape.keys));
    expect_contract(on_cuda(inputs, kind.options));
  }
}

// Rows of an inner axis other than the last, rows that are not aligned, and rows that repeat.
TEST_F(CudaF32, reads_any_stride) {
  const Inputs inputs = random_inputs(
      {.batch = 2, .heads = 2, .kv_heads = 2, .queries = 70, .keys = 70, .head_dim = 41, .value_dim = 41});
  const auto odd = [](const Tensor& tensor) { return tensor.view().slice(3, 1, 40); };
  expect_contract({odd(inputs.q), odd(inputs.k), odd(inputs.v), {.engine = Engine::cuda}, {}});
}

// All terms round the same way: what tensor cores cut would drift.
TEST_F(CudaF32, keeps_equal_terms_and_equal_scores_within_the_bounds) {
  for (std::int64_t dim : {64, 128, 192})
    for (const float value : {1.2345678f, 0x1.fefefep0f, 0.7654321f}) {
      SCOPED_TRACE(std::to_string(dim) + " " + std::to_string(value));
      Inputs inputs = random_inputs(
          {.batch = 1, .heads = 1, .kv_heads = 1, .queries = 66, .keys = 3000, .head_dim = dim, .value_dim = dim});
      for (Tensor* one : {&inputs.q, &inputs.k, &inputs.v}) change(*one, [&](float, std::int64_t) { return value; });
      expect_contract(on_cuda(inputs));
      change(inputs.v, [](float, std::int64_t n) { return 0.5f + static_cast<float>(n % 97) * 0.01f; });
      expect_contract(on_cuda(inputs));
    }
  Inputs inputs = random_inputs(
      {.batch = 1, .heads = 1, .kv_heads = 1, .queries = 65, .keys = 40001, .head_dim = 4, .value_dim = 3});
  for (Tensor* one : {&inputs.q, &inputs.k, &inputs.v}) change(*one, [](float, std::int64_t) { return 0.57f; });
  const Call call = on_cuda(inputs);
  expect_forward(call, call.run());
}

TEST_F(CudaF32, keeps_one_large_channel_beside_small_ones_within_the_bounds) {
  for (std::int64_t dim : {64, 128}) {
    SCOPED_TRACE(dim);
    Inputs inputs = random_inputs(
        {.batch = 1, .heads = 1, .kv_heads = 1, .queries = 70, .keys = 200, .head_dim = dim, .value_dim = dim});
    for (Tensor* one : {&inputs.q, &inputs.k})
      change(*one, [&](float old, std::int64_t n) { return n % 16 == 5 ? 6.0f + 0.1f * old : 0.002f * std::abs(old); });
    expect_contract(on_cuda(inputs));
  }
}

// Parts of small numbers have no bf16, and products of large ones overflow.
TEST_F(CudaF32, takes_inputs_of_any_size) {
  for (const float factor : {0x1p-140f, 0x1p-127f, 0x1p-111f, 0x1p-100f, 0x1p-60f, 0x1p30f, 0x1p41f, 0x1p59f})
    for (int which = 0; which < 4; ++which) {
      SCOPED_TRACE(std::to_string(which) + " times 2^" + std::to_string(std::ilogb(factor)));
      Inputs inputs = random_inputs(
          {.batch = 1, .heads = 2, .kv_heads = 1, .queries = 66, .keys = 70, .head_dim = 20, .value_dim = 18});
      Random random(3);
      Tensor grad_out = normal({1, 2, 66, 18}, DType::f32, random);
      Tensor* const scaled[] = {&inputs.q, &inputs.k, &inputs.v, &grad_out};
      change(*scaled[which], [&](float old, std::int64_t) { return old * factor; });
      const double scale = which < 2 && factor > 1 ? 0.25 / factor : 0.25;
      const Call call = on_cuda(inputs, {.causal = Causal::bottom_right, .scale = scale});
      const Results results = call.run();
      expect_forward(call, results);
      GradientTensors gradients = call.gradients(grad_out, results);
      expect_backward(call, grad_out, gradients);
    }
}

// A few numbers without parts among ordinary ones, where some rows see them and others do not.
TEST_F(CudaF32, takes_single_numbers_that_can_not_be_split) {
  for (std::int64_t dim : {64, 128, 160})
    for (const float unusual : {0x1p-130f, 0x1p62f, 3e18f}) {
      SCOPED_TRACE(std::to_string(dim) + " " + std::to_string(unusual));
      Inputs inputs = random_inputs(
          {.batch = 1, .heads = 2, .kv_heads = 1, .queries = 130, .keys = 140, .head_dim = dim, .value_dim = dim});
      change(inputs.v, [&](float old, std::int64_t n) { return n % 1009 == 7 ? unusual : old; });
      if (unusual < 1) {
        change(inputs.q, [&](float old, std::int64_t n) { return n % 509 == 3 ? unusual : old; });
        change(inputs.k, [&](float old, std::int64_t n) { return n % 709 == 5 ? unusual : old; });
      }
      expect_contract(on_cuda(inputs, {.causal = Causal::bottom_right}));
    }
}

TEST_F(CudaF32, never_shows_what_forbidden_keys_hold) {
  constexpr std::int64_t length = 150;
  for (std::int64_t dim : {64, 128, 256})
    for (const float bad : {NAN, INFINITY, -INFINITY, 3e38f, 1e-40f}) {
      SCOPED_TRACE(std::to_string(dim) + " " + std::to_string(bad));
      const Shape shape{
          .batch = 1, .heads = 2, .kv_heads = 1, .queries = length, .keys = length, .head_dim = dim, .value_dim = dim};
      Inputs inputs = random_inputs(shape);
      Tensor mask({1, 1, length, length}, DType::b8);
      for (std::int64_t i = 0; i < length; ++i)
        for (std::int64_t j = 0; j < length; ++j) set(mask, {0, 0, i, j}, j % 50 == 7 ? (i == 131 ? 1 : 0) : 1);
      const AttentionOptions options{.mask = mask, .causal = Causal::bottom_right};
      Random random(4);
      const Tensor grad_out = normal({1, 2, length, dim}, DType::f32, random);
      const Call clean = on_cuda(inputs, options);
      const Results expected = clean.run();
      const GradientTensors gradients = clean.gradients(grad_out, expected);
      Inputs poisoned = random_inputs(shape);
      for (std::int64_t j = 7; j < length; j += 50)
        for (std::int64_t d : {0, 3, 17}) set(poisoned.k, {0, 0, j, d}, bad), set(poisoned.v, {0, 0, j, d}, bad);
      const Call call = on_cuda(poisoned, options);
      const Results results = call.run();
      const GradientTensors poisoned_gradients = call.gradients(grad_out, expected);
      // Row 131 alone sees them.
      for (const auto& [begin, end] : {std::pair<std::int64_t, std::int64_t>{0, 131}, {132, length}}) {
        const auto rows = [&](const Tensor& tensor) { return tensor.view().slice(2, begin, end); };
        EXPECT_TRUE(same_bits(rows(results.out), rows(expected.out)));
        EXPECT_TRUE(same_bits(rows(results.lse), rows(expected.lse)));
        EXPECT_TRUE(same_bits(rows(poisoned_gradients.dq), rows(gradients.dq)));
      }
      if (std::isnan(bad)) {
        for (std::int64_t h = 0; h < 2; ++h) EXPECT_TRUE(std::isnan(get(results.out, {0, h, 131, 0})));
      }
    }
}

TEST_F(CudaF32, adds_infinite_values_to_the_rows_that_see_them) {
  Inputs inputs = random_inputs(
      {.batch = 1, .heads = 1, .kv_heads = 1, .queries = 100, .keys = 100, .head_dim = 64, .value_dim = 64});
  set(inputs.v, {0, 0, 40, 2}, INFINITY);
  set(inputs.v, {0, 0, 60, 2}, -INFINITY);
  set(inputs.v, {0, 0, 60, 9}, -INFINITY);
  const Call call = on_cuda(inputs, {.causal = Causal::bottom_right});
  const Results results = call.run();
  for (std::int64_t i = 0; i < 100; ++i) {
    const double two = get(results.out, {0, 0, i, 2}), nine = get(results.out, {0, 0, i, 9});
    EXPECT_EQ(std::isfinite(two), i < 40) << i;
    EXPECT_EQ(std::isnan(two), i >= 60) << i;
    EXPECT_EQ(std::isinf(nine) && nine < 0, i >= 60) << i;
    EXPECT_TRUE(std::isfinite(get(results.out, {0, 0, i, 8}))) << i;
  }
}

TEST_F(CudaF32, gives_the_same_bits_every_time) {
  for (std::int64_t dim : {64, 128, 256}) {
    const Inputs inputs = random_inputs(
        {.batch = 3, .heads = 4, .kv_heads = 2, .queries = 333, .keys = 420, .head_dim = dim, .value_dim = dim});
    const Call call = on_cuda(inputs, {.causal = Causal::bottom_right, .dropout = 0.2, .seed = 3});
    Random random(4);
    const Tensor grad_out = normal(call.out_sizes(), DType::f32, random);
    const Results first = call.run();
    const GradientTensors gradients = call.gradients(grad_out, first);
    for (int n = 0; n < 3; ++n) {
      EXPECT_TRUE(same_bits(call.run(), first));
      EXPECT_TRUE(same_bits(call.gradients(grad_out, first), gradients));
    }
  }
}

// Few tiles: several blocks share the walk of each, over query heads and rows, and their sums are added up in order.
TEST_F(CudaF32, shares_out_the_gradients_of_few_tiles_within_the_bounds) {
  for (const Shape& shape :
       {Shape{.batch = 1, .heads = 4, .kv_heads = 1, .queries = 203, .keys = 331, .head_dim = 40, .value_dim = 33},
        Shape{.batch = 2, .heads = 3, .kv_heads = 3, .queries = 333, .keys = 130, .head_dim = 96, .value_dim = 128},
        Shape{.batch = 1, .heads = 2, .kv_heads = 1, .queries = 150, .keys = 201, .head_dim = 200, .value_dim = 256}}) {
    const Inputs inputs = random_inputs(shape);
    for (const OptionSet& kind : all_kinds(shape)) {
      SCOPED_TRACE(kind.name + " " + std::to_string(shape.head_dim));
      const Call call = on_cuda(inputs, kind.options);
      if (has_hopper()) {
        EXPECT_NE(backward_kernel(call).find("parts, of dk and dv in "), std::string::npos);
      }
      expect_contract(call);
    }
    Random random(5);
    const Call call = on_cuda(inputs, {.causal = Causal::bottom_right});
    const Tensor grad_out = normal(call.out_sizes(), DType::f32, random);
    const Results results = call.run();
    const GradientTensors first = call.gradients(grad_out, results);
    for (int n = 0; n < 3; ++n) EXPECT_TRUE(same_bits(call.gradients(grad_out, results), first));
  }
}

// Parts of a walk that hold no step, and none that holds one.
TEST_F(CudaF32, shares_out_walks_that_ranges_leave_little_of) {
  const Inputs inputs = random_inputs(
      {.batch = 1, .heads = 2, .kv_heads = 1, .queries = 300, .keys = 700, .head_dim = 24, .value_dim = 24});
  for (const Window& window : {Window{0, 0}, Window{40, 3}})
    expect_contract(on_cuda(inputs, {.causal = Causal::top_left, .window = window}));
  expect_contract(on_cuda(inputs, {.causal = Causal::top_left}));
}

TEST_F(CudaF32, keeps_the_bits_of_batch_invariant_gradients) {
  const Inputs two = random_inputs(
      {.batch = 2, .heads = 2, .kv_heads = 1, .queries = 130, .keys = 200, .head_dim = 64, .value_dim = 64});
  const auto first = [](const Tensor& tensor) { return tensor.view().slice(0, 0, 1); };
  const AttentionOptions options{.engine = Engine::cuda, .batch_invariant = true};
  const Call both = two.call(options), one{first(two.q), first(two.k), first(two.v), options, {}};
  EXPECT_EQ(backward_kernel(both).find("parts, of dk"), std::string::npos);
  Random random(6);
  const Tensor grad_out = normal(both.out_sizes(), DType::f32, random);
  const GradientTensors expected = both.gradients(grad_out, both.run());
  const GradientTensors alone = one.gradients(first(grad_out), one.run());
  EXPECT_TRUE(same_bits(first(expected.dq), alone.dq));
  EXPECT_TRUE(same_bits(first(expected.dk), alone.dk));
  EXPECT_TRUE(same_bits(first(expected.dv), alone.dv));
}

TEST_F(CudaF32, takes_packed_sequences_of_odd_lengths) {
  for (std::int64_t dim : {40, 128}) {
    SCOPED_TRACE(dim);
    Random random(8);
    const Tensor q = normal({231, 4, dim}, DType::f32, random), k = normal({250, 2, dim}, DType::f32, random),
                 v = normal({250, 2, dim}, DType::f32, random);
    expect_contract({q,
                     k,
                     v,
                     {.causal = Causal::bottom_right, .engine = Engine::cuda},
                     Packing{{0, 1, 1, 100, 231}, {0, 65, 66, 130, 250}}});
  }
}

TEST_F(CudaF32, leaves_other_calls_to_exact_kernels_with_the_reason) {
  alignas(16) static double anything[2];
  const auto plan = [](std::int64_t queries, std::int64_t dim, DType dtype, AttentionOptions options = {}) {
    const ConstTensorView q(anything, dtype, {1, 8, queries, dim}, Device{DeviceType::cuda, 0});
    return explain(q, q, q, options);
  };
  const auto reason = [](const Plan& made) {
    for (const auto& passed : made.passed_kernels)
      if (passed.kernel == "split_forward") return passed.reason;
    return std::string();
  };
  EXPECT_NE(reason(plan(500, 64, DType::f64)).find("not f32"), std::string::npos);
  EXPECT_NE(reason(plan(20, 64, DType::f32)).find("few queries"), std::string::npos);
  EXPECT_NE(reason(plan(500, 64, DType::f32, {.batch_invariant = true})).find("invariant"), std::string::npos);
  if (plan(500, 64, DType::f32).instruction_set != "compute capability 9.0") GTEST_SKIP() << "not a Hopper GPU";
  EXPECT_EQ(plan(500, 64, DType::f32).kernel, "f32 tiles in three bf16 parts, by warpgroups");
  EXPECT_NE(reason(plan(500, 300, DType::f32)).find("head_dim 300"), std::string::npos);
  EXPECT_NE(reason(plan(500, 64, DType::f32, {.scale = 1e15})).find("1e+15"), std::string::npos);
}

}  // namespace
}  // namespace headway::test
