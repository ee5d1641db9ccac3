// bf16 beside the sizes that matrix units work in: 16 rows, 32 numbers a product, 64 queries or keys a panel, 512 keys
// a block. What lies behind the last row, key or number of a tile must not show.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "support/inputs.h"

namespace headway::test {
namespace {

class TileBorders : public EngineTest {};

constexpr double infinity = std::numeric_limits<double>::infinity();

TEST_P(TileBorders, sizes_beside_whole_tiles_are_within_the_bounds) {
  const Shape shapes[] = {
      {1, 1, 1, 33, 31, 31, 33},   {1, 1, 1, 65, 97, 33, 15},   {1, 2, 1, 129, 127, 64, 64}, {1, 1, 1, 48, 545, 65, 17},
      {1, 1, 1, 144, 257, 16, 80}, {1, 1, 1, 17, 1025, 96, 32}, {1, 1, 1, 70, 100, 0, 16},   {1, 1, 1, 70, 100, 16, 0},
  };
  for (const Shape& shape : shapes)
    for (const Causal causal : {Causal::none, Causal::bottom_right}) {
      SCOPED_TRACE(testing::Message() << shape.queries << " x " << shape.keys << " x " << shape.head_dim
                                      << (causal == Causal::none ? "" : " causal"));
      const Inputs inputs = random_inputs(shape, DType::bf16);
      expect_contract(inputs.call(on_engine({.causal = causal})));
    }
}

Inputs copy_of(const Inputs& inputs) { return {inputs.q.clone(), inputs.k.clone(), inputs.v.clone()}; }

// Row i sees keys 40 + i to 60 + i: those beside them share their tiles.
TEST_P(TileBorders, forbidden_numbers_in_the_tile_of_allowed_ones_never_show) {
  const Shape shape{1, 1, 1, 40, 100, 48, 48};
  const Inputs inputs = random_inputs(shape, DType::bf16);
  const Tensor grad_out = random_inputs({1, 1, 1, 40, 40, 48, 48}, DType::bf16, 5).v.clone();
  const Call call = inputs.call(on_engine({.window = Window{.left = 20, .right = 0}}));
  const Results clean = call.run();
  const GradientTensors gradients = call.gradients(grad_out, clean);
  for (const double planted : {std::nan(""), infinity, 1e-40, 3e38}) {
    Inputs dirty = copy_of(inputs);
    for (std::int64_t d = 0; d < shape.head_dim; ++d) {
      set(dirty.k, {0, 0, 39, d}, planted);
      set(dirty.v, {0, 0, 39, d}, planted);
      set(dirty.v, {0, 0, 17, d}, planted);
    }
    const Call with_dirt = dirty.call(call.options);
    EXPECT_TRUE(same_bits(with_dirt.run(), clean)) << planted;
    EXPECT_TRUE(same_bits(with_dirt.gradients(grad_out, clean), gradients)) << planted;
    set(dirty.v, {0, 0, 70, 3}, planted);  // rows 10 to 30 see this one
    const Results seen = with_dirt.run();
    for (const std::int64_t row : {0, 9, 31, 39})
      EXPECT_TRUE(same_bits(seen.out.view().slice(2, row, row + 1), clean.out.view().slice(2, row, row + 1)))
          << planted << ", row " << row;
    expect_forward(with_dirt, seen);
  }
}

// Scores that rise over the keys, huge ones, and those of NaN make their own row take another way.
TEST_P(TileBorders, a_row_of_unusual_scores_changes_no_bit_of_its_neighbours) {
  const Shape shape{1, 1, 1, 64, 640, 64, 32};
  const Inputs inputs = random_inputs(shape, DType::bf16);
  const Results clean = inputs.call(on_engine()).run();
  for (const double planted : {3e3, 1e30, 1e-40, std::nan("")}) {
    Inputs unusual = copy_of(inputs);
    for (std::int64_t d = 0; d < shape.head_dim; ++d) set(unusual.q, {0, 0, 21, d}, planted);
    const Results results = unusual.call(on_engine()).run();
    for (const std::int64_t row : {0, 20, 22, 63}) {
      EXPECT_TRUE(same_bits(results.out.view().slice(2, row, row + 1), clean.out.view().slice(2, row, row + 1)))
          << planted << ", row " << row;
      EXPECT_EQ(get(results.lse, {0, 0, row}), get(clean.lse, {0, 0, row})) << planted << ", row " << row;
    }
    if (!std::isnan(planted)) expect_forward(unusual.call(on_engine()), results);
  }
}

ON_EVERY_HOST_ENGINE(TileBorders);

}  // namespace
}  // namespace headway::test
