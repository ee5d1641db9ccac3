// Gradients of short sequences on the CUDA engine, for which it has one kernel: one tile of queries and up to 64 keys,
// and where bulk copies cannot read the inputs any queries and up to 256 keys, 128 or 64 of wider heads.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <tuple>
#include <utility>

#include "attention/cuda_backward.h"

namespace headway::test {
namespace {

class CudaShortBackward : public CudaBackward {
 protected:
  // Whether the call's gradients come from the kernel for short sequences.
  static bool is_short(const Shape& shape, DType dtype = DType::bf16, const AttentionOptions& options = {}) {
    return passed_for(shape, dtype, options).kernel.rfind("short_gradient", 0) == 0;
  }
  static Plan passed_for(const Shape& s, DType dtype, const AttentionOptions& options) {
    alignas(16) static double anything[2];
    const Device device{DeviceType::cuda, 0};
    const ConstTensorView q(anything, dtype, {s.batch, s.heads, s.queries, s.head_dim}, device),
        k(anything, dtype, {s.batch, s.kv_heads, s.keys, s.head_dim}, device),
        v(anything, dtype, {s.batch, s.kv_heads, s.keys, s.value_dim}, device);
    return explain(q, k, v, options, {.backward = true});
  }
  static bool is_hopper() { return passed_for({}, DType::bf16, {}).instruction_set == "compute capability 9.0"; }
};

TEST_F(CudaShortBackward, is_told_by_the_plan_and_what_it_leaves_to_others_with_the_reason) {
  if (!is_hopper()) GTEST_SKIP() << "not a Hopper GPU";
  for (const auto& [dim, keys] :
       {std::pair{64, 64}, {40, 17}, {128, 64}, {72, 40}, {256, 64}, {192, 29}, {36, 200}, {1, 1}})
    EXPECT_TRUE(is_short(
        {.batch = 20, .heads = 8, .kv_heads = 8, .queries = keys, .keys = keys, .head_dim = dim, .value_dim = dim}))
        << dim;
  const Shape shape{.batch = 20, .heads = 8, .kv_heads = 8, .queries = 64, .keys = 64, .head_dim = 64, .value_dim = 64};
  EXPECT_FALSE(is_short(shape, DType::f32));
  EXPECT_FALSE(is_short(shape, DType::bf16, {.batch_invariant = true}));
  EXPECT_EQ(passed_for(shape, DType::bf16, {}).key_block, 64);
  EXPECT_EQ(passed_for(shape, DType::bf16, {.softcap = 3.0}).kernel, "short_gradient (modified scores)");
  Shape many = shape;
  many.keys = 257;
  const Plan more_keys = passed_for(many, DType::bf16, {});
  ASSERT_EQ(more_keys.passed_kernels.size(), 1u);
  EXPECT_NE(more_keys.passed_kernels[0].reason.find("257 keys, expected at most 256"), std::string::npos);
  many.keys = 100;
  EXPECT_FALSE(is_short(many));
  many.keys = 64;
  many.queries = 65;  // a block would do one tile after another
  EXPECT_FALSE(is_short(many));
}

// Blocks of 64, 128 and 256 keys, and head dims that are padded up to 64, 128 and 256; the longer ones in rows that
// bulk copies cannot read, so that no other kernel takes them.
TEST_F(CudaShortBackward, is_within_the_contracts_bounds_with_every_option) {
  const std::pair<Shape, DType> cases[] = {
      {{2, 2, 2, 50, 60, 64, 64}, DType::bf16},   {{2, 2, 1, 70, 30, 36, 60}, DType::f16},
      {{2, 2, 2, 90, 100, 63, 30}, DType::bf16},  {{2, 2, 1, 64, 200, 45, 62}, DType::f16},
      {{2, 2, 2, 60, 64, 128, 80}, DType::f16},   {{2, 4, 2, 70, 128, 67, 125}, DType::bf16},
      {{2, 2, 2, 60, 50, 256, 136}, DType::bf16}, {{1, 2, 2, 29, 29, 192, 192}, DType::f16}};
  for (const auto& [shape, dtype] : cases) expect_all_kinds(shape, dtype);
}

TEST_F(CudaShortBackward, is_within_the_contracts_bounds_for_any_length) {
  for (const auto& [dim, value_dim, dtype] :
       {std::tuple{60, 60, DType::bf16}, {33, 7, DType::f16}, {124, 92, DType::bf16}, {201, 255, DType::f16}}) {
    const std::int64_t most = dim > 128 ? 64 : dim > 64 ? 128 : 256;
    for (const std::int64_t keys : {1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256})
      for (const std::int64_t queries : {1, 16, 17, 33, 64, 65, 129}) {
        if (keys > most || (keys + queries) % 3 == 0) continue;
        const Inputs inputs = random_inputs({1, 2, 1, queries, keys, dim, value_dim}, dtype);
        const std::string what = std::to_string(dim) + ": " + std::to_string(queries) + " x " + std::to_string(keys);
        Checks checks;
        checks.add(on_cuda(inputs, {}), what);
        checks.add(on_cuda(inputs, {.causal = Causal::bottom_right}), what + " causal");
      }
  }
}

TEST_F(CudaShortBackward, is_within_the_contracts_bounds_for_any_head_dim) {
  for (const std::int64_t dim : {1, 2, 7, 8, 9, 15, 16, 17, 24, 40, 63, 65, 72, 80, 96, 112, 120, 127, 129, 160, 255})
    for (const std::int64_t value_dim : {std::int64_t{1}, std::int64_t{40}, dim}) {
      const Inputs inputs = random_inputs({1, 3, 1, 40, 45, dim, value_dim}, dim % 2 == 0 ? DType::bf16 : DType::f16);
      Checks().add(on_cuda(inputs, {.window = Window{20, 10}}),
                   std::to_string(dim) + " and " + std::to_string(value_dim));
    }
}

TEST_F(CudaShortBackward, reads_and_writes_any_layout) {
  for (const std::int64_t dim : {64, 40, 10, 128})
    for (Layout layout : {Layout::heads_inside, Layout::gaps, Layout::reversed, Layout::misaligned, Layout::repeated}) {
      SCOPED_TRACE(std::string(name(layout)) + " " + std::to_string(dim));
      Random random(7);
      const Strided q = normal_strided({2, 2, 60, dim}, DType::bf16, layout, random),
                    k = normal_strided({2, 2, 50, dim}, DType::bf16, layout, random),
                    v = normal_strided({2, 2, 50, dim}, DType::bf16, layout, random),
                    grad_out = normal_strided({2, 2, 60, dim}, DType::bf16, layout, random);
      const AttentionOptions options{.engine = Engine::cuda};
      const auto plain_copy = [](const Strided& tensor) { return convert(tensor.view(), DType::bf16); };
      const Tensor plain_q = plain_copy(q), plain_k = plain_copy(k), plain_v = plain_copy(v),
                   plain_grad = plain_copy(grad_out);
      const Call strided{q.view(), k.view(), v.view(), options, {}}, plain{plain_q, plain_k, plain_v, options, {}};
      const Results results = plain.run();
      EXPECT_TRUE(same_bits(strided.gradients(grad_out.view(), results), plain.gradients(plain_grad, results)));
    }
}

// With many heads, blocks of fewer threads do the same sums.
TEST_F(CudaShortBackward, gives_the_same_bits_every_time_and_with_any_number_of_heads) {
  for (const std::int64_t dim : {64, 128, 256})
    for (Causal causal : {Causal::none, Causal::top_left}) {
      const Inputs inputs = random_inputs({400, 2, 2, 50, 50, dim, dim}, DType::bf16);
      const Call call = on_cuda(inputs, {.causal = causal});
      const Tensor grad_out = grad_out_of(call);
      const Results results = call.run();
      const GradientTensors gradients = call.gradients(grad_out, results);
      for (int run = 0; run < 10; ++run) EXPECT_TRUE(same_bits(call.gradients(grad_out, results), gradients)) << dim;
      const auto item = [](const auto& tensor) { return tensor.view().slice(0, 301, 302); };
      const Call alone{item(inputs.q), item(inputs.k), item(inputs.v), call.options, {}};
      const GradientTensors own = alone.gradients(item(grad_out), alone.run());
      EXPECT_TRUE(same_bits(own.dq, item(gradients.dq)));
      EXPECT_TRUE(same_bits(own.dk, item(gradients.dk)));
      EXPECT_TRUE(same_bits(own.dv, item(gradients.dv)));
    }
}

// Keys and values that no row sees, and rows that see nothing.
TEST_F(CudaShortBackward, does_not_see_what_is_forbidden) {
  struct Case {
    std::int64_t heads, queries, keys, dim;
  };
  for (const auto& [heads, queries, keys, dim] : {Case{1, 60, 60, 64}, Case{2, 80, 120, 60}, Case{2, 80, 250, 60},
                                                  Case{1, 60, 60, 128}, Case{2, 80, 120, 124}, Case{1, 64, 60, 256}})
    for (const bool modifiers : {false, true}) {
      const Shape shape{2, heads, 1, queries, keys, dim, dim};
      for (OptionSet& kind : mask_kinds(shape)) {
        if (kind.options.spans) continue;
        SCOPED_TRACE(kind.name + " " + std::to_string(dim) + " " + std::to_string(keys));
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
        poison_what_no_row_sees(call.spec(), shape, inputs, grad_out);
        EXPECT_TRUE(same_bits(call.gradients(grad_out, results), clean));
      }
    }
}

// The pairs of a causal mask: NaN in grad_out reaches exactly the rows and features that it should.
TEST_F(CudaShortBackward, carries_a_nan_exactly_where_it_belongs) {
  for (const auto& [dim, length] : {std::pair{64, 60}, {60, 128}, {60, 200}, {128, 64}, {124, 100}, {256, 64}})
    for (const bool modified : {false, true}) {
      SCOPED_TRACE(std::to_string(dim) + " " + std::to_string(length));
      const Inputs inputs = random_inputs({1, 1, 1, length, length, dim, dim}, DType::bf16);
      AttentionOptions options{.causal = Causal::top_left};
      if (modified) options.softcap = 4.0;
      const Call call = on_cuda(inputs, options);
      Tensor grad_out = grad_out_of(call);
      const Results results = call.run();
      const GradientTensors clean = call.gradients(grad_out, results);
      const std::int64_t row = 37, feature = 9;
      set(grad_out, {0, 0, row, feature}, NAN);
      const GradientTensors gradients = call.gradients(grad_out, results);
      expect_nan_where(gradients.dq, clean.dq, "dq", [&](std::int64_t i, std::int64_t) { return i == row; });
      expect_nan_where(gradients.dk, clean.dk, "dk", [&](std::int64_t i, std::int64_t) { return i <= row; });
      expect_nan_where(gradients.dv, clean.dv, "dv",
                       [&](std::int64_t i, std::int64_t d) { return i <= row && d == feature; });
    }
}

}  // namespace
}  // namespace headway::test
