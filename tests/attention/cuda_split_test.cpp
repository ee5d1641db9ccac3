// Keys split over blocks on the CUDA engine, where there are too few tiles of queries to occupy the device: what the
// parts leave of a row is merged in a fixed order.
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "attention/cuda_engine.h"
#include "support/inputs.h"

namespace headway::test {
namespace {

class CudaSplit : public CudaEngine {
 protected:
  static Plan plan_of(const Shape& shape, const AttentionOptions& options = {}) {
    alignas(16) static double anything[2];
    const auto view = [&](std::int64_t heads, std::int64_t length, std::int64_t dim) {
      return ConstTensorView(anything, DType::bf16, {shape.batch, heads, length, dim}, Device{DeviceType::cuda, 0});
    };
    return explain(view(shape.heads, shape.queries, shape.head_dim), view(shape.kv_heads, shape.keys, shape.head_dim),
                   view(shape.kv_heads, shape.keys, shape.value_dim), options);
  }

  static bool on_hopper() { return plan_of({}).instruction_set == "compute capability 9.0"; }

  static void expect_split(const Shape& shape, const std::string& kernel) {
    const Plan plan = plan_of(shape);
    EXPECT_NE(plan.kernel.find(kernel), std::string::npos) << plan.kernel;
    EXPECT_GT(plan.splits, 1);
    EXPECT_NE(to_string(plan).find("splits of the keys"), std::string::npos) << to_string(plan);
  }
};

// Rows of one tile and of two, of which the last is not full; parts that some rows, or all, see nothing of.
TEST_F(CudaSplit, of_few_tiles_is_within_the_contracts_bounds) {
  for (std::int64_t dim : {64, 128, 256})
    for (std::int64_t queries : {33, 128, 200}) {
      const Shape shape{
          .batch = 1, .heads = 2, .kv_heads = 1, .queries = queries, .keys = 2500, .head_dim = dim, .value_dim = dim};
      if (on_hopper()) expect_split(shape, "keys split");
      const Inputs inputs = random_inputs(shape, queries == 33 ? DType::f16 : DType::bf16);
      Tensor lens({1}, DType::i64), sinks = filled({2}, DType::f32, 0.7);
      lens.at<std::int64_t>({0}) = 700;
      for (AttentionOptions options :
           {AttentionOptions{}, AttentionOptions{.causal = Causal::bottom_right}, AttentionOptions{.valid_lens = lens},
            AttentionOptions{.causal = Causal::top_left, .sinks = sinks},
            AttentionOptions{.window = Window{300, 10}, .sinks = sinks}}) {
        options.engine = Engine::cuda;
        const Call call = inputs.call(options);
        const Results results = call.run();
        expect_forward(call, results);
        EXPECT_TRUE(same_bits(call.run(), results));
      }
    }
}

// Scores so large that a rounded reference would be off by whole powers, and parts that differ by more than weights
// can.
TEST_F(CudaSplit, keeps_scores_of_any_size_apart) {
  Inputs inputs = random_inputs(
      {.batch = 1, .heads = 1, .kv_heads = 1, .queries = 70, .keys = 3000, .head_dim = 64, .value_dim = 64},
      DType::bf16);
  for (double size : {30.0, 3000.0}) {
    for (std::int64_t i = 0; i < 70; ++i) set(inputs.q, {0, 0, i, 63}, size);
    for (std::int64_t j = 0; j < 3000; ++j) set(inputs.k, {0, 0, j, 63}, j < 1500 ? size : size / 2);
    const Call call = inputs.call({.engine = Engine::cuda});
    expect_forward(call, call.run());
  }
}

TEST_F(CudaSplit, keeps_what_is_forbidden_out_of_every_part) {
  for (std::int64_t dim : {64, 128}) {
    Inputs inputs = random_inputs(
        {.batch = 1, .heads = 2, .kv_heads = 2, .queries = 130, .keys = 2300, .head_dim = dim, .value_dim = dim},
        DType::bf16);
    set(inputs.v, {0, 0, 2250, 3}, NAN);
    set(inputs.v, {0, 1, 40, 5}, INFINITY);
    set(inputs.k, {0, 1, 2290, 5}, NAN);
    for (Causal causal : {Causal::bottom_right, Causal::top_left}) {
      const Call call = inputs.call({.causal = causal, .engine = Engine::cuda});
      expect_forward(call, call.run());
    }
  }
}

// A pack's sequences have their bits in any pack, and an invariant batch has those.
TEST_F(CudaSplit, leaves_packs_and_invariant_batches_their_bits) {
  const Shape shape{
      .batch = 3, .heads = 2, .kv_heads = 1, .queries = 40, .keys = 4000, .head_dim = 64, .value_dim = 64};
  const Inputs inputs = random_inputs(shape, DType::bf16);
  const Call whole = inputs.call({.engine = Engine::cuda, .batch_invariant = true});
  const auto item = [](const Tensor& tensor) { return tensor.view().slice(0, 1, 2); };
  const Call alone{item(inputs.q), item(inputs.k), item(inputs.v), whole.options, {}};
  EXPECT_TRUE(same_bits(alone.run().out, item(whole.run().out)));
}

// Up to four tiles of 16 rows share a kv head; the last one is not full, and a query's heads lie in two of them.
TEST_F(CudaSplit, decodes_large_groups_of_heads) {
  struct Rows {
    std::int64_t group, queries;
  };
  for (const Rows& rows : {Rows{64, 1}, Rows{40, 1}, Rows{8, 5}, Rows{16, 3}, Rows{20, 3}})
    for (std::int64_t dim : {64, 128}) {
      const Shape shape{.batch = 2,
                        .heads = 2 * rows.group,
                        .kv_heads = 2,
                        .queries = rows.queries,
                        .keys = 1500,
                        .head_dim = dim,
                        .value_dim = dim};
      expect_split(shape, "decode");
      const Inputs inputs = random_inputs(shape, DType::bf16);
      const Tensor sinks = filled({shape.heads}, DType::f32, 0.5);
      for (AttentionOptions options :
           {AttentionOptions{}, AttentionOptions{.causal = Causal::bottom_right, .sinks = sinks},
            AttentionOptions{.causal = Causal::bottom_right, .batch_invariant = true}}) {
        options.engine = Engine::cuda;
        const Call call = inputs.call(options);
        const Results results = call.run();
        expect_forward(call, results);
        EXPECT_TRUE(same_bits(call.run(), results));
      }
    }
}

// Few kv heads: their query heads are shared out, and the parts of dk and dv added up.
TEST_F(CudaSplit, of_query_heads_adds_up_to_the_gradients_of_their_kv_head) {
  for (std::int64_t dim : {64, 128})
    for (std::int64_t kv_heads : {1, 2}) {
      const Shape shape{.batch = 1,
                        .heads = 12,
                        .kv_heads = kv_heads,
                        .queries = 150,
                        .keys = 300,
                        .head_dim = dim,
                        .value_dim = dim};
      if (on_hopper()) {
        alignas(16) static double anything[2];
        const ConstTensorView q(anything, DType::bf16, {1, 12, 150, dim}, Device{DeviceType::cuda, 0});
        const ConstTensorView k(anything, DType::bf16, {1, kv_heads, 300, dim}, Device{DeviceType::cuda, 0});
        const Plan plan = explain(q, k, k, {}, {.backward = true});
        EXPECT_NE(plan.kernel.find(kv_heads == 1 ? "in 12 parts" : "in 6 parts"), std::string::npos) << plan.kernel;
      }
      const Inputs inputs = random_inputs(shape, DType::bf16);
      for (Causal causal : {Causal::none, Causal::bottom_right}) {
        const Call call = inputs.call({.causal = causal, .engine = Engine::cuda});
        Random random(5);
        const Tensor grad_out = normal(call.out_sizes(), DType::bf16, random);
        const Results results = call.run();
        GradientTensors gradients = call.gradients(grad_out, results);
        expect_backward(call, grad_out, gradients);
        for (int run = 0; run < 20; ++run) EXPECT_TRUE(same_bits(call.gradients(grad_out, results), gradients));
      }
    }
}

// Head dims between 128 and 256 have tiles of their own up to 192, in every kind of kernel.
TEST_F(CudaSplit, or_not_heads_of_width_136_to_192_are_within_the_contracts_bounds) {
  for (std::int64_t dim : {136, 160, 192}) {
    const Inputs inputs = random_inputs(
        {.batch = 2, .heads = 4, .kv_heads = 2, .queries = 200, .keys = 333, .head_dim = dim, .value_dim = dim},
        dim == 160 ? DType::f16 : DType::bf16);
    Random random(4);
    Tensor mask({2, 1, 200, 333}, DType::b8);
    fill_bool(mask, random, 0.7);
    const Tensor bias = normal({1, 4, 200, 333}, DType::bf16, random), sinks = filled({4}, DType::f32, 0.3);
    for (AttentionOptions options :
         {AttentionOptions{}, AttentionOptions{.causal = Causal::bottom_right, .sinks = sinks},
          AttentionOptions{.softcap = 5.0}, AttentionOptions{.mask = mask}, AttentionOptions{.bias = bias},
          AttentionOptions{.mask = mask, .dropout = 0.3, .seed = 5}}) {
      options.engine = Engine::cuda;
      expect_contract(inputs.call(options));
    }
  }
}

// Few queries and many keys: more key tiles add to a query tile than run at once, and those of all heads take turns.
TEST_F(CudaSplit, of_many_keys_among_blocks_adds_up_to_the_gradients_of_few_queries) {
  for (std::int64_t dim : {64, 128})
    for (std::int64_t queries : {40, 300}) {
      const Inputs inputs = random_inputs(
          {.batch = 2, .heads = 4, .kv_heads = 2, .queries = queries, .keys = 2600, .head_dim = dim, .value_dim = dim},
          DType::bf16);
      Tensor lens({2}, DType::i64);
      lens.at<std::int64_t>({0}) = 2600;
      lens.at<std::int64_t>({1}) = 700;
      for (AttentionOptions options : {AttentionOptions{}, AttentionOptions{.causal = Causal::bottom_right},
                                       AttentionOptions{.valid_lens = lens}}) {
        options.engine = Engine::cuda;
        const Call call = inputs.call(options);
        Random random(7);
        const Tensor grad_out = normal(call.out_sizes(), DType::bf16, random);
        const Results results = call.run();
        GradientTensors gradients = call.gradients(grad_out, results);
        expect_backward(call, grad_out, gradients);
        for (int run = 0; run < 20; ++run) EXPECT_TRUE(same_bits(call.gradients(grad_out, results), gradients));
      }
    }
}

// Each row of a tile has its own head's mask, bias and slope.
TEST_F(CudaSplit, decodes_with_masks_biases_and_slopes) {
  for (std::int64_t group : {1, 4})
    for (std::int64_t dim : {64, 128}) {
      const Shape shape{
          .batch = 2, .heads = 2 * group, .kv_heads = 2, .queries = 3, .keys = 1500, .head_dim = dim, .value_dim = dim};
      Inputs inputs = random_inputs(shape, group == 1 ? DType::bf16 : DType::f16);
      for (const OptionSet& set : all_kinds(shape)) {
        AttentionOptions options = set.options;
        options.engine = Engine::cuda;
        const Call call = inputs.call(options);
        SCOPED_TRACE(set.name);
        const Results results = call.run();
        expect_forward(call, results);
        EXPECT_TRUE(same_bits(call.run(), results));
      }
    }
}

}  // namespace
}  // namespace headway::test
