// Short sequences with a mask or a bias on the CUDA engine: forward tiles that read a mask as words of bits and a bias
// in pairs, and gradients of one tile.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <list>
#include <random>
#include <string>
#include <utility>

#include "attention/cuda_backward.h"
#include "core/text.h"
#include "engines/cuda/pretended_device.h"

namespace headway::test {
namespace {

std::int64_t between(Random& random, std::int64_t first, std::int64_t last) {
  return std::uniform_int_distribution<std::int64_t>(first, last)(random);
}

class CudaMasked : public CudaBackward {
 protected:
  template <std::size_t count>
  static std::int64_t one_of(const std::array<std::int64_t, count>& list, Random& random) {
    return list[static_cast<std::size_t>(between(random, 0, static_cast<std::int64_t>(count) - 1))];
  }

  // Sizes on both sides of every border: of 16, 32 and 64 keys, of one tile and several, of head dims that are padded
  // to 64, 128 and 256.
  static Shape random_shape(Random& random) {
    constexpr std::array<std::int64_t, 15> lengths{1, 33, 40, 47, 48, 56, 60, 63, 64, 65, 100, 129, 197, 256, 338};
    constexpr std::array<std::int64_t, 8> dims{8, 40, 64, 72, 96, 128, 136, 256};
    Shape shape;
    shape.batch = between(random, 1, 2);
    shape.kv_heads = between(random, 1, 2);
    shape.heads = shape.kv_heads * between(random, 1, 2);
    shape.queries = one_of(lengths, random);
    shape.keys = one_of(lengths, random);
    shape.head_dim = one_of(dims, random);
    shape.value_dim = between(random, 0, 2) == 0 ? one_of(dims, random) : shape.head_dim;
    return shape;
  }

  // Of axes that may be repeated, as a part of a larger matrix: its rows begin at any address.
  static Dims random_sizes(const Shape& shape, Random& random) {
    const auto maybe = [&](std::int64_t size) { return between(random, 0, 1) == 0 ? 1 : size; };
    return {maybe(shape.batch), maybe(shape.heads), maybe(shape.queries), shape.keys};
  }
  static ConstTensorView part_of(OptionSet& options, Tensor whole, std::int64_t first, std::int64_t keys) {
    return options.keep(std::move(whole)).slice(3, first, first + keys);
  }
  static void place_mask(const Shape& shape, OptionSet& options, Random& random) {
    const std::int64_t first = one_of(std::array<std::int64_t, 5>{0, 0, 1, 4, 16}, random);
    Dims sizes = random_sizes(shape, random);
    sizes[3] += first + one_of(std::array<std::int64_t, 4>{0, 3, 4, 16}, random);
    Tensor mask(sizes, DType::b8);
    fill_bool(mask, random, 0.7);
    options.options.mask = part_of(options, std::move(mask), first, shape.keys);
  }
  static void place_bias(const Shape& shape, OptionSet& options, Random& random) {
    const std::int64_t first = one_of(std::array<std::int64_t, 4>{0, 0, 1, 2}, random);
    Dims sizes = random_sizes(shape, random);
    sizes[3] += first + one_of(std::array<std::int64_t, 3>{0, 1, 8}, random);
    Tensor bias = normal(sizes, between(random, 0, 1) == 0 ? DType::bf16 : DType::f16, random);
    for (int n = 0; n < 20; ++n) {
      const auto at = [&](int axis) { return between(random, 0, sizes[static_cast<std::size_t>(axis)] - 1); };
      set(bias, {at(0), at(1), at(2), at(3)}, -INFINITY);
    }
    options.options.bias = part_of(options, std::move(bias), first, shape.keys);
  }

