// Short sequences, and few queries over many keys, on the CUDA engine: kernels whose operands go from global memory
// straight to registers, and of f32 teams of warps and blocks that share a row's keys.
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "attention/cuda_engine.h"
#include "engines/cuda/pretended_device.h"
#include "support/inputs.h"

namespace headway::test {
namespace {

class CudaSmall : public CudaEngine {
 protected:
  static void expect_result_and_the_same_bits_again(const Call& call) {
    const Results results = call.run();
    expect_forward(call, results);
    EXPECT_TRUE(same_bits(call.run(), results));
  }

  static void expect_every_option(const Shape& shape, DType dtype) {
    const Inputs inputs = random_inputs(shape, dtype);
    for (const OptionSet& kind : all_kinds(shape)) {
      SCOPED_TRACE(testing::Message() << kind.name << ' ' << name(dtype) << ' ' << shape.queries << " x " << shape.keys
                                      << ", " << shape.heads << '/' << shape.kv_heads << " heads of " << shape.head_dim
                                      << '/' << shape.value_dim);
      AttentionOptions options = kind.options;
      options.engine = Engine::cuda;
      expect_result_and_the_same_bits_again(inputs.call(options));
    }
  }
};

Plan plan_of(const Shape& shape, DType dtype, const AttentionOptions& options = {}) {
  alignas(16) static double anything[2];
  const auto view = [&](std::int64_t heads, std::int64_t length, std::int64_t dim) {
    return ConstTensorView(anything, dtype, {shape.batch, heads, length, dim}, Device{DeviceType::cuda, 0});
  };
  return explain(view(shape.heads, shape.queries, shape.head_dim), view(shape.kv_heads, shape.keys, shape.head_dim),
                 view(shape.kv_heads, shape.keys, shape.value_dim), options);
}

std::string kernel_of(const Shape& shape, const AttentionOptions& options = {}) {
  return plan_of(shape, DType::bf16, options).kernel;
}

// Which calls go where, on a Hopper that need not be here.
TEST(CudaSmallPlan, takes_short_sequences_and_few_queries_and_leaves_what_it_cannot_do_the_same_way) {
  const cuda::PretendedDevice device({9, 0, 132, 227 * 1024});
  const Shape few{
      .batch = 228, .heads = 32, .kv_heads = 32, .queries = 15, .keys = 15, .head_dim = 160, .value_dim = 160};
  EXPECT_EQ(kernel_of(few), "direct_forward");
  EXPECT_EQ(kernel_of(few, {.batch_invariant = true}).find("direct"), std::string::npos);
  const Shape odd{.batch = 2, .heads = 2, .kv_heads = 2, .queries = 15, .keys = 15, .head_dim = 20, .value_dim = 20};
  EXPECT_EQ(kernel_of(odd).find("direct"), std::string::npos);
  const Shape decode{
      .batch = 3, .heads = 16, .kv_heads = 16, .queries = 1, .keys = 3136, .head_dim = 256, .value_dim = 256};
  EXPECT_NE(kernel_of(decode).find("decode on tensor cores"), std::string::npos);
  EXPECT_EQ(plan_of(decode, DType::f32).kernel, "decode in exact f32");
  const Shape many{
      .batch = 1, .heads = 8, .kv_heads = 8, .queries = 2048, .keys = 2048, .head_dim = 128, .value_dim = 128};
  EXPECT_NE(kernel_of(many).find("hopper_forward"), std::string::npos);
  const Plan split =
      plan_of({.batch = 1, .heads = 16, .kv_heads = 4, .queries = 1, .keys = 14368, .head_dim = 64, .value_dim = 64},
              DType::f32);
  EXPECT_EQ(split.splits, 8);
}

// Every number of keys that a warp's tile may have, not full; rows of several heads in a tile; tiles that are not full.
TEST_F(CudaSmall, sequences_obey_every_option) {
  for (const Shape& shape :
       {Shape{.heads = 4, .kv_heads = 4, .queries = 15, .keys = 15, .head_dim = 160, .value_dim = 160},
        Shape{.heads = 6, .kv_heads = 2, .queries = 9, .keys = 31, .head_dim = 72, .value_dim = 200},
        Shape{.heads = 4, .kv_heads = 1, .queries = 21, .keys = 57, .head_dim = 128, .value_dim = 64},
        Shape{.heads = 2, .kv_heads = 1, .queries = 50, .keys = 128, .head_dim = 64, .value_dim = 8},
        Shape{.heads = 2, .kv_heads = 2, .queries = 34, .keys = 233, .head_dim = 256, .value_dim = 256}})
    for (const DType dtype : {DType::bf16, DType::f16}) expect_every_option(shape, dtype);
}

// One block and clusters of blocks; rounds of which the last is not full; groups of heads in several tiles of rows.
TEST_F(CudaSmall, numbers_of_queries_obey_every_option) {
  for (const Shape& shape :
       {Shape{.batch = 1, .heads = 2, .kv_heads = 1, .queries = 1, .keys = 67, .head_dim = 64, .value_dim = 64},
        Shape{.batch = 2, .heads = 8, .kv_heads = 2, .queries = 3, .keys = 411, .head_dim = 48, .value_dim = 136},
        Shape{.batch = 1, .heads = 2, .kv_heads = 2, .queries = 16, .keys = 3000, .head_dim = 256, .value_dim = 256},
        Shape{.batch = 1, .heads = 40, .kv_heads = 1, .queries = 1, .keys = 1100, .head_dim = 128, .value_dim = 128},
        Shape{.batch = 40, .heads = 8, .kv_heads = 8, .queries = 1, .keys = 700, .head_dim = 64, .value_dim = 64}})
    for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) expect_every_option(shape, dtype);
}

// Few queries over keys in one block, in clusters of 2 to 8 of them, or in splits that another kernel merges; widths of
// one to four panels of 64 features, not full; rows of grouped heads in one tile or several; layouts, masks and biases.
TEST_F(CudaSmall, numbers_of_queries_are_within_the_bounds_however_their_keys_are_split) {
  const auto between = [](Random& random, std::int64_t first, std::int64_t last) {
    return std::uniform_int_distribution<std::int64_t>(first, last)(random);
  };
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    Random random(seed);
    Shape shape;
    shape.batch = between(random, 1, 4);
    shape.kv_heads = between(random, 1, 4);
    shape.heads = shape.kv_heads * (std::int64_t{1} << between(random, 0, 4));
    shape.queries = between(random, 1, 5);
    shape.keys = std::max(shape.queries, between(random, 33, seed % 3 == 0 ? 5000 : 640));
    shape.head_dim = 8 * between(random, 1, 32);
    shape.value_dim = seed % 4 == 0 ? 8 * between(random, 1, 32) : shape.head_dim;
    const DType dtype = seed % 2 == 0 ? DType::bf16 : DType::f16;
    const Inputs inputs = random_inputs(shape, dtype, seed);
    const std::vector<OptionSet> kinds = all_kinds(shape);
    const OptionSet& kind =
        kinds[static_cast<std::size_t>(between(random, 0, static_cast<std::int64_t>(kinds.size()) - 1))];
    SCOPED_TRACE(testing::Message() << "seed " << seed << ", " << kind.name << ", " << shape.batch << " x "
                                    << shape.heads << '/' << shape.kv_heads << " heads, " << shape.queries << " x "
                                    << shape.keys << ", " << shape.head_dim << '/' << shape.value_dim);
    AttentionOptions options = kind.options;
    options.engine = Engine::cuda;
    expect_result_and_the_same_bits_again(inputs.call(options));
    const Call plain =
        inputs.call({.causal = Causal::bottom_right, .engine = Engine::cuda, .batch_invariant = seed % 5 == 0});
    expect_result_and_the_same_bits_again(plain);
    // Where the copy engine cannot read keys, another kernel for few rows has the same splits and order of sums.
    const std::int64_t group = shape.heads / shape.kv_heads, tiles = (group * shape.queries + 15) / 16;
    if (tiles <= std::max<std::int64_t>(1, std::min<std::int64_t>(4, group / 2))) {
      Strided key(inputs.k.sizes(), dtype, Layout::misaligned);
      copy(inputs.k, key.view());
      EXPECT_TRUE(same_bits(Call{inputs.q, key.view(), inputs.v, plain.options, {}}.run(), plain.run()));
    }
  }
}

