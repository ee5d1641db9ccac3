// The same bits whatever surrounds the computation: repetition, the rest of the batch or pack, other outputs.
#include <gtest/gtest.h>

#include "support/inputs.h"

namespace headway::test {
namespace {

// Longer than any block that an engine is likely to walk in.
const Shape large{.batch = 3, .heads = 4, .kv_heads = 2, .queries = 70, .keys = 150, .head_dim = 40, .value_dim = 24};

// Few queries against many keys, which an engine may compute in another way.
const Shape few_queries{
    .batch = 3, .heads = 4, .kv_heads = 2, .queries = 2, .keys = 530, .head_dim = 40, .value_dim = 24};

class Reproducible : public EngineTest {
 protected:
  // The CUDA engine has to be asked for bits that do not depend on the rest of the batch.
  AttentionOptions on_engine(AttentionOptions options = {}) const {
    options.batch_invariant = true;
    return EngineTest::on_engine(options);
  }

  static Tensor grad_out_of(const Call& call) {
    Random random(11);
    return normal(call.out_sizes(), call.q.dtype(), random);
  }
};

// What the CPU promises on top: bits that depend on no stride.
class ReproducibleOnHost : public Reproducible {};

// The batch items [begin, end) of a view whose first axis is the batch.
std::optional<ConstTensorView> items(const std::optional<ConstTensorView>& view, std::int64_t begin, std::int64_t end) {
  if (!view || view->size(0) == 1) return view;
  return view->slice(0, begin, end);
}

AttentionOptions item_options(AttentionOptions options, std::int64_t begin, std::int64_t end) {
  options.mask = items(options.mask, begin, end);
  options.bias = items(options.bias, begin, end);
  options.valid_lens = items(options.valid_lens, begin, end);
  options.query_lens = items(options.query_lens, begin, end);
  return options;
}

TEST_P(Reproducible, the_same_call_gives_the_same_bits) {
  for (const Shape& shape : {large, few_queries})
    for (DType type : float_types)
      for (const OptionSet& kind : all_kinds(shape)) {
        if (kind.name != "all masks" && kind.name != "all modifiers") continue;
        const Inputs inputs = random_inputs(shape, type);
        const Call call = inputs.call(on_engine(kind.options));
        const Tensor grad_out = grad_out_of(call);
        const Results results = call.run(true);
        const GradientTensors gradients = call.gradients(grad_out, results);
        EXPECT_TRUE(same_bits(call.run(true), results));
        EXPECT_TRUE(same_bits(call.gradients(grad_out, results), gradients));
      }
}

TEST_P(Reproducible, a_batch_item_has_the_same_bits_alone) {
  for (DType type : {DType::f32, DType::bf16})
    for (const OptionSet& kind : all_kinds(large)) {
      if (kind.options.dropout > 0) continue;  // its mask depends on the item's number
      SCOPED_TRACE(kind.name);
      const Inputs inputs = random_inputs(large, type);
      const Call whole = inputs.call(on_engine(kind.options));
      const Tensor grad_out = grad_out_of(whole);
      const Results results = whole.run();
      const GradientTensors gradients = whole.gradients(grad_out, results);
      const auto item = [](const Tensor& tensor) { return tensor.view().slice(0, 1, 2); };
      const Call alone{item(inputs.q), item(inputs.k), item(inputs.v), item_options(whole.options, 1, 2), {}};
      const Results alone_results = alone.run();
      EXPECT_TRUE(same_bits(alone_results.out, item(results.out)));
      EXPECT_TRUE(same_bits(alone_results.lse, item(results.lse)));
      const GradientTensors alone_gradients = alone.gradients(item(grad_out), alone_results);
      EXPECT_TRUE(same_bits(alone_gradients.dq, item(gradients.dq)));
      EXPECT_TRUE(same_bits(alone_gradients.dk, item(gradients.dk)));
      EXPECT_TRUE(same_bits(alone_gradients.dv, item(gradients.dv)));
    }
}

// One sequence that is done at once, and one that is too long for that.
const Shape in_a_batch[] = {
    {.batch = 32, .heads = 4, .kv_heads = 2, .queries = 21, .keys = 37, .head_dim = 24, .value_dim = 16},
    {.batch = 32, .heads = 2, .kv_heads = 2, .queries = 9, .keys = 300, .head_dim = 8, .value_dim = 20}};

TEST_P(Reproducible, a_batch_of_32_changes_no_bit_of_an_item) {
  for (const Shape& shape : in_a_batch)
    for (DType type : {DType::f32, DType::bf16})
      for (const OptionSet& kind : all_kinds(shape)) {
        if (kind.name != "nothing" && kind.name != "all masks" && kind.name != "all modifiers") continue;
        SCOPED_TRACE(kind.name);
        AttentionOptions options = kind.options;
        options.dropout = 0;  // its mask depends on the item's number
        const Inputs inputs = random_inputs(shape, type);
        const Call whole = inputs.call(on_engine(options));
        const Tensor grad_out = grad_out_of(whole);
        const Results results = whole.run();
        const GradientTensors gradients = whole.gradients(grad_out, results);
        for (std::int64_t b : {0, 13, 31}) {
          const auto item = [&](const Tensor& tensor) { return tensor.view().slice(0, b, b + 1); };
          const Call alone{item(inputs.q), item(inputs.k), item(inputs.v), item_options(whole.options, b, b + 1), {}};
          const Results alone_results = alone.run();
          EXPECT_TRUE(same_bits(alone_results.out, item(results.out)));
          EXPECT_TRUE(same_bits(alone_results.lse, item(results.lse)));
          const GradientTensors alone_gradients = alone.gradients(item(grad_out), alone_results);
          EXPECT_TRUE(same_bits(alone_gradients.dq, item(gradients.dq)));
          EXPECT_TRUE(same_bits(alone_gradients.dk, item(gradients.dk)));
          EXPECT_TRUE(same_bits(alone_gradients.dv, item(gradients.dv)));
        }
      }
}

TEST_P(Reproducible, two_hundred_calls_give_the_same_bits) {
  for (Shape shape : in_a_batch) {
    shape.batch = 3;
    for (const OptionSet& kind : all_kinds(shape)) {
      if (kind.name != "nothing" && kind.name != "all modifiers") continue;
      SCOPED_TRACE(kind.name);
      const Inputs inputs = random_inputs(shape);
      const Call call = inputs.call(on_engine(kind.options));
      const Tensor grad_out = grad_out_of(call);
      const Results results = call.run();
      const GradientTensors gradients = call.gradients(grad_out, results);
      for (int repeat = 0; repeat < 200; ++repeat) {
        ASSERT_TRUE(same_bits(call.run(), results)) << repeat;
        ASSERT_TRUE(same_bits(call.gradients(grad_out, results), gradients)) << repeat;
      }
    }
  }
}

TEST_P(Reproducible, weights_and_lse_asked_for_or_not_change_nothing) {
  for (const Shape& shape : {large, few_queries})
    for (DType type : float_types)
      for (const OptionSet& kind : all_kinds(shape)) {
        SCOPED_TRACE(kind.name);
        if (kind.name != "all masks" && kind.name != "all modifiers" && kind.name != "nothing") continue;
        const Inputs inputs = random_inputs(shape, type);
        const Call call = inputs.call(on_engine(kind.options));
        const Results with = call.run(true), without = call.run(false);
        Tensor out(call.out_sizes(), type);
        call.forward(out);
        EXPECT_TRUE(same_bits(with.out, without.out) && same_bits(with.lse, without.lse) && same_bits(with.out, out));
      }
}

// Lengths that end inside a chunk of keys, at its end, and before the first chunk's; one item attends to nothing.
constexpr std::int64_t padded_lengths[] = {0, 20, 64, 130};

// True, or 0, where row i of item b may attend to key j: a padding mask that all rows share, or one in which every
// second row ends later.
Tensor padding(const Shape& shape, DType type, bool rows_differ) {
  Tensor result({shape.batch, 1, shape.queries, shape.keys}, type);
  for (std::int64_t b = 0; b < shape.batch; ++b)
    for (std::int64_t i = 0; i < shape.queries; ++i)
      for (std::int64_t j = 0; j < shape.keys; ++j) {
        const bool attends = j < padded_lengths[b] + (rows_differ && i % 2 == 1 ? 70 : 0);
        if (type == DType::b8)
          result.at<bool>({b, 0, i, j}) = attends;
        else
          result.at<float>({b, 0, i, j}) = attends ? 0.0f : -INFINITY;
      }
  return result;
}

TEST_P(ReproducibleOnHost, a_padding_mask_has_the_same_bits_broadcast_stored_and_as_a_bias) {
  for (const std::int64_t keys : {70, 230, 600})  // done at once, and block by block
    for (DType type : {DType::f32, DType::bf16})
      for (bool rows_differ : {false, true}) {
        SCOPED_TRACE(std::to_string(keys) + name(type) + (rows_differ ? " rows differ" : ""));
        const Shape shape{
            .batch = 4, .heads = 2, .kv_heads = 1, .queries = 40, .keys = keys, .head_dim = 40, .value_dim = 24};
        Inputs inputs = random_inputs(shape, type);
        const Tensor mask = padding(shape, DType::b8, rows_differ), bias = padding(shape, DType::f32, rows_differ);
        std::vector<AttentionOptions> ways{on_engine({.mask = mask}), on_engine({.bias = bias})};
        if (!rows_differ) {
          const Dims all = mask.sizes();
          ways.push_back(on_engine({.mask = mask.view().slice(2, 0, 1).expand(all)}));
          ways.push_back(on_engine({.bias = bias.view().slice(2, 0, 1).expand(all)}));
        }
        const Call first = inputs.call(ways[0]);
        const Tensor grad_out = grad_out_of(first);
        const Results results = first.run(true);
        const GradientTensors gradients = first.gradients(grad_out, results);
        for (const AttentionOptions& way : ways) {
          const Call call = inputs.call(way);
          const Results without_weights = call.run(false);
          EXPECT_TRUE(same_bits(call.run(true), results));
          EXPECT_TRUE(same_bits(without_weights.out, results.out) && same_bits(without_weights.lse, results.lse));
          const GradientTensors others = call.gradients(grad_out, results);
          EXPECT_TRUE(same_bits(others.dq, gradients.dq) && same_bits(others.dk, gradients.dk) &&
                      same_bits(others.dv, gradients.dv));
        }
      }
}

TEST_P(Reproducible, a_gradient_is_the_same_whether_the_others_are_asked_for_or_not) {
  const Inputs inputs = random_inputs(large);
  const Call call = inputs.call(on_engine({.causal = Causal::top_left}));
  const Tensor grad_out = grad_out_of(call);
  const Results results = call.run();
  const GradientTensors all = call.gradients(grad_out, results);
  Tensor dq(call.q.sizes()), dk(call.k.sizes()), dv(call.v.sizes());
  call.backward(grad_out, results.out, results.lse, {.dq = dq, .dk = {}, .dv = {}, .dbias = {}, .dsinks = {}});
  call.backward(grad_out, results.out, results.lse, {.dq = {}, .dk = dk, .dv = {}, .dbias = {}, .dsinks = {}});
  call.backward(grad_out, results.out, results.lse, {.dq = {}, .dk = {}, .dv = dv, .dbias = {}, .dsinks = {}});
  EXPECT_TRUE(same_bits(dq, all.dq) && same_bits(dk, all.dk) && same_bits(dv, all.dv));
}

// [B,H,S,D] seen as the pack [B*S,H,D] that holds the same numbers.
Tensor pack(const Tensor& dense) {
  const Tensor rows = convert(dense.view().transpose(1, 2), dense.dtype());
  Tensor packed({dense.size(0) * dense.size(2), dense.size(1), dense.size(3)}, dense.dtype());
  copy(rows, packed.view().unflatten(0, {dense.size(0), dense.size(2)}));
  return packed;
}

TEST_P(Reproducible, equal_sequences_packed_have_the_bits_of_the_dense_batch) {
  for (DType type : float_types)
    for (const OptionSet& kind : all_kinds(large)) {
      SCOPED_TRACE(kind.name + std::string(" ") + name(type));
      if (type != DType::f32 && kind.name != "all masks" && kind.name != "all modifiers") continue;
      const Inputs inputs = random_inputs(large, type);
      const Call dense = inputs.call(on_engine(kind.options));
      const Tensor q = pack(inputs.q), k = pack(inputs.k), v = pack(inputs.v);
      const Call packed_call{q, k, v, dense.options, Packing{{0, 70, 140, 210}, {0, 150, 300, 450}}};
      const Tensor grad_out = grad_out_of(dense);
      const Results dense_results = dense.run(), packed_results = packed_call.run();
      EXPECT_TRUE(same_bits(packed_results.out, pack(dense_results.out)));
      const Tensor dense_lse = convert(dense_results.lse.view().transpose(0, 1), dense.lse_type());
      EXPECT_TRUE(same_bits(packed_results.lse.view().unflatten(1, {3, 70}), dense_lse));
      const GradientTensors a = packed_call.gradients(pack(grad_out), packed_results);
      const GradientTensors b = dense.gradients(grad_out, dense_results);
      EXPECT_TRUE(same_bits(a.dq, pack(b.dq)) && same_bits(a.dk, pack(b.dk)) && same_bits(a.dv, pack(b.dv)));
      EXPECT_TRUE(!b.dbias || same_bits(*a.dbias, *b.dbias));
      EXPECT_TRUE(!b.dsinks || same_bits(*a.dsinks, *b.dsinks));
    }
}

TEST_P(Reproducible, a_sequence_has_the_same_bits_in_a_pack_of_others_and_alone) {
  Random random(5);
  const Tensor q = normal({90, 2, 24}, DType::f32, random), k = normal({200, 1, 24}, DType::f32, random);
  const AttentionOptions options = on_engine({.causal = Causal::bottom_right, .window = Window{40, 0}});
  const Call pack_of_three{q, k, k, options, Packing{{0, 13, 70, 90}, {0, 20, 160, 200}}};
  const Results results = pack_of_three.run();
  const Tensor grad_out = grad_out_of(pack_of_three);
  const GradientTensors gradients = pack_of_three.gradients(grad_out, results);
  // Rows 13..70 over keys 20..160, as a dense call [1,H,S,D].
  const auto dense = [](const Tensor& tensor, std::int64_t begin, std::int64_t end) {
    return tensor.view().slice(0, begin, end).transpose(0, 1).unsqueeze(0);
  };
  const Call alone{dense(q, 13, 70), dense(k, 20, 160), dense(k, 20, 160), options, {}};
  const Results alone_results = alone.run();
  EXPECT_TRUE(same_bits(alone_results.out, dense(results.out, 13, 70)));
  EXPECT_TRUE(same_bits(alone_results.lse, results.lse.view().slice(1, 13, 70).unsqueeze(0)));
  const GradientTensors alone_gradients = alone.gradients(dense(grad_out, 13, 70), alone_results);
  EXPECT_TRUE(same_bits(alone_gradients.dq, dense(gradients.dq, 13, 70)));
  EXPECT_TRUE(same_bits(alone_gradients.dk, dense(gradients.dk, 20, 160)));
  EXPECT_TRUE(same_bits(alone_gradients.dv, dense(gradients.dv, 20, 160)));
}

TEST_P(Reproducible, lower_ranks_have_the_bits_of_rank_four) {
  const Inputs inputs = random_inputs({.batch = 3, .heads = 1, .kv_heads = 1, .queries = 33, .keys = 47});
  const auto without_head = [](const Tensor& tensor) { return tensor.view().select(1, 0); };
  const Results four = inputs.call(on_engine()).run(true);
  const Results three =
      Call{without_head(inputs.q), without_head(inputs.k), without_head(inputs.v), on_engine(), {}}.run(true);
  EXPECT_TRUE(same_bits(three.out, without_head(four.out)) && same_bits(three.lse, without_head(four.lse)) &&
              same_bits(*three.weights, without_head(*four.weights)));
  const auto item = [](const Tensor& tensor) { return tensor.view().select(0, 2).select(0, 0); };
  const Results two = Call{item(inputs.q), item(inputs.k), item(inputs.v), on_engine(), {}}.run(true);
  EXPECT_TRUE(same_bits(two.out, item(four.out)) && same_bits(*two.weights, item(*four.weights)));
}

ON_EVERY_ENGINE(Reproducible);
ON_EVERY_HOST_ENGINE(ReproducibleOnHost);

}  // namespace
}  // namespace headway::test
