// analyze() against the same numbers from the oracle's whole matrix.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "analysis/cells.h"
#include "analysis/slice.h"
#include "core/text.h"
#include "headway/headway.h"
#include "support/device_mirror.h"
#include "support/inputs.h"
#include "support/run.h"

namespace headway::test {
namespace {

class Analyze : public EngineTest {};

// The statistics of one head, from its exact weights [Sq,Sk].
struct Expected {
  Real entropy = 0, distance = 0, near = 0;
};

Real unit(DType type) { return type == DType::f64 ? 0x1p-53L : 0x1p-24L; }

// What one row's weights may be off by, summed over the row: the contract's bound for f32 or f64 weights.
Real row_error(const Array& bound, DType type, std::int64_t b, std::int64_t h, std::int64_t i) {
  Real sum = unit(type);
  for (std::int64_t j = 0; j < bound.size(3); ++j) sum += bound(b, h, i, j);
  return 4 * sum;
}

std::int64_t offset_of(const Spec& spec, std::int64_t b) {
  if (spec.causal == Causal::top_left) return 0;
  if (spec.causal == Causal::none) return spec.k.size(2) - spec.q.size(2);
  const bool per_batch = spec.valid_lens && spec.valid_lens->sizes().size() == 1;
  const auto keys = per_batch ? static_cast<std::int64_t>((*spec.valid_lens)(b)) : spec.k.size(2);
  const auto rows = spec.query_lens ? static_cast<std::int64_t>((*spec.query_lens)(b)) : spec.q.size(2);
  return keys - rows;
}

void expect_rows(const Call& call, const Spec& spec, const Forward& exact, const Analysis& found,
                 const AnalysisRequest& request) {
  const Array& p = exact.weights.value;
  const DType type = call.q.dtype() == DType::f64 ? DType::f64 : DType::f32;
  const Array bound = error_bound(exact.weights, Kind::weights, type);
  for (std::int64_t b = 0; b < p.size(0); ++b)
    for (std::int64_t h = 0; h < p.size(1); ++h)
      for (std::int64_t i = 0; i < p.size(2); ++i) {
        const std::int64_t position = i + offset_of(spec, b);
        Expected row;
        for (std::int64_t j = 0; j < p.size(3); ++j) {
          const Real weight = p(b, h, i, j);
          if (weight > 0) row.entropy -= weight * std::log(weight);
          row.distance += weight * static_cast<Real>(std::abs(position - j));
          const Real distance = static_cast<Real>(j) - static_cast<Real>(position);
          const bool left = !request.near.left || -distance <= static_cast<Real>(*request.near.left);
          const bool right = !request.near.right || distance <= static_cast<Real>(*request.near.right);
          if (left && right) row.near += weight;
        }
        const Real error = row_error(bound, type, b, h, i);
        const Dims at{b, h, i};
        const auto near = [&](const Tensor& tensor, Real expected, Real scale) {
          EXPECT_NEAR(get(tensor, at), static_cast<double>(expected), static_cast<double>(scale * error)) << i;
        };
        near(found.entropy, row.entropy, 20);  // |log p| + 1 up to about 20
        near(found.distance, row.distance, static_cast<Real>(p.size(2) + p.size(3)));
        near(found.near, row.near, 1);
        near(found.first, p.size(3) > 0 ? p(b, h, i, 0) : 0, 1);
        near(found.diagonal, position >= 0 && position < p.size(3) ? p(b, h, i, position) : 0, 1);
        if (exact.lse.value(b, h, i) == -INFINITY) {
          EXPECT_EQ(get(found.lse, at), -INFINITY);
        }
      }
}

void expect_top(const Forward& exact, const Analysis& found, Real tolerance) {
  const Array& p = exact.weights.value;
  for (std::int64_t b = 0; b < p.size(0); ++b)
    for (std::int64_t h = 0; h < p.size(1); ++h)
      for (std::int64_t i = 0; i < p.size(2); ++i) {
        std::vector<Real> sorted;
        for (std::int64_t j = 0; j < p.size(3); ++j) sorted.push_back(p(b, h, i, j));
        std::sort(sorted.rbegin(), sorted.rend());
        double last = 2;
        for (std::int64_t n = 0; n < found.top_keys.size(3); ++n) {
          const std::int64_t key = found.top_keys.at<std::int64_t>({b, h, i, n});
          const double weight = get(found.top_weights, {b, h, i, n});
          const Real expected = n < static_cast<std::int64_t>(sorted.size()) ? sorted[static_cast<std::size_t>(n)] : 0;
          EXPECT_NEAR(weight, static_cast<double>(expected), static_cast<double>(tolerance));
          EXPECT_LE(weight, last);
          last = weight;
          if (weight == 0) {
            EXPECT_EQ(key, -1);
          } else {
            ASSERT_TRUE(key >= 0 && key < p.size(3));
            EXPECT_NEAR(weight, static_cast<double>(p(b, h, i, key)), static_cast<double>(tolerance));
          }
        }
      }
}

void expect_maps(const Forward& exact, const Analysis& found, Real tolerance) {
  const Array& p = exact.weights.value;
  for (std::int64_t b = 0; b < p.size(0); ++b)
    for (std::int64_t h = 0; h < p.size(1); ++h) {
      for (std::int64_t j = 0; j < p.size(3); ++j) {
        Real received = 0;
        for (std::int64_t i = 0; i < p.size(2); ++i) received += p(b, h, i, j);
        EXPECT_NEAR(get(found.received, {b, h, j}), static_cast<double>(received),
                    static_cast<double>(tolerance * static_cast<Real>(p.size(2))));
      }
      for (std::int64_t r = 0; r < found.map_mean.size(2); ++r)
        for (std::int64_t c = 0; c < found.map_mean.size(3); ++c) {
          Real sum = 0, highest = 0, count = 0;
          for (std::int64_t i = r * found.row_cell; i < std::min((r + 1) * found.row_cell, p.size(2)); ++i)
            for (std::int64_t j = c * found.key_cell; j < std::min((c + 1) * found.key_cell, p.size(3)); ++j) {
              sum += p(b, h, i, j);
              highest = std::max(highest, p(b, h, i, j));
              count += 1;
            }
          EXPECT_NEAR(get(found.map_mean, {b, h, r, c}), static_cast<double>(sum / count),
                      static_cast<double>(tolerance));
          EXPECT_NEAR(get(found.map_max, {b, h, r, c}), static_cast<double>(highest), static_cast<double>(tolerance));
        }
    }
}

void expect_analysis(const Call& call, const AnalysisRequest& request) {
  const Spec spec = spec_of(call.q, call.k, call.v, call.options);
  const Forward exact = forward(spec);
  const Analysis found = run_analyze(call.q, call.k, call.options, request);
  const Real tolerance = 4096 * unit(call.q.dtype());
  expect_rows(call, spec, exact, found, request);
  expect_top(exact, found, tolerance);
  expect_maps(exact, found, tolerance);
}

TEST_P(Analyze, agrees_with_the_whole_matrix_under_every_option_and_type) {
  const Shape shape{};
  for (DType type : float_types)
    for (const OptionSet& kind : all_kinds(shape)) {
      SCOPED_TRACE(kind.name + std::string(" ") + name(type));
      const Inputs inputs = random_inputs(shape, type);
      expect_analysis(inputs.call(on_engine(kind.options)), {.top = 3, .near = {1, 2}, .cells = 3});
    }
}

TEST_P(Analyze, agrees_where_rows_and_keys_span_many_blocks_and_cells) {
  const Shape shape{.batch = 1, .heads = 2, .kv_heads = 1, .queries = 150, .keys = 300, .head_dim = 5};
  for (DType type : {DType::f32, DType::bf16})
    for (const OptionSet& kind : all_kinds(shape)) {
      SCOPED_TRACE(kind.name + std::string(" ") + name(type));
      const Inputs inputs = random_inputs(shape, type);
      expect_analysis(inputs.call(on_engine(kind.options)),
                      {.top = 8, .near = {16, 0}, .cells = type == DType::f32 ? 7 : 2});
    }
}

// Most of such keys are seen by all rows of a tile, and near to all or none of them.
TEST_P(Analyze, agrees_for_long_rows_with_cells_lists_and_neighbourhoods_of_any_size) {
  Random random(17);
  const auto draw = [&](std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(high - low + 1));
  };
  for (int n = 0; n < 12; ++n) {
    const DType type = n % 3 == 2 ? float_types[static_cast<std::size_t>(draw(0, 3))] : DType::bf16;
    const Shape shape{.batch = 1,
                      .heads = 1,
                      .kv_heads = 1,
                      .queries = draw(64, 290),
                      .keys = draw(290, 700),
                      .head_dim = draw(1, n % 4 == 3 ? 200 : 66)};
    const std::int64_t cells = draw(0, 5), top = draw(0, 3) == 0 ? draw(30, 90) : draw(0, 9);
    const Window near{draw(0, 1) == 0 ? draw(0, 40) : draw(0, 700), draw(0, 200)};
    AttentionOptions options = on_engine({.causal = n % 2 == 0 ? Causal::none : Causal::bottom_right});
    if (n % 5 == 4) options.window = Window{draw(100, 400), {}};
    SCOPED_TRACE(text("case ", n, ": ", shape.queries, " x ", shape.keys, " x ", shape.head_dim, " ", name(type),
                      ", cells ", cells, ", top ", top, ", near ", *near.left, " ", *near.right));
    const Inputs inputs = random_inputs(shape, type, static_cast<std::uint64_t>(n));
    expect_analysis(inputs.call(options), {.top = top, .near = near, .cells = cells});
  }
}

// Of long rows too: a NaN belongs to the rows that see it.
TEST_P(Analyze, a_nan_in_a_key_is_a_nan_of_the_rows_that_see_it) {
  for (DType type : {DType::f32, DType::bf16}) {
    Inputs inputs = random_inputs({.batch = 1, .heads = 1, .kv_heads = 1, .queries = 400, .keys = 400}, type);
    set(inputs.k, {0, 0, 150, 3}, NAN);
    const Analysis found = run_analyze(inputs.q, inputs.k, on_engine({.causal = Causal::top_left}),
                                       {.top = 2, .near = {8, 8}, .cells = 3});
    for (std::int64_t i = 0; i < 400; ++i)
      for (const Tensor* of_rows : {&found.lse, &found.entropy, &found.distance, &found.near})
        ASSERT_EQ(std::isnan(get(*of_rows, {0, 0, i})), i >= 150) << i;
    for (std::int64_t j = 0; j < 400; ++j) EXPECT_TRUE(std::isnan(get(found.received, {0, 0, j})));
  }
}

TEST_P(Analyze, agrees_for_cells_and_lists_of_any_size_and_every_type) {
  const Shape shape{.batch = 1, .heads = 1, .kv_heads = 1, .queries = 150, .keys = 170, .head_dim = 72};
  for (DType type : float_types)
    for (std::int64_t cells : {0, 1, 2, 40, 512}) {
      SCOPED_TRACE(name(type) + std::string(", cells ") + std::to_string(cells));
      const Inputs inputs = random_inputs(shape, type);
      const AttentionOptions options = on_engine({.causal = Causal::bottom_right, .window = Window{90, {}}});
      expect_analysis(inputs.call(options), {.top = cells, .near = {{}, 3}, .cells = cells});
    }
}

TEST_P(Analyze, agrees_for_neighbourhoods_wider_than_any_number_of_keys) {
  constexpr std::int64_t widest = std::numeric_limits<std::int64_t>::max();
  for (std::int64_t keys : {3, 9}) {
    const Inputs inputs = random_inputs({.batch = 1, .heads = 1, .kv_heads = 1, .queries = 6, .keys = keys});
    for (const Window& near : {Window{widest, widest}, Window{0, widest}, Window{widest, 0}})
      expect_analysis(inputs.call(on_engine()), {.top = 2, .near = near, .cells = 2});
  }
}

TEST_P(Analyze, a_head_alone_has_the_bits_that_it_has_among_others) {
  const Inputs inputs = random_inputs({.batch = 2, .heads = 4, .kv_heads = 2, .queries = 70, .keys = 130});
  const Analysis all = run_analyze(inputs.q, inputs.k, on_engine());
  const auto one = [](ConstTensorView view, std::int64_t h) { return view.slice(0, 1, 2).slice(1, h, h + 1); };
  const Analysis alone = run_analyze(one(inputs.q, 3), one(inputs.k, 1), on_engine());
  const auto same = [&](const Tensor& among, const Tensor& single) {
    return same_bits(convert(one(among, 3), among.dtype()), single);
  };
  EXPECT_TRUE(same(all.lse, alone.lse));
  EXPECT_TRUE(same(all.entropy, alone.entropy));
  EXPECT_TRUE(same(all.distance, alone.distance));
  EXPECT_TRUE(same(all.received, alone.received));
  EXPECT_TRUE(same(all.top_weights, alone.top_weights));
  EXPECT_TRUE(same(all.map_mean, alone.map_mean));
  EXPECT_TRUE(same(all.map_max, alone.map_max));
}

// Equal weights: the smaller keys are named. (Of many keys not all have the same bits on every engine.)
TEST_P(Analyze, names_the_smaller_of_equal_keys_first) {
  for (DType type : {DType::f32, DType::bf16})
    for (std::int64_t top : {4, 70}) {
      const Tensor q({1, 1, 64, 8}, type), k({1, 1, 400, 8}, type);
      const Analysis found = run_analyze(q, k, on_engine({.causal = Causal::bottom_right}), {.top = top, .cells = 2});
      for (std::int64_t i = 0; i < 64; ++i)
        for (std::int64_t n = 0; n < top; ++n) {
          const std::int64_t named = found.top_keys.at<std::int64_t>({0, 0, i, n});
          const bool same = n > 0 && get(found.top_weights, {0, 0, i, n}) == get(found.top_weights, {0, 0, i, n - 1});
          if (same) {
            EXPECT_GT(named, found.top_keys.at<std::int64_t>({0, 0, i, n - 1}));
          }
          if (top == 4) {
            EXPECT_EQ(named, n);
          }
        }
    }
}

TEST_P(Analyze, a_taker_gets_the_cells_that_the_maps_have) {
  const Inputs inputs = random_inputs({.batch = 2, .heads = 2, .kv_heads = 1, .queries = 100, .keys = 150});
  ConstTensorView q = inputs.q, k = inputs.k;
  DeviceMirror mirror;
  if (GetParam() == Engine::cuda) {
    mirror.add(q);
    mirror.add(k);
    mirror.place();
  }
  const Analysis maps = analyze(q, k, on_engine(), {.cells = 10});
  Tensor mean(maps.map_mean.sizes()), max(maps.map_max.sizes());
  const CellTaker taker{
      .row_cell = maps.row_cell,
      .key_cell = maps.key_cell,
      .take = [&](std::int64_t head, std::int64_t row, std::span<const double> means, std::span<const double> largest) {
        for (std::size_t c = 0; c < means.size(); ++c) {
          const Dims at{head / 2, head % 2, row, static_cast<std::int64_t>(c)};
          mean.at<float>(at) = static_cast<float>(means[c]);
          max.at<float>(at) = static_cast<float>(largest[c]);
        }
      }};
  const Analysis found = analyze(analysis_problem("analyze", q, k, on_engine()), {}, taker);
  EXPECT_TRUE(same_bits(mean, maps.map_mean));
  EXPECT_TRUE(same_bits(max, maps.map_max));
  EXPECT_TRUE(same_bits(found.entropy, maps.entropy));
  EXPECT_EQ(found.map_mean.elements(), 0);
}

TEST_P(Analyze, takes_lower_ranks_and_empty_axes) {
  Random random(3);
  const Tensor q = normal({5, 4}, DType::f32, random), k = normal({6, 4}, DType::f32, random);
  const Analysis one = run_analyze(q, k, on_engine());
  EXPECT_EQ(one.entropy.sizes(), (Dims{1, 1, 5}));
  EXPECT_EQ(one.received.sizes(), (Dims{1, 1, 6}));
  const Analysis none = run_analyze(Tensor({2, 3, 4}), Tensor({2, 0, 4}), on_engine());
  EXPECT_EQ(none.map_mean.sizes(), (Dims{2, 1, 3, 0}));
  EXPECT_EQ(get(none.lse, {0, 0, 0}), -INFINITY);
  EXPECT_EQ(get(none.entropy, {1, 0, 2}), 0);
  EXPECT_EQ(none.top_keys.at<std::int64_t>({0, 0, 0, 0}), -1);
  EXPECT_EQ(run_analyze(Tensor({0, 4}), k, on_engine()).entropy.elements(), 0);
}

TEST_P(Analyze, gives_the_same_bits_for_every_number_of_threads) {
  const Inputs inputs = random_inputs({.batch = 1, .queries = 200, .keys = 190});
  const int before = get_threads();
  set_threads(1);
  const Analysis alone = run_analyze(inputs.q, inputs.k, on_engine());
  for (int threads : {2, 3, 7}) {
    set_threads(threads);
    const Analysis found = run_analyze(inputs.q, inputs.k, on_engine());
    EXPECT_TRUE(same_bits(found.entropy, alone.entropy));
    EXPECT_TRUE(same_bits(found.received, alone.received));
    EXPECT_TRUE(same_bits(found.map_mean, alone.map_mean));
    EXPECT_TRUE(same_bits(found.top_keys, alone.top_keys));
    EXPECT_TRUE(same_bits(found.similarity, alone.similarity));
  }
  set_threads(before);
}

TEST_P(Analyze, a_head_is_like_itself_and_unlike_an_empty_one) {
  Inputs inputs = random_inputs({.batch = 1, .heads = 3, .kv_heads = 3, .queries = 8, .keys = 8});
  copy(inputs.q.view().slice(1, 0, 1), inputs.q.view().slice(1, 1, 2));
  copy(inputs.k.view().slice(1, 0, 1), inputs.k.view().slice(1, 1, 2));
  Tensor mask({1, 3, 8, 8}, DType::b8);
  copy(filled({1, 2, 8, 8}, DType::b8, 1), mask.view().slice(1, 0, 2));
  const Analysis found = run_analyze(inputs.q, inputs.k, on_engine({.mask = mask}));
  EXPECT_NEAR(get(found.similarity, {0, 0, 1}), 1, 1e-6);
  EXPECT_EQ(get(found.similarity, {0, 0, 2}), 0);
  EXPECT_EQ(get(found.similarity, {0, 2, 2}), 0);
}

TEST_P(Analyze, similarity_is_the_cosine_of_two_maps) {
  const Inputs inputs = random_inputs({.batch = 2, .heads = 5, .kv_heads = 5, .queries = 7, .keys = 9});
  const Analysis found = run_analyze(inputs.q, inputs.k, on_engine());
  const auto product = [&](std::int64_t b, std::int64_t g, std::int64_t h) {
    double sum = 0;
    for (std::int64_t i = 0; i < 7; ++i) {
      for (std::int64_t j = 0; j < 9; ++j) sum += get(found.map_mean, {b, g, i, j}) * get(found.map_mean, {b, h, i, j});
    }
    return sum;
  };
  for (std::int64_t b = 0; b < 2; ++b) {
    for (std::int64_t g = 0; g < 5; ++g) {
      for (std::int64_t h = 0; h < 5; ++h) {
        const double cosine = product(b, g, h) / std::sqrt(product(b, g, g) * product(b, h, h));
        EXPECT_NEAR(get(found.similarity, {b, g, h}), cosine, 1e-6);
      }
    }
  }
}

TEST_P(Analyze, similarity_is_symmetric_and_at_most_1_for_any_number_of_heads) {
  const Inputs inputs = random_inputs({.batch = 1, .heads = 70, .kv_heads = 70, .queries = 70, .keys = 33});
  const Analysis found = run_analyze(inputs.q, inputs.k, on_engine());
  for (std::int64_t g = 0; g < 70; ++g) {
    EXPECT_NEAR(get(found.similarity, {0, g, g}), 1, 1e-6);
    for (std::int64_t h = 0; h < 70; ++h) {
      EXPECT_LE(get(found.similarity, {0, g, h}), 1);
      EXPECT_EQ(get(found.similarity, {0, g, h}), get(found.similarity, {0, h, g}));
    }
  }
}

TEST_P(Analyze, dropout_does_not_act) {
  const Inputs inputs = random_inputs({});
  const Analysis plain = run_analyze(inputs.q, inputs.k, on_engine());
  const Analysis dropped = run_analyze(inputs.q, inputs.k, on_engine({.dropout = 0.5, .seed = 1}));
  EXPECT_TRUE(same_bits(plain.entropy, dropped.entropy));
}

TEST_P(Analyze, says_what_is_wrong) {
  const Inputs inputs = random_inputs({});
  const auto with = [&](const AnalysisRequest& request) {
    return [&, request] { run_analyze(inputs.q, inputs.k, on_engine(), request); };
  };
  EXPECT_TRUE(throws<InvalidArgument>("analyze", {"top is -1", "0 or more"}, with({.top = -1})));
  EXPECT_TRUE(throws<InvalidArgument>("analyze", {"cells is 513", "0 to 512"}, with({.cells = 513})));
  EXPECT_TRUE(throws<InvalidArgument>("analyze", {"near has -2, expected 0 or more, or none for unlimited"},
                                      with({.near = {-2, 0}})));
  EXPECT_TRUE(throws<InvalidArgument>("analyze", {"head_dim"}, [&] { run_analyze(inputs.q, inputs.v, on_engine()); }));
}

TEST_P(Analyze, reports_progress_and_stops_when_told_to) {
  const Inputs inputs = random_inputs({.batch = 8, .queries = 64, .keys = 64});
  double last = 0;
  AttentionOptions options = on_engine();
  options.progress = [&](double share) {
    EXPECT_GE(share, last);
    last = share;
    return true;
  };
  run_analyze(inputs.q, inputs.k, options);
  EXPECT_EQ(last, 1);
  options.progress = [](double) { return false; };
  EXPECT_THROW(run_analyze(inputs.q, inputs.k, options), Cancelled);
}

ON_EVERY_ENGINE(Analyze);

}  // namespace
}  // namespace headway::test