// Equal terms, which a plain running sum would round the same way every time.
TEST_F(CudaSmall, sums_of_f32_do_not_drift_over_many_keys) {
  for (const std::int64_t queries : {1, 3, 9}) {
    constexpr std::int64_t keys = 300000;
    const Tensor q = filled({1, 1, queries, 16}, DType::f32, 0.3), k = filled({1, 1, keys, 16}, DType::f32, 0.1),
                 v = filled({1, 1, keys, 12}, DType::f32, 0.7);
    const Call call{q, k, v, {.engine = Engine::cuda}, {}};
    expect_forward(call, call.run());
  }
}

TEST_F(CudaSmall, problems_may_lie_in_memory_in_any_way) {
  Random random(4);
  for (const std::int64_t keys : {20, 700})
    for (const Layout layout : {Layout::heads_inside, Layout::gaps, Layout::reversed, Layout::misaligned,
                                Layout::repeated_heads, Layout::repeated_rows})
      for (const Layout out_layout : {Layout::contiguous, Layout::heads_inside, Layout::gaps, Layout::misaligned}) {
        SCOPED_TRACE(std::string(name(layout)) + " to " + name(out_layout) + " keys " + std::to_string(keys));
        const Strided q = normal_strided({2, 4, 3, 64}, DType::bf16, layout, random);
        const Strided k = normal_strided({2, 2, keys, 64}, DType::bf16, layout, random);
        const Strided v = normal_strided({2, 2, keys, 40}, DType::bf16, layout, random);
        Strided out({2, 4, 3, 40}, DType::bf16, out_layout);
        const Call call{q.view(), k.view(), v.view(), {.causal = Causal::bottom_right, .engine = Engine::cuda}, {}};
        call.forward(out.view());
        expect_forward(call, out.view());
        EXPECT_TRUE(out.surroundings_intact());
      }
}

