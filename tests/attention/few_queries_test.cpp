// Few queries against many keys: an engine may cut the keys into chunks and share them between the heads of a group,
// and nobody can tell.
#include <gtest/gtest.h>

#include <cmath>

#include "headway/threads.h"
#include "support/inputs.h"

namespace headway::test {
namespace {

class FewQueries : public EngineTest {
 protected:
  ~FewQueries() override { set_threads(threads_before_); }

 private:
  int threads_before_ = get_threads();
};

// Several chunks of any likely size, none of them whole at the end.
const Shape several_chunks{
    .batch = 2, .heads = 4, .kv_heads = 2, .queries = 2, .keys = 1300, .head_dim = 24, .value_dim = 20};

TEST_P(FewQueries, of_any_number_against_any_number_of_keys_are_within_the_bounds) {
  const std::vector<Shape> shapes{
      {.batch = 1, .heads = 1, .kv_heads = 1, .queries = 1, .keys = 1, .head_dim = 129, .value_dim = 3},
      {.batch = 2, .heads = 8, .kv_heads = 1, .queries = 2, .keys = 127, .head_dim = 3, .value_dim = 129},
      {.batch = 1, .heads = 4, .kv_heads = 1, .queries = 16, .keys = 128, .head_dim = 80, .value_dim = 1},
      {.batch = 3, .heads = 4, .kv_heads = 4, .queries = 5, .keys = 513, .head_dim = 1, .value_dim = 80},
      {.batch = 1, .heads = 32, .kv_heads = 1, .queries = 2, .keys = 600, .head_dim = 16, .value_dim = 33},
      {.batch = 1, .heads = 8, .kv_heads = 2, .queries = 1, .keys = 2048, .head_dim = 128, .value_dim = 128},
      {.batch = 1, .heads = 8, .kv_heads = 1, .queries = 1, .keys = 2049, .head_dim = 64, .value_dim = 64},
      {.batch = 1, .heads = 2, .kv_heads = 2, .queries = 7, .keys = 5000, .head_dim = 5, .value_dim = 12},
      {.batch = 1, .heads = 1, .kv_heads = 1, .queries = 1, .keys = 33000, .head_dim = 8, .value_dim = 4},
  };
  for (DType type : float_types)
    for (const Shape& shape : shapes) {
      SCOPED_TRACE(testing::Message() << shape.heads << '/' << shape.kv_heads << " heads, " << shape.queries << " x "
                                      << shape.keys << ", " << shape.head_dim << '/' << shape.value_dim << ' ' << type);
      const Inputs inputs = random_inputs(shape, type);
      const Call call = inputs.call(on_engine());
      expect_forward(call, call.run(true));
    }
}

TEST_P(FewQueries, obey_every_option) {
  for (DType type : float_types)
    for (const OptionSet& kind : all_kinds(several_chunks)) {
      SCOPED_TRACE(kind.name + std::string(" ") + name(type));
      const Inputs inputs = random_inputs(several_chunks, type);
      const Call call = inputs.call(on_engine(kind.options));
      expect_forward(call, call.run(true));
    }
}

TEST_P(FewQueries, may_have_a_window_that_leaves_whole_stretches_of_keys_out) {
  const Inputs inputs = random_inputs({.batch = 1, .queries = 2, .keys = 5000});
  const Tensor lens = Tensor::of<std::int64_t>({1, 2}, {40, 1030});
  for (const Window window : {Window{100, 0}, Window{4000, 0}, Window{0, 0}}) {
    for (const Causal causal : {Causal::top_left, Causal::bottom_right}) {
      const Call call = inputs.call(on_engine({.causal = causal, .window = window}));
      expect_forward(call, call.run(true));
    }
  }
  const Call call = inputs.call(on_engine({.window = Window{4900, 4900}, .valid_lens = lens}));
  expect_forward(call, call.run(true));
}

TEST_P(FewQueries, with_no_key_allowed_give_zero) {
  const Inputs inputs = random_inputs({.batch = 2, .queries = 2, .keys = 1300});
  const Tensor nothing = filled({2, 1, 1, 1300}, DType::b8, 0);
  const Results results = inputs.call(on_engine({.mask = nothing})).run(true);
  for (Real value : read(results.out).values) EXPECT_EQ(value, 0);
  for (Real value : read(*results.weights).values) EXPECT_EQ(value, 0);
  for (Real value : read(results.lse).values) EXPECT_EQ(value, -INFINITY);
}

TEST_P(FewQueries, may_lack_a_batch_or_features) {
  for (const Shape& shape :
       {Shape{.batch = 0, .queries = 1, .keys = 600}, Shape{.queries = 1, .keys = 600, .head_dim = 0},
        Shape{.queries = 1, .keys = 600, .value_dim = 0}}) {
    const Inputs inputs = random_inputs(shape);
    const Call call = inputs.call(on_engine());
    expect_forward(call, call.run(true));
  }
}

TEST_P(FewQueries, of_a_million_equal_keys_give_their_value) {
  constexpr std::int64_t keys = 1000003;
  const Tensor q({1, 1, 1, 2});
  const Tensor one_key = filled({1, 1, 1, 2}, DType::f32, 1.0);
  for (const double value : {0.1, 1.0 / 3, 1.7, 1e18}) {
    const Tensor one_value = filled({1, 1, 1, 3}, DType::f32, value);
    const Call call{q, one_key.view().expand({1, 1, keys, 2}), one_value.view().expand({1, 1, keys, 3}), on_engine()};
    const Results results = call.run();
    const double exact = rounded(DType::f32, value);
    EXPECT_NEAR(get(results.out, {0, 0, 0, 1}), exact, 16 * 0x1p-24 * exact);
    EXPECT_NEAR(get(results.lse, {0, 0, 0}), std::log(static_cast<double>(keys)), 16 * 0x1p-24 + 0x1p-23 * 14);
  }
}

TEST_P(FewQueries, have_the_same_bits_on_any_number_of_threads) {
  for (DType type : {DType::f32, DType::bf16})
    for (const OptionSet& kind : all_kinds(several_chunks)) {
      SCOPED_TRACE(kind.name);
      const Inputs inputs = random_inputs(several_chunks, type);
      const Call call = inputs.call(on_engine(kind.options));
      set_threads(1);
      const Results alone = call.run(true);
      for (int threads : {2, 3, 7, 16}) {
        set_threads(threads);
        EXPECT_TRUE(same_bits(call.run(true), alone)) << threads << " threads";
      }
    }
}

TEST_P(FewQueries, have_the_same_bits_in_a_batch_of_32_and_alone) {
  for (DType type : float_types) {
    const Inputs inputs =
        random_inputs({.batch = 32, .heads = 4, .kv_heads = 1, .queries = 1, .keys = 700, .head_dim = 20}, type);
    const Results all = inputs.call(on_engine()).run();
    for (std::int64_t b : {0, 17, 31}) {
      const auto item = [b](const Tensor& tensor) { return tensor.view().slice(0, b, b + 1); };
      const Results one = Call{item(inputs.q), item(inputs.k), item(inputs.v), on_engine(), {}}.run();
      EXPECT_TRUE(same_bits(one.out, item(all.out)) && same_bits(one.lse, item(all.lse)));
    }
  }
}

TEST_P(FewQueries, have_the_same_bits_from_any_layout) {
  const Dims query{2, 4, 2, 40}, key{2, 2, 700, 40};
  for (DType type : float_types) {
    const Inputs inputs = random_inputs(
        {.batch = 2, .heads = 4, .kv_heads = 2, .queries = 2, .keys = 700, .head_dim = 40, .value_dim = 40}, type);
    const Results plain = inputs.call(on_engine()).run(true);
    for (const Layout layout : {Layout::heads_inside, Layout::gaps, Layout::reversed, Layout::misaligned}) {
      SCOPED_TRACE(name(layout));
      Strided q(query, type, layout), k(key, type, layout), v(key, type, layout);
      copy(inputs.q, q.view());
      copy(inputs.k, k.view());
      copy(inputs.v, v.view());
      EXPECT_TRUE(same_bits(Call{q.view(), k.view(), v.view(), on_engine(), {}}.run(true), plain));
    }
    // Keys stored by feature.
    const Tensor transposed = convert(inputs.k.view().transpose(2, 3), type);
    EXPECT_TRUE(
        same_bits(Call{inputs.q, transposed.view().transpose(2, 3), inputs.v, on_engine(), {}}.run(true), plain));
  }
}

// Heads whose rows of a key lie side by side may be worked on in turns.
TEST_P(FewQueries, have_the_same_bits_from_heads_side_by_side_under_every_option) {
  const Shape shape{
      .batch = 2, .heads = 12, .kv_heads = 6, .queries = 2, .keys = 1300, .head_dim = 24, .value_dim = 20};
  for (DType type : float_types)
    for (const OptionSet& kind : all_kinds(shape)) {
      SCOPED_TRACE(kind.name + std::string(" ") + name(type));
      const Inputs inputs = random_inputs(shape, type);
      Strided k(inputs.k.sizes(), type, Layout::heads_inside), v(inputs.v.sizes(), type, Layout::heads_inside);
      copy(inputs.k, k.view());
      copy(inputs.v, v.view());
      const Results plain = inputs.call(on_engine(kind.options)).run(true);
      EXPECT_TRUE(same_bits(Call{inputs.q, k.view(), v.view(), on_engine(kind.options), {}}.run(true), plain));
    }
}

TEST_P(FewQueries, of_any_width_are_within_the_bounds) {
  for (DType type : float_types)
    for (const std::int64_t width : {17, 32, 40, 48, 56, 72, 96, 112, 124, 160}) {
      SCOPED_TRACE(testing::Message() << width << ' ' << type);
      const Inputs inputs = random_inputs(
          {.batch = 1, .heads = 3, .kv_heads = 1, .queries = 1, .keys = 300, .head_dim = width, .value_dim = width},
          type);
      const Call call = inputs.call(on_engine());
      expect_forward(call, call.run(true));
    }
}

TEST_P(FewQueries, have_the_same_bits_in_a_pack_with_longer_and_shorter_sequences) {
  Random random(3);
  const std::vector<std::int64_t> starts_q{0, 1, 31, 34, 36}, starts_k{0, 900, 1500, 1520, 2720};
  for (DType type : float_types) {
    const Tensor q = normal({36, 4, 24}, type, random), k = normal({2720, 2, 24}, type, random);
    const Call pack{q, k, k, on_engine({.causal = Causal::bottom_right, .batch_invariant = true}),
                    Packing{starts_q, starts_k}};
    const Results results = pack.run();
    expect_forward(pack, results);
    for (std::size_t n = 0; n + 1 < starts_q.size(); ++n) {
      if (GetParam() == Engine::cuda) {  // a pack of its own: there packs and batches have different kernels
        const auto rows = [&](const Tensor& tensor, const std::vector<std::int64_t>& starts) {
          return tensor.view().slice(0, starts[n], starts[n + 1]);
        };
        const Packing own{{0, starts_q[n + 1] - starts_q[n]}, {0, starts_k[n + 1] - starts_k[n]}};
        const Results alone = Call{rows(q, starts_q), rows(k, starts_k), rows(k, starts_k), pack.options, own}.run();
        EXPECT_TRUE(same_bits(alone.out, rows(results.out, starts_q))) << "sequence " << n;
        EXPECT_TRUE(same_bits(alone.lse, results.lse.view().slice(1, starts_q[n], starts_q[n + 1])));
        continue;
      }
      const auto part = [&](const Tensor& tensor, const std::vector<std::int64_t>& starts) {
        return tensor.view().slice(0, starts[n], starts[n + 1]).transpose(0, 1).unsqueeze(0);
      };
      const Results alone = Call{part(q, starts_q), part(k, starts_k), part(k, starts_k), pack.options, {}}.run();
      EXPECT_TRUE(same_bits(alone.out, part(results.out, starts_q))) << "sequence " << n;
      EXPECT_TRUE(same_bits(alone.lse, results.lse.view().slice(1, starts_q[n], starts_q[n + 1]).unsqueeze(0)));
    }
  }
}

TEST_P(FewQueries, keep_tiny_and_huge_numbers_of_half_types) {
  for (const double size : {0x1p-120, 0x1p-90, 0x1p70}) {
    Random random(8);
    const Tensor q = normal({1, 4, 2, 40}, DType::bf16, random, size);
    const Tensor k = normal({1, 1, 600, 40}, DType::bf16, random, 1 / size);
    const Tensor v = normal({1, 1, 600, 8}, DType::bf16, random, 0x1p-110);
    const Call call{q, k, v, on_engine(), {}};
    expect_forward(call, call.run(true));
  }
}

ON_EVERY_ENGINE(FewQueries);

TEST(FewQueriesOnTheCpu, are_explained_with_their_split) {
  const auto plan = [](std::int64_t batch, std::int64_t queries, std::int64_t keys, bool weights = false) {
    const Tensor one({1, 1, 1, 64});
    return explain(one.view().expand({batch, 8, queries, 64}), one.view().expand({batch, 2, keys, 64}),
                   one.view().expand({batch, 2, keys, 64}), {.engine = Engine::cpu}, {.weights = weights});
  };
  const Plan decode = plan(1, 1, 8192);
  EXPECT_NE(decode.kernel.find("chunks of keys"), std::string::npos) << decode.kernel;
  EXPECT_EQ(decode.query_block, 4);
  EXPECT_GE(decode.tasks, 2 * 2);
  EXPECT_EQ(decode.tasks, 2 * ((8192 + decode.key_block - 1) / decode.key_block));
  EXPECT_EQ(plan(7, 1, 8192).key_block, decode.key_block);
  EXPECT_EQ(plan(7, 1, 8192, true).kernel, decode.kernel);
  EXPECT_LT(plan(1, 1, 1 << 30).scratch_bytes, 1e8);
  EXPECT_NE(plan(1, 400, 8192).kernel, decode.kernel);
  EXPECT_NE(plan(1, 1, 16).kernel, decode.kernel);
}

}  // namespace
}  // namespace headway::test
