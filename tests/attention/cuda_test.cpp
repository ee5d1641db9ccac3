// Properties of the CUDA engine: the CPU engine's dropout masks, the same bits in every run, sizes past 32 bits and
// past the grid's limits, streams, graphs, and the caller's current device. The tests of every engine run on it too.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <future>

#include "attention/cuda_engine.h"
#include "support/inputs.h"
#include "support/run.h"

namespace headway::test {
namespace {

// A view of memory that is not there, for calls that read none.
TensorView nowhere(DType dtype, const Dims& sizes, int device = 0) {
  static double anything;
  return {&anything, dtype, sizes, Device{DeviceType::cuda, device}};
}

// With equal scores and V the identity, out(i,j) is 0 exactly where (i,j) is dropped.
std::vector<bool> kept(Engine engine, DType dtype, std::int64_t queries, std::int64_t keys, double dropout) {
  const Tensor q({2, 4, queries, 8}, dtype), k({2, 2, keys, 8}, dtype);
  Tensor v({2, 2, keys, keys}, dtype), out({2, 4, queries, keys}, dtype);
  for (std::int64_t j = 0; j < keys; ++j)
    for (std::int64_t n = 0; n < 4; ++n) set(v, {n / 2, n % 2, j, j}, 1);
  run_attention(q, k, v, out, {.dropout = dropout, .seed = 0x1234567890abcdefull, .engine = engine});
  std::vector<bool> result;
  for (Real value : read(out).values) result.push_back(value != 0);
  return result;
}

TEST_F(CudaEngine, drops_exactly_what_the_cpu_engine_drops) {
  for (DType dtype : float_types)
    for (std::int64_t queries : {1, 70})
      for (std::int64_t keys : {50, 128, 150})  // as many features, so kernels of three widths
        for (double dropout : {0.1, 0.6, 1e-11, 1.0})
          EXPECT_EQ(kept(Engine::cuda, dtype, queries, keys, dropout), kept(Engine::cpu, dtype, queries, keys, dropout))
              << name(dtype) << ' ' << queries << ' ' << keys << ' ' << dropout;
}

TEST_F(CudaEngine, gives_the_same_bits_a_thousand_times) {
  const Shape shape{
      .batch = 2, .heads = 4, .kv_heads = 2, .queries = 130, .keys = 200, .head_dim = 64, .value_dim = 64};
  for (DType dtype : {DType::f32, DType::bf16}) {
    const Inputs inputs = random_inputs(shape, dtype);
    const Tensor sinks = filled({4}, DType::f32, 0.5);
    const Call call = inputs.call({.causal = Causal::bottom_right,
                                   .softcap = 20.0,
                                   .sinks = sinks,
                                   .dropout = 0.1,
                                   .seed = 3,
                                   .engine = Engine::cuda});
    Random random(4);
    const Tensor grad_out = normal(call.out_sizes(), dtype, random);
    const Results results = call.run();
    const GradientTensors gradients = call.gradients(grad_out, results);
    int different = 0;
    for (int run = 0; run < 500; ++run)
      different += !same_bits(call.run(), results) || !same_bits(call.gradients(grad_out, results), gradients);
    EXPECT_EQ(different, 0) << name(dtype);
  }
  // Decoding, with its keys split over blocks.
  const Inputs inputs = random_inputs({.batch = 1, .heads = 8, .kv_heads = 2, .queries = 1, .keys = 9000}, DType::bf16);
  const Call call = inputs.call({.engine = Engine::cuda});
  const Results results = call.run();
  expect_forward(call, results);
  int different = 0;
  for (int run = 0; run < 500; ++run) different += !same_bits(call.run(), results);
  EXPECT_EQ(different, 0);
}

Tensor random_mask(const Dims& sizes, Random& random) {
  Tensor mask(sizes, DType::b8);
  fill_bool(mask, random, 0.67);
  return mask;
}

// More than one tile of queries, and enough blocks of keys for the place of one to be used again.
void expect_masks_and_biases(std::int64_t keys) {
  Random random(5);
  for (std::int64_t head_dim : {64, 128, 256})
    for (const Dims& sizes : {Dims{2, 2, 130, keys}, Dims{130, keys}, Dims{2, 1, 1, keys}}) {
      const Shape shape{
          .batch = 2, .heads = 2, .kv_heads = 1, .queries = 130, .keys = keys, .head_dim = head_dim, .value_dim = 32};
      const Inputs inputs = random_inputs(shape, DType::bf16);
      const Tensor mask = random_mask(sizes, random);
      const Tensor half = normal(sizes, DType::bf16, random), single = normal(sizes, DType::f32, random);
      for (AttentionOptions options :
           {AttentionOptions{.mask = mask}, AttentionOptions{.bias = half}, AttentionOptions{.bias = single},
            AttentionOptions{.mask = mask, .bias = half, .causal = Causal::bottom_right},
            AttentionOptions{.mask = mask, .bias = single, .softcap = 5.0}}) {
        options.engine = Engine::cuda;
        const Call call = inputs.call(options);
        expect_forward(call, call.run());
      }
    }
}

TEST_F(CudaEngine, reads_masks_and_biases_by_bulk_copies) { expect_masks_and_biases(400); }

TEST_F(CudaEngine, reads_masks_and_biases_with_rows_that_bulk_copies_cannot_read) { expect_masks_and_biases(277); }

// Many blocks of keys, of which the last is visited first: far below the cap, near it and beyond; and scores of the
// last keys that are much lower or much higher than all others. 64 rows are as many as a warpgroup has: only whole ones
// leave their reference where it is. The channel that makes those scores is the last one: tensor cores cut off what
// does not fit into a sum, so a large term costs bits of all that are added after it.
TEST_F(CudaEngine, caps_scores_of_every_size_over_many_blocks) {
  for (DType dtype : {DType::bf16, DType::f16})
    for (std::int64_t dim : {64, 128, 256}) {
      Inputs inputs = random_inputs(
          {.batch = 1, .heads = 2, .kv_heads = 1, .queries = 64, .keys = 420, .head_dim = dim, .value_dim = dim},
          dtype);
      const Tensor slopes = Tensor::of<float>({2}, {0.5f, 0.01f});
      for (const AttentionOptions& options :
           {AttentionOptions{.softcap = 50.0}, AttentionOptions{.softcap = 8.0}, AttentionOptions{.softcap = 0.5},
            AttentionOptions{.softcap = 500.0}, AttentionOptions{.scale = -0.2, .softcap = 50.0},
            AttentionOptions{.softcap = 50.0, .alibi_slopes = slopes}, AttentionOptions{.alibi_slopes = slopes}}) {
        Call call = inputs.call(options);
        call.options.engine = Engine::cuda;
        expect_forward(call, call.run());
      }
      for (double last : {-100.0, 100.0}) {
        for (std::int64_t i = 0; i < 128; ++i) set(inputs.q, {0, i / 64, i % 64, dim - 1}, 4.0);
        for (std::int64_t j = 0; j < 420; ++j) set(inputs.k, {0, 0, j, dim - 1}, j < 300 ? 0.0 : last);
        const Call call = inputs.call({.softcap = 50.0, .engine = Engine::cuda});
        expect_forward(call, call.run());
      }
    }
}

// Where the softmax cannot multiply by the scale: also behind the first block, whatever else the call has.
TEST_F(CudaEngine, takes_any_scale_over_many_blocks) {
  for (std::int64_t dim : {64, 128, 256}) {
    const Inputs inputs = random_inputs(
        {.batch = 1, .heads = 2, .kv_heads = 1, .queries = 20, .keys = 420, .head_dim = dim, .value_dim = dim},
        DType::bf16);
    Random random(3);
    const Tensor mask = random_mask({1, 1, 20, 420}, random), bias = normal({1, 1, 20, 420}, DType::bf16, random),
                 slopes = Tensor::of<float>({2}, {0.5f, 0.01f});
    for (double scale : {-0.2, 0.0, 1e-30})
      for (const AttentionOptions& options :
           {AttentionOptions{}, AttentionOptions{.mask = mask}, AttentionOptions{.bias = bias},
            AttentionOptions{.alibi_slopes = slopes}, AttentionOptions{.dropout = 0.3, .seed = 5},
            AttentionOptions{.mask = mask, .dropout = 0.3, .seed = 5}}) {
        Call call = inputs.call(options);
        call.options.scale = scale;
        call.options.engine = Engine::cuda;
        SCOPED_TRACE(std::to_string(dim) + " scale " + std::to_string(scale));
        expect_forward(call, call.run());
      }
  }
}

// A cap that f32 cannot hold: below every number all scores are 0, beyond every number they are as without one.
TEST_F(CudaEngine, takes_any_softcap_and_any_scale) {
  for (DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    const Inputs inputs = random_inputs(
        {.batch = 1, .heads = 1, .kv_heads = 1, .queries = 20, .keys = 70, .head_dim = 64, .value_dim = 64}, dtype);
    for (double softcap : {1e-320, 1e-46, 1e-40, 1e-10, 1e17, 1e19, 1e39, 1e300}) {
      SCOPED_TRACE(std::string(name(dtype)) + " softcap " + std::to_string(std::log10(softcap)));
      expect_contract(inputs.call({.softcap = softcap, .engine = Engine::cuda}));
    }
    for (double scale : {1e-320, 1e-45, 1e-21, 1e21, 1e36}) {
      SCOPED_TRACE(std::string(name(dtype)) + " scale " + std::to_string(std::log10(scale)));
      const Call call = inputs.call({.scale = scale, .engine = Engine::cuda});
      expect_forward(call, call.run());
    }
  }
}

// Masked values that are not finite make a tile be done a second time.
TEST_F(CudaEngine, leaves_out_what_is_not_finite_in_many_tiles) {
  constexpr std::int64_t length = 420;
  for (std::int64_t head_dim : {64, 128}) {
    const Shape shape{.batch = 2,
                      .heads = 2,
                      .kv_heads = 2,
                      .queries = length,
                      .keys = length,
                      .head_dim = head_dim,
                      .value_dim = head_dim};
    const Inputs inputs = random_inputs(shape, DType::bf16);
    Random random(6);
    Tensor mask = random_mask({1, 1, length, length}, random);
    for (std::int64_t i = 0; i < length; ++i)
      for (std::int64_t j : {5, 200, 419}) set(mask, {0, 0, i, j}, i == 130 ? 1 : 0);
    const Call clean = inputs.call({.mask = mask, .causal = Causal::bottom_right, .engine = Engine::cuda});
    const Results expected = clean.run();
    Inputs poisoned = random_inputs(shape, DType::bf16);
    for (std::int64_t n = 0; n < 4; ++n)
      for (std::int64_t j : {5, 200, 419}) set(poisoned.v, {n / 2, n % 2, j, 3}, NAN);
    const Call call{poisoned.q, poisoned.k, poisoned.v, clean.options, {}};
    const Results results = call.run();
    expect_forward(call, results);
    const auto rest = [](const Tensor& out) { return out.view().slice(2, 131, length); };
    EXPECT_TRUE(same_bits(rest(results.out), rest(expected.out)));
  }
}

// Every tile is done twice, and every block of threads has several: nobody may lose count of the key blocks.
TEST_F(CudaEngine, does_many_tiles_again_whose_output_is_not_finite) {
  for (std::int64_t head_dim : {64, 128, 256}) {
    const Inputs inputs = random_inputs({.batch = 1,
                                         .heads = 300,
                                         .kv_heads = 1,
                                         .queries = 70,
                                         .keys = 420,
                                         .head_dim = head_dim,
                                         .value_dim = head_dim},
                                        DType::bf16);
    Random random(9);
    Tensor bias = normal({1, 1, 70, 420}, DType::bf16, random);
    for (std::int64_t i = 0; i < 70; i += 3) set(bias, {0, 0, i, 6 * i}, i % 2 == 0 ? NAN : INFINITY);
    const Call call = inputs.call({.bias = bias, .engine = Engine::cuda, .batch_invariant = true});
    const Results all = call.run();
    for (std::int64_t h : {0, 131, 132, 299}) {
      const auto head = [h](const Tensor& tensor) { return tensor.view().slice(1, h, h + 1); };
      const Call one{head(inputs.q), inputs.k, inputs.v, call.options, {}};
      const Results results = one.run();
      expect_forward(one, results);
      EXPECT_TRUE(same_bits(results.out, head(all.out)) && same_bits(results.lse, head(all.lse)));
    }
  }
}

TEST_F(CudaEngine, decodes_with_the_same_bits_in_any_batch_when_asked_to) {
  const Inputs inputs = random_inputs({.batch = 5, .heads = 8, .kv_heads = 2, .queries = 2, .keys = 3000}, DType::bf16);
  const Call whole = inputs.call({.causal = Causal::bottom_right, .engine = Engine::cuda, .batch_invariant = true});
  expect_forward(whole, whole.run());
  const auto item = [](const Tensor& tensor) { return tensor.view().slice(0, 3, 4); };
  const Call alone{item(inputs.q), item(inputs.k), item(inputs.v), whole.options, {}};
  EXPECT_TRUE(same_bits(alone.run().out, item(whole.run().out)));
}

TEST_F(CudaEngine, takes_more_heads_and_items_than_a_grid_has_blocks_on_an_axis) {
  for (DType dtype : {DType::f32, DType::bf16}) {
    const AttentionOptions options{.engine = Engine::cuda};
    const Inputs heads = random_inputs(
        {.batch = 1, .heads = 70000, .kv_heads = 70000, .queries = 2, .keys = 3, .head_dim = 4, .value_dim = 4}, dtype);
    expect_contract(heads.call(options));
    const Inputs items = random_inputs(
        {.batch = 70000, .heads = 1, .kv_heads = 1, .queries = 2, .keys = 3, .head_dim = 4, .value_dim = 4}, dtype);
    expect_contract(items.call(options));
  }
}

TEST_F(CudaEngine, explains_its_kernel_with_tile_registers_and_shared_memory) {
  const Dims sizes{1, 8, 1, 64}, keys{1, 2, 8192, 64};
  const TensorView q = nowhere(DType::bf16, sizes), k = nowhere(DType::bf16, keys);
  const Plan plan = explain(q, k, k);
  EXPECT_EQ(plan.engine, Engine::cuda);
  EXPECT_GT(plan.registers, 0);
  EXPECT_GT(plan.shared_bytes, 0);
  EXPECT_GT(plan.splits, 1);
  const std::string text = to_string(plan);
  for (const char* part : {"decode", "registers", "shared memory", "stages", "splits"})
    EXPECT_NE(text.find(part), std::string::npos) << text;
}

TEST_F(CudaEngine, refuses_a_device_that_is_not_there_with_its_number) {
  const TensorView q = nowhere(DType::f32, {1, 1, 1, 4}, 99);
  EXPECT_TRUE(throws<Unsupported>("explain", {"cuda:99"}, [&] { explain(q, q, q); }));
}

// It needs no workspace, so that the driver's tensor maps are the first thing on the thread.
TEST_F(CudaEngine, takes_the_first_call_of_a_thread) {
  const Device gpu{DeviceType::cuda, 0};
  const Inputs inputs =
      random_inputs({.heads = 4, .kv_heads = 4, .queries = 100, .keys = 100, .head_dim = 64}, DType::bf16);
  const Tensor q = copied_to(inputs.q, gpu), k = copied_to(inputs.k, gpu), v = copied_to(inputs.v, gpu);
  const Dims sizes = inputs.call({}).out_sizes();
  Tensor here = Tensor::uninitialized(sizes, DType::bf16, gpu), there = Tensor::uninitialized(sizes, DType::bf16, gpu);
  attention(q, k, v, here);
  std::async(std::launch::async, [&] { attention(q, k, v, there); }).get();
  EXPECT_TRUE(same_bits(copied_to(there, Device{}), copied_to(here, Device{})));
}

TEST_F(CudaEngine, works_again_after_running_out_of_memory) {
  const Inputs inputs = random_inputs({}, DType::f32);
  const Call call = inputs.call({.engine = Engine::cuda});
  const Results results = call.run();
  // delta alone would take 2^52 bytes.
  const std::int64_t rows = std::int64_t{1} << 50;
  const ConstTensorView one = nowhere(DType::f32, {1, 1, 1, 4}), many = one.expand({1, 1, rows, 4});
  const ConstTensorView lse = ConstTensorView(nowhere(DType::f32, {1, 1, 1})).expand({1, 1, rows});
  EXPECT_THROW(attention_backward(many, many, one, one, many, lse, {}, {}), OutOfMemory);
  EXPECT_TRUE(same_bits(call.run(), results));
}

}  // namespace
}  // namespace headway::test