// Values that no row, or only some rows, may see are not finite; the others have the bits that they have without them.
TEST_F(CudaSmall, problems_keep_what_is_forbidden_out) {
  for (const std::int64_t keys : {16, 30, 64, 120, 250, 900, 901}) {
    const std::int64_t queries = keys >= 900 ? 8 : 14;
    const Shape shape{
        .batch = 1, .heads = 4, .kv_heads = 2, .queries = queries, .keys = keys, .head_dim = 64, .value_dim = 136};
    const DType dtype = keys == 901 ? DType::f32 : DType::bf16;
    const Inputs clean = random_inputs(shape, dtype);
    Inputs poisoned = random_inputs(shape, dtype);
    for (std::int64_t g = 0; g < 2; ++g) {
      set(poisoned.v, {0, g, keys - 3, 5}, NAN);
      set(poisoned.v, {0, g, keys - 1, 130}, INFINITY);
      set(poisoned.k, {0, g, keys - 2, 7}, NAN);
    }
    const AttentionOptions options{.causal = Causal::bottom_right, .engine = Engine::cuda};
    const Call call{poisoned.q, poisoned.k, poisoned.v, options, {}};
    const Results results = call.run();
    expect_forward(call, results);
    const auto rest = [&](const Tensor& out) { return out.view().slice(2, 0, queries - 3); };
    EXPECT_TRUE(same_bits(rest(results.out), rest(clean.call(options).run().out))) << keys;
  }
}

// Rows without keys beside rows with some, with a sink and without; sequences of no keys at all.
TEST_F(CudaSmall, problems_may_have_rows_without_keys) {
  for (const std::int64_t keys : {12, 100, 1000}) {
    const Inputs inputs = random_inputs(
        {.batch = 3, .heads = 4, .kv_heads = 2, .queries = 5, .keys = keys, .head_dim = 64, .value_dim = 64},
        DType::f16);
    const Tensor lens = Tensor::of<std::int64_t>({3}, {0, keys / 2, keys}),
                 rows = Tensor::of<std::int64_t>({3}, {5, 2, 0});
    const Tensor sinks = filled({4}, DType::f32, 0.4);
    for (const AttentionOptions& options :
         {AttentionOptions{.valid_lens = lens}, AttentionOptions{.valid_lens = lens, .sinks = sinks},
          AttentionOptions{.query_lens = rows, .sinks = sinks},
          AttentionOptions{.causal = Causal::bottom_right, .valid_lens = lens, .query_lens = rows}}) {
      Call call = inputs.call(options);
      call.options.engine = Engine::cuda;
      expect_result_and_the_same_bits_again(call);
    }
  }
}

TEST_F(CudaSmall, problems_keep_scores_of_any_size_apart) {
  for (const std::int64_t keys : {40, 1500})
    for (const double size : {30.0, 3000.0, 1e18}) {
      Inputs inputs = random_inputs(
          {.batch = 1, .heads = 2, .kv_heads = 2, .queries = 7, .keys = keys, .head_dim = 64, .value_dim = 64},
          DType::bf16);
      for (std::int64_t i = 0; i < 7; ++i) set(inputs.q, {0, 0, i, 63}, size);
      for (std::int64_t j = 0; j < keys; ++j) set(inputs.k, {0, 0, j, 63}, j < keys / 2 ? size : size / 2);
      const Call call = inputs.call({.engine = Engine::cuda});
      expect_forward(call, call.run());
    }
}

TEST_F(CudaSmall, batches_give_each_item_its_bits_when_asked_to) {
  for (const std::int64_t keys : {15, 600}) {
    const Inputs inputs = random_inputs(
        {.batch = 9, .heads = 4, .kv_heads = 2, .queries = 3, .keys = keys, .head_dim = 64, .value_dim = 64},
        DType::bf16);
    const Call whole = inputs.call({.causal = Causal::bottom_right, .engine = Engine::cuda, .batch_invariant = true});
    const auto item = [](const Tensor& tensor) { return tensor.view().slice(0, 4, 5); };
    const Call alone{item(inputs.q), item(inputs.k), item(inputs.v), whole.options, {}};
    EXPECT_TRUE(same_bits(alone.run().out, item(whole.run().out)));
  }
}

// Sequences of 0, 1 and many tokens side by side.
TEST_F(CudaSmall, packs_are_within_the_bounds) {
  const Packing packing{{0, 1, 1, 14, 20}, {0, 3, 9, 59, 150}};
  Random random(8);
  const Tensor q = normal({20, 4, 64}, DType::bf16, random), k = normal({150, 2, 64}, DType::bf16, random),
               v = normal({150, 2, 72}, DType::bf16, random);
  for (const Causal causal : {Causal::none, Causal::bottom_right, Causal::top_left}) {
    const Call call{q, k, v, {.causal = causal, .engine = Engine::cuda}, packing};
    expect_forward(call, call.run());
  }
}

}  // namespace
}  // namespace headway::test