  static OptionSet random_options(const Shape& shape, Random& random) {
    OptionSet some{"", {}, {}};
    const std::int64_t kind = between(random, 0, 3);
    if (kind != 1) place_mask(shape, some, random);
    if (kind == 1 || kind == 2) place_bias(shape, some, random);
    if (between(random, 0, 2) == 0) some.options.causal = Causal::bottom_right;
    if (between(random, 0, 3) == 0) some.options.sinks = some.keep(normal({shape.heads}, DType::f32, random));
    if (between(random, 0, 4) == 0) some.options.dropout = 0.3, some.options.seed = 9;
    if (between(random, 0, 4) == 0) some.options.softcap = 3.0;
    return some;
  }
};

std::string name_of(const Shape& s) {
  return text(s.batch, " x ", s.heads, '/', s.kv_heads, " heads, ", s.queries, " x ", s.keys, ", ", s.head_dim, '/',
              s.value_dim);
}

TEST_F(CudaMasked, short_sequences_are_within_the_contracts_bounds_however_their_masks_lie) {
  std::list<std::pair<Inputs, OptionSet>> kept;  // checks read them, and end first
  Checks checks;
  for (std::uint64_t seed = 1; seed <= 64; ++seed) {
    Random random(seed);
    const Shape shape = random_shape(random);
    const DType dtype = seed % 2 == 0 ? DType::bf16 : DType::f16;
    const auto& [inputs, set] = kept.emplace_back(random_inputs(shape, dtype, seed), random_options(shape, random));
    const Call call = on_cuda(inputs, set.options);
    EXPECT_TRUE(same_bits(call.run(), call.run())) << seed;
    checks.add(call, text("seed ", seed, ": ", name_of(shape)));
  }
}

// What no row may see is not finite, and rows that see nothing have gradients that are not.
TEST_F(CudaMasked, short_sequences_keep_what_is_forbidden_out) {
  for (const std::int64_t length : {40, 64, 100, 301}) {
    const Shape shape{
        .batch = 2, .heads = 2, .kv_heads = 1, .queries = length, .keys = length, .head_dim = 64, .value_dim = 64};
    Inputs inputs = random_inputs(shape, DType::bf16);
    Tensor mask({2, 1, 1, length}, DType::b8), bias({2, length, length}, DType::bf16);
    for (std::int64_t b = 0; b < 2; ++b)
      for (std::int64_t j = 0; j < length; ++j) {
        set(mask, {b, 0, 0, j}, j != 3 && j < length - 9 - b ? 1 : 0);
        for (std::int64_t i = 0; i < length; ++i) set(bias, {b, i, j}, j == 3 ? -INFINITY : 0.25);
      }
    for (std::int64_t b = 0; b < 2; ++b)
      for (const std::int64_t j : {std::int64_t{3}, length - 9, length - 1})
        for (std::int64_t d = 0; d < 64; ++d) {
          set(inputs.k, {b, 0, j, d}, d % 3 == 0 ? NAN : -INFINITY);
          set(inputs.v, {b, 0, j, d}, d % 2 == 0 ? INFINITY : NAN);
        }
    Checks checks;
    for (const AttentionOptions& options :
         {AttentionOptions{.mask = mask}, AttentionOptions{.mask = mask, .bias = bias.view().unsqueeze(1)}})
      checks.add(on_cuda(inputs, options), text(length, " tokens"));
  }
}

// Of a Hopper that need not be here.
TEST(CudaMaskedPlan, of_one_tile_has_blocks_that_share_a_multiprocessor) {
  const cuda::PretendedDevice device({9, 0, 132, 227 * 1024});
  alignas(16) static double anything[2];
  const Device gpu{DeviceType::cuda, 0};
  const auto kernel = [&](std::int64_t length, AttentionOptions options, std::int64_t head_dim = 64) {
    const ConstTensorView x(anything, DType::bf16, {4, 8, length, head_dim}, gpu);
    options.engine = Engine::cuda;
    return explain(x, x, x, options).kernel;
  };
  const auto mask = [&](std::int64_t length) { return ConstTensorView(anything, DType::b8, {4, 1, 1, length}, gpu); };
  const auto bias = [&](DType dtype) { return ConstTensorView(anything, dtype, {8, 64, 64}, gpu); };
  EXPECT_EQ(kernel(64, {.mask = mask(64)}), "tensor core tiles");
  EXPECT_EQ(kernel(40, {.mask = mask(40)}, 128), "tensor core tiles");
  EXPECT_EQ(kernel(64, {.bias = bias(DType::f16)}), "tensor core tiles");
  for (const AttentionOptions& options :
       {AttentionOptions{}, AttentionOptions{.mask = mask(64), .softcap = 2.0},
        AttentionOptions{.bias = bias(DType::f32)}, AttentionOptions{.mask = mask(64), .batch_invariant = true}})
    EXPECT_EQ(kernel(64, options).rfind("hopper_forward", 0), 0u) << kernel(64, options);
  EXPECT_EQ(kernel(65, {.mask = mask(65)}).rfind("hopper_forward", 0), 0u);
  EXPECT_EQ(kernel(64, {.mask = mask(64)}, 192).rfind("hopper_forward", 0), 0u);
}

}  // namespace
}  // namespace headway::test
