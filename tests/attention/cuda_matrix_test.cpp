// Masks and biases on the CUDA engine: their contents determine the result, bit for bit, not the
// length of their rows in memory or the element that they begin at.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "attention/cuda_engine.h"
#include "support/inputs.h"

namespace headway::test {
namespace {

using CudaMatrix = CudaEngine;

// A row in memory, in elements: its length, and the first one that the matrix has.
struct Place {
  std::int64_t length, first;
};

// Rows of masks, halves and floats in every distance from a multiple of 16 bytes, and from every beginning.
std::vector<Place> places(std::int64_t keys) {
  return {{keys, 0}, {keys + 1, 0}, {keys + 1, 1}, {keys + 2, 2}, {keys + 4, 1}, {keys + 6, 3}, {keys + 16, 7}};
}

// A matrix whose surroundings are NaN, or true.
struct Placed {
  Tensor memory;
  ConstTensorView view;
};

Placed placed(const Tensor& matrix, const Place& place) {
  Dims sizes = matrix.sizes();
  const int last = sizes.size() - 1;
  const std::int64_t keys = sizes[last];
  sizes[last] = place.length;
  Tensor memory = matrix.dtype() == DType::b8 ? Tensor(sizes, DType::b8) : filled(sizes, matrix.dtype(), NAN);
  if (matrix.dtype() == DType::b8) {
    Random random(1);
    fill_bool(memory, random, 1.0);
  }
  write(read(matrix), memory.view().slice(last, place.first, place.first + keys));
  const ConstTensorView view = memory.view().slice(last, place.first, place.first + keys);
  return {std::move(memory), view};
}

std::string text_of(const Place& place) {
  return "rows of " + std::to_string(place.length) + " from " + std::to_string(place.first);
}

// The first place is one that bulk copies and pieces of 16 bytes suit: there the oracle is asked.
void expect_same_everywhere(const Inputs& inputs, const Tensor& matrix, AttentionOptions options, bool backward) {
  options.engine = Engine::cuda;
  const auto call_with = [&](const ConstTensorView& view) {
    AttentionOptions own = options;
    (matrix.dtype() == DType::b8 ? own.mask : own.bias) = view;
    return inputs.call(own);
  };
  const Call call = call_with(matrix);
  const Results results = call.run();
  expect_forward(call, results);
  Random random(3);
  const Tensor grad_out = normal(call.out_sizes(), call.q.dtype(), random);
  GradientTensors gradients;
  if (backward) {
    gradients = call.gradients(grad_out, results);
    expect_backward(call, grad_out, gradients);
  }
  for (const Place& place : places(matrix.size(3))) {
    SCOPED_TRACE(text_of(place));
    const Placed other = placed(matrix, place);
    const Call again = call_with(other.view);
    EXPECT_TRUE(same_bits(again.run(), results));
    if (backward) {
      EXPECT_TRUE(same_bits(again.gradients(grad_out, results), gradients));
    }
  }
}

std::vector<Tensor> masks_and_biases(const Dims& sizes) {
  Random random(5);
  std::vector<Tensor> result;
  result.emplace_back(sizes, DType::b8);
  fill_bool(result.back(), random, 0.6);
  result.push_back(normal(sizes, DType::bf16, random));
  result.push_back(normal(sizes, DType::f32, random));
  set(result[1], {0, 0, 3, 5}, -INFINITY);
  return result;
}

// Several tiles of queries, of which the last ends among the rows of a residue, and blocks of keys enough for the place
// of one to be used again; as many keys as a multiple of 16, so that the first place suits.
TEST_F(CudaMatrix, of_any_row_length_and_beginning_gives_the_same_bits) {
  for (std::int64_t head_dim : {64, 128, 256}) {
    const Inputs inputs = random_inputs(
        {.batch = 2, .heads = 2, .kv_heads = 1, .queries = 203, .keys = 688, .head_dim = head_dim, .value_dim = 32},
        DType::bf16);
    for (const Tensor& matrix : masks_and_biases({2, 2, 203, 688})) {
      SCOPED_TRACE(std::string(name(matrix.dtype())) + ' ' + std::to_string(head_dim));
      expect_same_everywhere(inputs, matrix, {}, false);
    }
  }
}

TEST_F(CudaMatrix, of_any_row_length_and_beginning_gives_the_same_gradients) {
  for (std::int64_t head_dim : {64, 128}) {
    const Inputs inputs = random_inputs({.batch = 2,
                                         .heads = 2,
                                         .kv_heads = 1,
                                         .queries = 139,
                                         .keys = 272,
                                         .head_dim = head_dim,
                                         .value_dim = head_dim},
                                        DType::bf16);
    for (const Tensor& matrix : masks_and_biases({2, 2, 139, 272}))
      for (double dropout : {0.0, 0.2}) {
        SCOPED_TRACE(std::string(name(matrix.dtype())) + ' ' + std::to_string(head_dim));
        expect_same_everywhere(inputs, matrix, {.causal = Causal::bottom_right, .dropout = dropout, .seed = 3}, true);
      }
  }
}

// Fewer rows than a residue has, heads and batch items that repeat, and one row for all.
TEST_F(CudaMatrix, of_few_or_repeated_rows_gives_the_same_bits) {
  for (std::int64_t queries : {17, 70})
    for (const Dims& sizes : {Dims{1, 1, queries, 320}, Dims{1, 2, 1, 320}, Dims{2, 1, queries, 320}}) {
      const Inputs inputs = random_inputs(
          {.batch = 2, .heads = 2, .kv_heads = 2, .queries = queries, .keys = 320, .head_dim = 64, .value_dim = 64},
          DType::bf16);
      Random random(8);
      Tensor mask(sizes, DType::b8);
      fill_bool(mask, random, 0.6);
      expect_same_everywhere(inputs, mask, {}, true);
      expect_same_everywhere(inputs, normal(sizes, DType::bf16, random), {}, true);
    }
}

// Whatever is not a key of the matrix may be NaN, and so may what a mask forbids.
TEST_F(CudaMatrix, of_unaligned_rows_keeps_what_it_forbids_out_of_the_sums) {
  for (std::int64_t head_dim : {64, 128}) {
    Inputs inputs = random_inputs(
        {.batch = 1, .heads = 2, .kv_heads = 1, .queries = 150, .keys = 333, .head_dim = head_dim, .value_dim = 64},
        DType::bf16);
    Tensor mask({1, 1, 150, 333}, DType::b8);
    Random random(9);
    fill_bool(mask, random, 0.7);
    for (std::int64_t i = 0; i < 150; ++i) mask.at<bool>({0, 0, i, 100}) = i % 3 == 0;
    set(inputs.v, {0, 0, 100, 7}, NAN);
    const Call call = inputs.call({.mask = mask, .engine = Engine::cuda});
    expect_forward(call, call.run());
  }
}

// Masks of a structure: what rows allow has a beginning and an end, or holes, or is nothing at all.
bool is_allowed(const std::string& kind, std::int64_t i, std::int64_t j) {
  if (kind == "causal") return j <= i + 300;
  if (kind == "band") return j >= i + 200 && j < i + 330;
  if (kind == "documents") return i / 40 == j / 150;
  if (kind == "first and last") return j < 3 || j >= 490;
  if (kind == "every third row") return i % 3 == 1;
  return false;
}

TEST_F(CudaMatrix, of_a_structure_is_within_the_bounds) {
  for (std::int64_t dim : {64, 192})
    for (const char* kind : {"causal", "band", "documents", "first and last", "every third row", "nothing"})
      for (std::int64_t keys : {501, 512}) {
        const Shape shape{
            .batch = 1, .heads = 2, .kv_heads = 1, .queries = 130, .keys = keys, .head_dim = dim, .value_dim = dim};
        SCOPED_TRACE(testing::Message() << kind << " D " << dim << " keys " << keys);
        const Inputs inputs = random_inputs(shape, DType::bf16);
        Inputs with_nan = random_inputs(shape, DType::bf16);
        set(with_nan.v, {0, 0, 400, 3}, NAN);
        Tensor mask({1, 1, shape.queries, keys}, DType::b8);
        for (std::int64_t i = 0; i < shape.queries; ++i)
          for (std::int64_t j = 0; j < keys; ++j) mask.at<bool>({0, 0, i, j}) = is_allowed(kind, i, j);
        for (AttentionOptions options :
             {AttentionOptions{.mask = mask}, AttentionOptions{.mask = mask, .causal = Causal::bottom_right},
              AttentionOptions{.mask = mask, .softcap = 3.0},
              AttentionOptions{.mask = mask, .dropout = 0.3, .seed = 5}}) {
          options.engine = Engine::cuda;
          // What a dropped weight makes of a NaN is not promised.
          const Call call = (options.dropout > 0 ? inputs : with_nan).call(options);
          const Results results = call.run();
          expect_forward(call, results);
          EXPECT_TRUE(same_bits(call.run(), results));
        }
      }
}

}  // namespace
}  // namespace headway::test
