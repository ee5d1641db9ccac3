// Parts of the matrix: the same numbers as the whole one has there.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "headway/headway.h"
#include "support/inputs.h"
#include "support/run.h"

namespace headway::test {
namespace {

class WeightsIn : public EngineTest {};

const Rectangle parts[] = {{0, 5, 0, 7}, {2, 4, 3, 6}, {4, 5, 6, 7}, {1, 1, 0, 7}, {0, 5, 2, 2}};

TEST_P(WeightsIn, are_the_whole_matrix_there_with_and_without_lse_under_every_option_and_type) {
  const Shape shape{};
  for (DType type : float_types)
    for (const OptionSet& kind : all_kinds(shape)) {
      SCOPED_TRACE(kind.name + std::string(" ") + name(type));
      const Inputs inputs = random_inputs(shape, type);
      const AttentionOptions options = on_engine(kind.options);
      const Forward exact = forward(spec_of(inputs.q, inputs.k, inputs.v, options));
      const DType computed = type == DType::f64 ? DType::f64 : DType::f32;
      const Array bound = error_bound(exact.weights, Kind::weights, computed);
      const Tensor lse = run_analyze(inputs.q, inputs.k, options).lse;
      for (const Rectangle& part : parts)
        for (const bool with_lse : {false, true}) {
          const Tensor found = run_weights_in(inputs.q, inputs.k, part, options,
                                              with_lse ? std::optional<ConstTensorView>(lse) : std::nullopt);
          const Dims sizes{2, 4, part.row_end - part.row_begin, part.key_end - part.key_begin};
          ASSERT_EQ(found.sizes(), sizes);
          Array expected(sizes), allowed(sizes);
          for (std::int64_t n = 0; n < expected.elements(); ++n) {
            const Dims at = index_of(n, sizes);
            const auto value = [&](const Array& a) {
              return a(at[0], at[1], at[2] + part.row_begin, at[3] + part.key_begin);
            };
            expected.values[static_cast<std::size_t>(n)] = value(exact.weights.value);
            allowed.values[static_cast<std::size_t>(n)] = 2 * value(bound);
          }
          EXPECT_TRUE(within(found, expected, allowed));
        }
    }
}

TEST_P(WeightsIn, average_over_the_heads_under_every_option_and_type) {
  const Shape shapes[] = {{}, {.batch = 1, .heads = 3, .kv_heads = 1, .queries = 66, .keys = 70, .head_dim = 24}};
  for (const Shape& shape : shapes)
    for (DType type : float_types)
      for (const OptionSet& kind : all_kinds(shape)) {
        SCOPED_TRACE(kind.name + std::string(" ") + name(type));
        const Inputs inputs = random_inputs(shape, type);
        AttentionOptions options = on_engine(kind.options);
        options.dropout = 0;
        const Forward exact = forward(spec_of(inputs.q, inputs.k, inputs.v, options));
        const DType computed = type == DType::f64 ? DType::f64 : DType::f32;
        Tensor lse({shape.batch, shape.heads, shape.queries}, computed), out(exact.out.value.sizes(), type);
        run_attention(inputs.q, inputs.k, inputs.v, out, options, {.lse = lse});
        const Array bound = error_bound(exact.weights, Kind::weights, type);
        const Dims sizes{shape.batch, shape.queries, shape.keys};
        Array expected(sizes), allowed(sizes);
        for (std::int64_t n = 0; n < expected.elements(); ++n) {
          const Dims at = index_of(n, sizes);
          Real sum = 0, error = 0;
          for (std::int64_t h = 0; h < shape.heads; ++h) {
            sum += exact.weights.value(at[0], h, at[1], at[2]);
            error += bound(at[0], h, at[1], at[2]);
          }
          expected.values[static_cast<std::size_t>(n)] = sum / static_cast<Real>(shape.heads);
          allowed.values[static_cast<std::size_t>(n)] = 2 * error / static_cast<Real>(shape.heads);
        }
        Tensor mean(sizes, type), again(sizes, type);
        run_mean_weights(inputs.q, inputs.k, lse, mean, options);
        EXPECT_TRUE(within(mean, expected, allowed));
        // Into another layout, with the same bits.
        Tensor keys_first({shape.batch, shape.keys, shape.queries}, type);
        run_mean_weights(inputs.q, inputs.k, lse, keys_first.view().transpose(1, 2), options);
        copy(keys_first.view().transpose(1, 2), again);
        EXPECT_EQ(std::memcmp(mean.data(), again.data(), static_cast<std::size_t>(mean.elements()) * size_of(type)), 0);
      }
}

TEST_P(WeightsIn, maps_are_means_and_maxima_of_the_weights) {
  const Inputs inputs = random_inputs({.batch = 2, .heads = 2, .kv_heads = 1, .queries = 90, .keys = 130});
  const AttentionOptions options = on_engine({.causal = Causal::bottom_right});
  const Tensor lse = run_analyze(inputs.q, inputs.k, options).lse;
  const Rectangle part{7, 88, 30, 129};
  const Tensor weights = run_weights_in(inputs.q, inputs.k, part, options, lse);
  const TileMap map = run_tile_map(inputs.q, inputs.k, lse, 1, 1, part, 16, 20, options);
  ASSERT_EQ(map.mean.sizes(), (Dims{6, 5}));
  for (std::int64_t r = 0; r < 6; ++r)
    for (std::int64_t c = 0; c < 5; ++c) {
      double sum = 0, highest = 0, count = 0;
      for (std::int64_t i = 16 * r; i < std::min<std::int64_t>(16 * r + 16, 81); ++i)
        for (std::int64_t j = 20 * c; j < std::min<std::int64_t>(20 * c + 20, 99); ++j) {
          const double p = weights.at<float>({1, 1, i, j});
          sum += p;
          highest = std::max(highest, p);
          count += 1;
        }
      EXPECT_NEAR(get(map.mean, {r, c}), sum / count, 1e-6);
      EXPECT_NEAR(get(map.max, {r, c}), highest, 1e-6);
    }
}

TEST_P(WeightsIn, a_cell_of_a_map_may_be_larger_than_everything) {
  constexpr std::int64_t largest = std::numeric_limits<std::int64_t>::max();
  const Inputs inputs = random_inputs({.batch = 1, .heads = 2, .kv_heads = 1, .queries = 9, .keys = 13});
  const Tensor lse = run_analyze(inputs.q, inputs.k, on_engine()).lse;
  const Rectangle part{3, 8, 2, 13};
  const Tensor weights = run_weights_in(inputs.q, inputs.k, part, on_engine(), lse);
  double sum = 0, highest = 0;
  for (std::int64_t i = 0; i < 5; ++i)
    for (std::int64_t j = 0; j < 11; ++j) {
      const double p = weights.at<float>({0, 1, i, j});
      sum += p;
      highest = std::max(highest, p);
    }
  const TileMap map = run_tile_map(inputs.q, inputs.k, lse, 0, 1, part, largest, largest, on_engine());
  ASSERT_EQ(map.mean.sizes(), (Dims{1, 1}));
  EXPECT_NEAR(get(map.mean, {0, 0}), sum / 55, 1e-6);
  EXPECT_NEAR(get(map.max, {0, 0}), highest, 1e-6);
}

TEST_P(WeightsIn, a_forbidden_nan_is_not_seen) {
  Inputs inputs = random_inputs({});
  for (std::int64_t d = 0; d < 8; ++d) inputs.k.at<float>({0, 1, 6, d}) = NAN;
  const AttentionOptions options = on_engine({.causal = Causal::top_left});
  const Tensor lse = run_analyze(inputs.q, inputs.k, options).lse;
  const Tensor found = run_weights_in(inputs.q, inputs.k, {0, 5, 4, 7}, options, lse);
  for (std::int64_t i = 0; i < 5; ++i) EXPECT_EQ(found.at<float>({0, 3, i, 2}), 0);
}

TEST_P(WeightsIn, say_what_is_wrong) {
  const Inputs inputs = random_inputs({});
  const Tensor lse({2, 4, 5}), other({2, 4, 6}), wide({2, 4, 5}, DType::f64);
  const auto in = [&](const Rectangle& part, const Tensor& rows) {
    return [&, part] { run_weights_in(inputs.q, inputs.k, part, on_engine(), rows); };
  };
  EXPECT_TRUE(throws<InvalidArgument>("weights_in", {"rows [0, 6)", "[0, 5)"}, in({0, 6, 0, 7}, lse)));
  EXPECT_TRUE(throws<InvalidArgument>("weights_in", {"keys [3, 2)", "[0, 7)"}, in({0, 5, 3, 2}, lse)));
  EXPECT_TRUE(throws<InvalidArgument>("weights_in", {"lse has shape (2, 4, 6)", "(2, 4, 5)"}, in({0, 5, 0, 7}, other)));
  EXPECT_TRUE(throws<TypeMismatch>("weights_in", {"lse has type f64", "f32"}, in({0, 5, 0, 7}, wide)));
  const auto map = [&](std::int64_t head, std::int64_t cell) {
    return [&, head, cell] { run_tile_map(inputs.q, inputs.k, lse, 0, head, {0, 5, 0, 7}, cell, 1, on_engine()); };
  };
  EXPECT_TRUE(throws<InvalidArgument>("tile_map", {"head 4", "below 2 and 4"}, map(4, 1)));
  EXPECT_TRUE(throws<InvalidArgument>("tile_map", {"cells are 0 by 1"}, map(0, 0)));
  Tensor narrow({2, 5, 6}), halves({2, 5, 7}, DType::f16), mean({2, 5, 7});
  const auto average = [&](const Tensor& rows, Tensor& into) {
    return [&] { run_mean_weights(inputs.q, inputs.k, rows, into, on_engine()); };
  };
  EXPECT_TRUE(
      throws<InvalidArgument>("mean_weights", {"the mean has shape (2, 5, 6)", "(2, 5, 7)"}, average(lse, narrow)));
  EXPECT_TRUE(throws<TypeMismatch>("mean_weights", {"the mean has type f16", "query has f32"}, average(lse, halves)));
  EXPECT_TRUE(throws<InvalidArgument>("mean_weights", {"lse has shape (2, 4, 6)", "(2, 4, 5)"}, average(other, mean)));
}

ON_EVERY_ENGINE(WeightsIn);

class WeightsFromLse : public EngineTest {};

// lse is rounded: exp(s - lse) of scores of 3e14 passes what a float holds.
TEST_P(WeightsFromLse, of_large_scores_add_up_to_1) {
  for (DType type : {DType::f32, DType::f64, DType::bf16}) {
    Inputs inputs = random_inputs({}, type);
    const double size = type == DType::f64 ? 1e15 : 1e7;
    for (Tensor* tensor : {&inputs.q, &inputs.k})
      each_index(tensor->sizes(), [&](const Dims& at) { set(*tensor, at, size); });
    for (std::int64_t d = 0; d < 8; ++d) set(inputs.q, {1, 2, 3, d}, 0.5 / size);  // one row of ordinary scores
    for (std::int64_t d = 0; d < 8; ++d) set(inputs.q, {0, 0, 1, d}, NAN);
    const AttentionOptions options = on_engine();
    const Tensor lse = run_analyze(inputs.q, inputs.k, options).lse;
    const auto expect = [&](double found, std::int64_t b, std::int64_t h, std::int64_t i) {
      if (b == 0 && h == 0 && i == 1)
        EXPECT_TRUE(std::isnan(found)) << found;
      else
        EXPECT_NEAR(found, 1.0 / 7, type == DType::bf16 ? 1e-3 : 1e-5) << b << " " << h << " " << i;
    };
    const Tensor part = run_weights_in(inputs.q, inputs.k, {1, 5, 2, 6}, options, lse);
    each_index(part.sizes(), [&](const Dims& at) { expect(get(part, at), at[0], at[1], at[2] + 1); });
    Tensor mean({2, 5, 7}, type);
    run_mean_weights(inputs.q, inputs.k, lse, mean, options);
    each_index(mean.sizes(), [&](const Dims& at) { expect(get(mean, at), at[0], 0, at[1]); });
    const TileMap map = run_tile_map(inputs.q, inputs.k, lse, 1, 2, {0, 5, 0, 7}, 1, 2, options);
    each_index(map.max.sizes(), [&](const Dims& at) { expect(get(map.max, at), 1, 2, at[0]); });
  }
}

TEST_P(WeightsFromLse, of_no_heads_have_a_mean_of_0) {
  const Tensor none({2, 0, 5, 8}), keys({2, 0, 7, 8}), lse({2, 0, 5});
  Tensor mean = filled({2, 5, 7}, DType::f32, NAN);
  run_mean_weights(none, keys, lse, mean, on_engine());
  each_index(mean.sizes(), [&](const Dims& at) { EXPECT_EQ(get(mean, at), 0); });
}

ON_EVERY_ENGINE(WeightsFromLse);

}  // namespace
}  // namespace headway::test
