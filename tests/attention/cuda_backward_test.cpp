// Gradients of half types and f32 on the CUDA engine in the shapes for which it has kernels of its own: several tiles
// of keys and queries, ragged ends, grouped heads, packs, every mask and modifier.
#include "attention/cuda_backward.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "support/inputs.h"

namespace headway::test {
namespace {

void set_infinite(Tensor& tensor, const Dims& index) { set(tensor, index, -INFINITY); }

// Tiles are of 64 or 128 queries and keys; head dims that are padded up to 64, 96, 128 and 256.
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
  for (std::int64_t dim : {64, 96, 128, 256}) {
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

// Keys in one tile leave dq without a sum over blocks; where there are few heads, several teams share the queries out.
TEST_F(CudaBackward, of_few_keys_or_few_heads_is_within_the_contracts_bounds) {
  expect_all_kinds(
      {.batch = 1, .heads = 2, .kv_heads = 1, .queries = 520, .keys = 100, .head_dim = 40, .value_dim = 64},
      DType::bf16);
  expect_all_kinds(
      {.batch = 1, .heads = 2, .kv_heads = 2, .queries = 600, .keys = 77, .head_dim = 128, .value_dim = 96},
      DType::f16);
  expect_all_kinds(
      {.batch = 1, .heads = 2, .kv_heads = 1, .queries = 700, .keys = 300, .head_dim = 80, .value_dim = 80},
      DType::bf16);
  const Inputs inputs = random_inputs(
      {.batch = 2, .heads = 2, .kv_heads = 1, .queries = 1300, .keys = 700, .head_dim = 64, .value_dim = 64},
      DType::bf16);
  Checks checks;
  checks.add(on_cuda(inputs, {}), "all keys");
  checks.add(on_cuda(inputs, {.causal = Causal::top_left}), "causal");
  checks.add(on_cuda(inputs, {.causal = Causal::bottom_right, .window = Window{200, 0}}), "window");
}

// Tiles are of 128 rows and 64 of the other side, 64 and 64 above head dim 64; some rows are not aligned to 16 bytes.
TEST_F(CudaBackward, of_f32_is_within_the_contracts_bounds) {
  expect_all_kinds(
      {.batch = 2, .heads = 2, .kv_heads = 1, .queries = 140, .keys = 150, .head_dim = 33, .value_dim = 64},
      DType::f32);
  expect_all_kinds(
      {.batch = 2, .heads = 2, .kv_heads = 2, .queries = 150, .keys = 70, .head_dim = 128, .value_dim = 72},
      DType::f32);
  for (std::int64_t dim : {64, 128}) {
    const Shape shape{
        .batch = 1, .heads = 2, .kv_heads = 1, .queries = 300, .keys = 420, .head_dim = dim, .value_dim = dim};
    const Inputs inputs = random_inputs(shape, DType::f32);
    Checks checks;
    for (const Window& window : {Window{}, Window{100, 0}, Window{150, 70}})
      checks.add(on_cuda(inputs, {.window = window}), std::to_string(dim));
    checks.add(on_cuda(inputs, {.causal = Causal::bottom_right}), std::to_string(dim));
    AttentionOptions many{.causal = Causal::top_left, .softcap = 3.0, .dropout = 0.25, .seed = 11};
    checks.add(on_cuda(inputs, many), "softcap and dropout " + std::to_string(dim));
  }
}

// Modifiers that have kernels of their own when they come alone: a mask whose rows can be read in pieces of 16 bytes, a
// bias of the inputs' type, softcap far below the cap and near to it, ALiBi. Each under several ranges of keys.
std::vector<OptionSet> single_kinds(const Shape& shape, DType dtype) {
  const auto mask = [&](OptionSet& set, Random& random) {
    Tensor values({shape.batch, 1, shape.queries, shape.keys}, DType::b8);
    fill_bool(values, random, 0.7);
    set.options.mask = set.keep(std::move(values));
  };
  const auto bias = [&](OptionSet& set, Random& random, bool forbids) {
    Tensor values = normal({1, shape.heads, shape.queries, shape.keys}, dtype, random);
    // All of one query, and of another's tile a few here and there.
    for (std::int64_t h = 0; forbids && h < shape.heads; ++h)
      for (std::int64_t j = 0; j < shape.keys; ++j) {
        set_infinite(values, {0, h, 3, j});
        if (random() % 3 == 0) set_infinite(values, {0, h, shape.queries / 2 + j % 7, j});
      }
    set.options.bias = set.keep(std::move(values));
  };
  std::vector<OptionSet> kinds;
  for (const char* kind : {"mask", "bias", "bias with -inf", "softcap 1.5", "softcap 50", "alibi", "dropout"})
    for (const char* range : {"all keys", "bottom_right", "window"}) {
      Random random(17);
      const std::string name = kind;
      OptionSet set{name + ", " + range, {}, {}};
      if (name == "mask") mask(set, random);
      if (name == "bias") bias(set, random, false);
      if (name == "bias with -inf") bias(set, random, true);
      if (name == "softcap 1.5") set.options.softcap = 1.5;
      if (name == "softcap 50") set.options.softcap = 50.0;
      if (name == "alibi") set.options.alibi_slopes = set.keep(normal({shape.heads}, DType::f32, random, 0.1));
      if (name == "dropout") {
        set.options.dropout = 0.3;
        set.options.seed = 0xFEDCBA9876543210u;
      }
      if (range == std::string("bottom_right")) set.options.causal = Causal::bottom_right;
      if (range == std::string("window")) {
        Tensor lens({shape.batch}, DType::i64);
        for (std::int64_t b = 0; b < shape.batch; ++b) lens.at<std::int64_t>({b}) = shape.keys - 40 * b - 10;
        set.options.valid_lens = set.keep(std::move(lens));
        set.options.window = Window{90, 30};
      }
      kinds.push_back(std::move(set));
    }
  return kinds;
}

// Whole tiles, those that reach over the end, and packs, where a matrix counts inside of its sequence.
TEST_F(CudaBackward, is_within_the_contracts_bounds_with_one_modifier_alone) {
  for (const auto& [dim, dtype] : {std::pair{64, DType::bf16}, {128, DType::bf16}, {64, DType::f16}}) {
    const Shape shape{
        .batch = 1, .heads = 2, .kv_heads = 1, .queries = 200, .keys = 304, .head_dim = dim, .value_dim = dim};
    const Inputs inputs = random_inputs(shape, dtype);
    const std::vector<OptionSet> kinds = single_kinds(shape, dtype);
    Checks checks;
    for (const OptionSet& kind : kinds)
      checks.add(on_cuda(inputs, kind.options), kind.name + " " + std::to_string(dim));
  }
  Random random(4);
  const Packing packing{{0, 130, 131, 200}, {0, 5, 145, 289}};
  for (std::int64_t dim : {64, 96, 128}) {
    const Tensor q = normal({200, 2, dim}, DType::bf16, random), k = normal({289, 2, dim}, DType::bf16, random),
                 v = normal({289, 2, dim}, DType::bf16, random);
    const std::vector<OptionSet> kinds = single_kinds({3, 2, 2, 130, 144, dim, dim}, DType::bf16);
    Checks checks;
    for (const OptionSet& kind : kinds) {
      if (kind.options.valid_lens) continue;
      AttentionOptions options = kind.options;
      options.engine = Engine::cuda;
      checks.add(Call{q, k, v, options, packing}, "packed, " + kind.name + " " + std::to_string(dim));
    }
  }
}

TEST_F(CudaBackward, leaves_the_same_bits_whether_a_mask_or_a_bias_forbids) {
  for (std::int64_t dim : {64, 96, 128}) {
    const Shape shape{
        .batch = 2, .heads = 2, .kv_heads = 1, .queries = 200, .keys = 304, .head_dim = dim, .value_dim = dim};
    const Inputs inputs = random_inputs(shape, DType::bf16);
    Random random(12);
    const Dims sizes{2, 1, 200, 304};
    Tensor mask(sizes, DType::b8), wide(Dims{2, 1, 200, 305}, DType::b8);
    fill_bool(mask, random, 0.6);
    fill_bool(wide, random, 0.5);
    Tensor bias = normal(sizes, DType::bf16, random), forbidding = bias.clone(), zero = filled(sizes, DType::bf16, 0.0),
           zero_forbidding = zero.clone();
    for (std::int64_t n = 0; n < mask.elements(); ++n) {
      const Dims index = index_of(n, sizes);
      wide.at<bool>(index) = mask.at<bool>(index);
      if (mask.at<bool>(index)) continue;
      set_infinite(forbidding, index);
      set_infinite(zero_forbidding, index);
    }
    const Call call = on_cuda(inputs, {.mask = mask});
    const Tensor grad_out = grad_out_of(call);
    const Results results = call.run();
    const auto expect_same = [&](const AttentionOptions& one, const AttentionOptions& other, const char* what) {
      const GradientTensors a = on_cuda(inputs, one).gradients(grad_out, results);
      const GradientTensors b = on_cuda(inputs, other).gradients(grad_out, results);
      EXPECT_TRUE(same_bits(a.dq, b.dq) && same_bits(a.dk, b.dk) && same_bits(a.dv, b.dv)) << what << ' ' << dim;
    };
    expect_same({.mask = mask}, {.bias = zero_forbidding}, "mask and bias");
    expect_same({.mask = mask}, {.mask = mask, .bias = zero}, "mask and both");
    expect_same({.mask = mask}, {.mask = wide.view().slice(3, 0, 304)}, "mask in other places");
    expect_same({.mask = mask, .bias = bias}, {.bias = forbidding}, "bias and both");
  }
}

TEST_F(CudaBackward, takes_packs_of_sequences_of_any_length) {
  Random random(3);
  const Packing packing{{0, 130, 131, 131, 400, 470}, {0, 5, 200, 330, 330, 600}};
  for (std::int64_t dim : {64, 96, 128, 256}) {
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
  for (const auto& [dim, dtype] :
       {std::pair{64, DType::bf16}, {128, DType::bf16}, {256, DType::bf16}, {64, DType::f32}, {128, DType::f32}})
    for (Causal causal : {Causal::none, Causal::bottom_right}) {
      const Shape shape{
          .batch = 3, .heads = 8, .kv_heads = 2, .queries = 600, .keys = 1100, .head_dim = dim, .value_dim = dim};
      const Inputs inputs = random_inputs(shape, dtype);
      const Call call = on_cuda(inputs, {.causal = causal, .batch_invariant = true});
      const Tensor grad_out = grad_out_of(call);
      const Results results = call.run();
      const GradientTensors gradients = call.gradients(grad_out, results);
      int different = 0;
      for (int run = 0; run < (dtype == DType::f32 ? 10 : 50); ++run)
        different += !same_bits(call.gradients(grad_out, results), gradients);
      EXPECT_EQ(different, 0) << dim;
      const auto item = [](const Tensor& tensor) { return tensor.view().slice(0, 1, 2); };
      const Call alone{item(inputs.q), item(inputs.k), item(inputs.v), call.options, {}};
      const GradientTensors own = alone.gradients(item(grad_out), alone.run());
      EXPECT_TRUE(same_bits(own.dq, item(gradients.dq)));
      EXPECT_TRUE(same_bits(own.dk, item(gradients.dk)));
      EXPECT_TRUE(same_bits(own.dv, item(gradients.dv)));
    }
}

// The kinds of single_kinds that forbid a key or a query altogether.
std::vector<OptionSet> forbidding_kinds(const Shape& shape) {
  std::vector<OptionSet> kinds;
  for (OptionSet& kind : single_kinds(shape, DType::bf16)) {
    if (kind.options.mask) {
      Tensor values({1, 1, shape.queries, shape.keys}, DType::b8);
      for (std::int64_t n = 0; n < values.elements(); ++n) {
        const Dims index = index_of(n, values.sizes());
        values.at<bool>(index) = index[2] != 70 && index[3] % 5 != 3 && (index[2] + index[3]) % 4 != 0;
      }
      kind.options.mask = kind.keep(std::move(values));
    }
    if (kind.options.mask || kind.options.valid_lens || kind.name.find("-inf") != std::string::npos)
      kinds.push_back(std::move(kind));
  }
  return kinds;
}

// Keys and values that no row sees, and rows of padding.
TEST_F(CudaBackward, does_not_see_what_is_forbidden) {
  struct Case {
    int dim;
    bool modifiers = false, single = false;
    DType dtype = DType::bf16;
  };
  for (const auto& [dim, modifiers, single, dtype] :
       {Case{64}, Case{64, true}, Case{256}, Case{256, true}, Case{64, false, true}, Case{128, false, true},
        Case{64, false, false, DType::f32}, Case{128, true, false, DType::f32}}) {
    const Shape shape{
        .batch = 2, .heads = 2, .kv_heads = 1, .queries = 140, .keys = 304, .head_dim = dim, .value_dim = dim};
    for (OptionSet& kind : single ? forbidding_kinds(shape) : mask_kinds(shape)) {
      SCOPED_TRACE(kind.name + " " + std::to_string(dim));
      if (modifiers) {
        kind.options.softcap = 3.0;
        kind.options.dropout = 0.25;
        kind.options.seed = 7;
      }
      Inputs inputs = random_inputs(shape, dtype);
      const Call call = on_cuda(inputs, kind.options);
      Tensor grad_out = grad_out_of(call);
      const Results results = call.run();
      const GradientTensors clean = call.gradients(grad_out, results);
      EXPECT_GT(poison_what_no_row_sees(call.spec(), shape, inputs, grad_out), 0);
      EXPECT_TRUE(same_bits(call.gradients(grad_out, results), clean));
    }
  }
}

// The pairs of a causal mask, by tile: NaN in grad_out reaches exactly the rows and features that it should.
TEST_F(CudaBackward, carries_a_nan_exactly_where_it_belongs) {
  enum class Also { nothing, mask, mask_in_pieces, bias, softcap, alibi, dropout };
  using enum Also;
  struct Case {
    int dim;
    Also also;
    DType dtype = DType::bf16;
  };
  for (const auto& [dim, also, dtype] :
       {Case{64, nothing}, Case{64, mask}, Case{64, mask_in_pieces}, Case{64, bias}, Case{64, softcap}, Case{64, alibi},
        Case{64, dropout}, Case{128, mask_in_pieces}, Case{128, bias}, Case{128, softcap}, Case{128, alibi},
        Case{128, dropout}, Case{256, nothing}, Case{256, mask}, Case{256, dropout}, Case{64, nothing, DType::f32},
        Case{64, dropout, DType::f32}, Case{128, softcap, DType::f32}}) {
    SCOPED_TRACE(dim * 10 + static_cast<int>(also));
    const std::int64_t length = also == mask_in_pieces ? 304 : 300;
    const Shape shape{
        .batch = 1, .heads = 1, .kv_heads = 1, .queries = length, .keys = length, .head_dim = dim, .value_dim = dim};
    const Inputs inputs = random_inputs(shape, dtype);
    const Tensor ones = filled({1, 1, length, length}, DType::b8, 1.0), slope = filled({1}, DType::f32, 0.01),
                 zeros = filled({1, 1, length, length}, DType::bf16, 0.0);
    AttentionOptions options{.causal = Causal::top_left};
    if (also == mask || also == mask_in_pieces) options.mask = ones;
    if (also == bias) options.bias = zeros;
    if (also == softcap) options.softcap = 4.0;
    if (also == alibi) options.alibi_slopes = slope;
    if (also == dropout) {
      options.dropout = 0.5;  // 0 * NaN is NaN
      options.seed = 8;
    }
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
  for (const auto& [dim, dtype] :
       {std::pair{64, DType::bf16}, {128, DType::bf16}, {256, DType::bf16}, {64, DType::f32}, {128, DType::f32}}) {
    const Shape shape{
        .batch = 1, .heads = 1, .kv_heads = 1, .queries = 300, .keys = 300, .head_dim = dim, .value_dim = dim};
    Inputs inputs = random_inputs(shape, dtype);
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
  alignas(16) static double anything[2];
  const auto plan = [](std::int64_t dim, DType dtype = DType::bf16) {
    const ConstTensorView q(anything, dtype, {1, 8, 500, dim}, Device{DeviceType::cuda, 0});
    return explain(q, q, q, {}, {.backward = true});
  };
  if (plan(64).instruction_set != "compute capability 9.0") GTEST_SKIP() << "not a Hopper GPU";
  for (std::int64_t dim : {64, 128, 256}) {
    EXPECT_TRUE(plan(dim).kernel.starts_with("hopper_backward")) << plan(dim).kernel;
    EXPECT_EQ(plan(dim).key_block, dim == 256 ? 64 : 128);
    EXPECT_EQ(plan(dim).stages, 2);
    EXPECT_GT(plan(dim).shared_bytes, 200000);
  }
  for (std::int64_t dim : {64, 128, 256}) {
    const std::string kernel = plan(dim, DType::f32).kernel;
    EXPECT_TRUE(kernel.starts_with("f32 tiles in three bf16 parts")) << kernel;
  }
  for (std::int64_t dim : {64, 128}) {
    EXPECT_EQ(plan(dim, DType::f32).key_block, 64);
    EXPECT_EQ(plan(dim, DType::f32).stages, 2);
  }
  ASSERT_EQ(plan(100).passed_kernels.size(), 2u);
  EXPECT_EQ(plan(100).passed_kernels[0].kernel, "short_gradient");
  EXPECT_NE(plan(100).passed_kernels[0].reason.find("500 keys"), std::string::npos);
  EXPECT_EQ(plan(100).passed_kernels[1].kernel, "hopper_backward");
  EXPECT_NE(plan(100).passed_kernels[1].reason.find("head_dim 100"), std::string::npos);
}

TEST_F(CudaBackward, of_no_query_or_no_key_is_0_and_stays_inside_its_memory) {
  for (DType dtype : {DType::f32, DType::f64, DType::bf16})
    for (const auto& [queries, keys] : std::vector<std::pair<std::int64_t, std::int64_t>>{{0, 40}, {3, 0}, {0, 0}}) {
      SCOPED_TRACE(std::string(name(dtype)) + " " + std::to_string(queries) + " x " + std::to_string(keys));
      const Inputs inputs = random_inputs(
          {.batch = 2, .heads = 2, .kv_heads = 1, .queries = queries, .keys = keys, .head_dim = 16, .value_dim = 8},
          dtype);
      const std::int32_t length = static_cast<std::int32_t>(keys / 2);
      const Tensor lengths = Tensor::of<std::int32_t>({2}, {length, length});  // which the host sends
      const Tensor bias = filled({1, 2, queries == 0 ? 1 : queries, keys == 0 ? 1 : keys}, dtype, 0.5);
      const Call call = on_cuda(inputs, {.bias = bias, .valid_lens = lengths});
      const Tensor grad_out = grad_out_of(call);
      GradientTensors gradients = call.gradients(grad_out);
      expect_backward(call, grad_out, gradients);
      EXPECT_TRUE(same_bits(*gradients.dbias, filled(bias.sizes(), gradients.dbias->dtype(), 0.0)));
    }
}

TEST_F(CudaBackward, of_a_bias_is_0_where_grad_out_is_0_however_large_the_scores) {
  for (DType dtype : {DType::bf16, DType::f32}) {
    Inputs inputs = random_inputs(
        {.batch = 1, .heads = 1, .kv_heads = 1, .queries = 70, .keys = 66, .head_dim = 8, .value_dim = 8}, dtype);
    inputs.q = filled(inputs.q.sizes(), dtype, 1000.0);
    inputs.k = filled(inputs.k.sizes(), dtype, 1000.0);
    const Tensor bias = filled({70, 66}, dtype, 0.25);
    const Call call = on_cuda(inputs, {.bias = bias});
    const Tensor grad_out = filled(call.out_sizes(), dtype, 0.0);
    GradientTensors gradients = call.gradients(grad_out);
    expect_backward(call, grad_out, gradients);
  }
}

TEST_F(CudaBackward, of_a_sink_that_takes_all_weight_shows_a_nan_in_grad_out) {
  const Inputs inputs = random_inputs(
      {.batch = 1, .heads = 1, .kv_heads = 1, .queries = 9, .keys = 20, .head_dim = 8, .value_dim = 8}, DType::f32);
  const Tensor sinks = filled({1}, DType::f32, 300.0),
               lengths = Tensor::of<std::int64_t>({1, 9}, {20, 20, 20, 0, 20, 20, 20, 20, 20});
  for (const std::int64_t row : {2, 3}) {  // the latter sees no key
    const Call call = on_cuda(inputs, {.valid_lens = lengths, .sinks = sinks});
    Tensor grad_out = grad_out_of(call);
    set(grad_out, {0, 0, row, 1}, NAN);
    GradientTensors gradients = call.gradients(grad_out);
    expect_backward(call, grad_out, gradients);
    EXPECT_EQ(std::isnan(get(*gradients.dsinks, {0})), row == 2);
  }
}

// A sum of products that vanish is -0 or 0 by their signs, and those of forbidden keys must not count.
TEST_F(CudaBackward, does_not_show_by_the_sign_of_a_0_what_forbidden_keys_hold) {
  for (DType dtype : {DType::f32, DType::f64}) {
    const double least = dtype == DType::f32 ? 0x1p-149 : 0x1p-1074;
    Inputs inputs = random_inputs(
        {.batch = 1, .heads = 1, .kv_heads = 1, .queries = 9, .keys = 9, .head_dim = 6, .value_dim = 4}, dtype);
    const Tensor lengths = Tensor::of<std::int64_t>({1}, {5});
    const Call call = on_cuda(inputs, {.valid_lens = lengths});
    const Tensor grad_out = grad_out_of(call);
    const auto fill_keys = [&](std::int64_t first, std::int64_t last, double value) {
      for (std::int64_t j = first; j < last; ++j)
        for (std::int64_t d = 0; d < 6; ++d) set(inputs.k, {0, 0, j, d}, value);
    };
    for (const double seen : {least, -least}) {
      fill_keys(0, 5, seen);
      fill_keys(5, 9, least);
      const Results results = call.run();
      const GradientTensors positive = call.gradients(grad_out, results);
      fill_keys(5, 9, -least);
      EXPECT_TRUE(same_bits(call.gradients(grad_out, results), positive)) << name(dtype) << ' ' << seen;
    }
  }
}

}  // namespace
}  // namespace headway::test
