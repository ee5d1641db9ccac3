// Dropout: the generator against its published vectors, and the mask as a pure function of (seed, b, h, i, j).
#include "core/dropout.h"

#include <gtest/gtest.h>

#include <cmath>

#include "support/inputs.h"

namespace headway::test {
namespace {

using Words = std::array<std::uint32_t, 4>;

// Random123's known-answer vectors for philox4x32-10.
struct KnownAnswer {
  Words counter;
  std::array<std::uint32_t, 2> key;
  Words answer;
};
const KnownAnswer known_answers[] = {
    {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
    {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
     {0xffffffff, 0xffffffff},
     {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
    {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
     {0xa4093822, 0x299f31d0},
     {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
};

TEST(Philox, gives_the_published_answers) {
  for (const KnownAnswer& known : known_answers) {
    EXPECT_EQ(philox(known.counter, known.key), known.answer) << "the oracle's";
    const std::uint64_t key = known.key[0] | std::uint64_t{known.key[1]} << 32;
    EXPECT_EQ(Philox4x32::words(known.counter, key), known.answer) << "the library's";
  }
}

TEST(Philox, gives_the_same_answers_in_parts_of_row_and_keys) {
  for (const KnownAnswer& known : known_answers) {
    const auto keys = Philox4x32::schedule(known.key[0] | std::uint64_t{known.key[1]} << 32);
    const auto [quad, i, h, b] = known.counter;
    Words words = QuadDraw::of(keys, quad, h, b).with(RowDraw::of(keys, i, h));
    for (std::size_t round = QuadDraw::rounds; round < keys.size(); ++round)
      words = Philox4x32::round(words, keys[round]);
    EXPECT_EQ(words, known.answer);
  }
}

class Dropout : public EngineTest {
 protected:
  // Whether each element is kept: with equal scores and V the identity, out(i,j) is 0 or 1 / (Sk (1-p)).
  Array kept_by_engine(const Shape& shape, double dropout, std::uint64_t seed) const {
    const Tensor q({shape.batch, shape.heads, shape.queries, 1}, DType::f64);
    const Tensor k({shape.batch, shape.kv_heads, shape.keys, 1}, DType::f64);
    Tensor v({shape.batch, shape.kv_heads, shape.keys, shape.keys}, DType::f64);
    for (std::int64_t n = 0; n < v.elements(); ++n) {
      const Dims index = index_of(n, v.sizes());
      v.as<double>()[n] = index[2] == index[3];
    }
    Array kept = read(Call{q, k, v, on_engine({.dropout = dropout, .seed = seed}), {}}.run().out);
    for (Real& value : kept.values) {
      const Real expected = value == 0 ? 0 : 1 / (static_cast<Real>(shape.keys) * (1 - static_cast<Real>(dropout)));
      EXPECT_NEAR(static_cast<double>(value), static_cast<double>(expected), 1e-12);
      value = value != 0;
    }
    return kept;
  }
};

TEST_P(Dropout, keeps_what_the_documented_counter_layout_says) {
  const Shape shape{.batch = 3, .heads = 2, .kv_heads = 1, .queries = 6, .keys = 23};
  for (const std::uint64_t seed : {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{0xdeadbeef'00000001}})
    for (const double dropout : {0.1, 0.5, 0.97}) {
      const Array kept = kept_by_engine(shape, dropout, seed);
      const std::array<std::uint32_t, 2> key{static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)};
      for (std::uint32_t b = 0; b < 3; ++b)
        for (std::uint32_t h = 0; h < 2; ++h)
          for (std::uint32_t i = 0; i < 6; ++i)
            for (std::uint32_t j = 0; j < 23; ++j) {
              const std::uint32_t word = philox({j / 4, i, h, b}, key)[j % 4];
              ASSERT_EQ(kept(b, h, i, j), word >= std::round(dropout * 0x1p32)) << b << h << i << j;
            }
    }
}

TEST_P(Dropout, drops_about_its_share) {
  const Shape shape{.batch = 1, .heads = 4, .kv_heads = 1, .queries = 50, .keys = 50};
  for (const double dropout : {0.1, 0.5, 0.9}) {
    Real kept = 0;
    for (Real value : kept_by_engine(shape, dropout, 3).values) kept += value;
    const double expected = 10000 * (1 - dropout);
    EXPECT_NEAR(static_cast<double>(kept), expected, 5 * std::sqrt(10000 * dropout * (1 - dropout)));
  }
}

TEST_P(Dropout, of_zero_needs_no_seed_and_changes_nothing) {
  const Inputs inputs = random_inputs({});
  EXPECT_TRUE(
      same_bits(inputs.call(on_engine({.dropout = 0.0, .seed = 9})).run(true), inputs.call(on_engine()).run(true)));
}

TEST_P(Dropout, leaves_weights_and_lse_as_they_are_without_it) {
  for (DType type : float_types) {
    const Inputs inputs = random_inputs({}, type);
    const Results with = inputs.call(on_engine({.dropout = 0.5, .seed = 9})).run(true);
    const Results without = inputs.call(on_engine()).run(true);
    EXPECT_TRUE(same_bits(with.lse, without.lse) && same_bits(*with.weights, *without.weights));
    EXPECT_FALSE(same_bits(with.out, without.out));
  }
}

TEST_P(Dropout, is_another_mask_under_another_seed) {
  const Shape shape{.batch = 1, .heads = 1, .kv_heads = 1, .queries = 20, .keys = 20};
  const Array one = kept_by_engine(shape, 0.5, 1);
  EXPECT_NE(one.values, kept_by_engine(shape, 0.5, 2).values);
  EXPECT_NE(one.values, kept_by_engine(shape, 0.5, 1 | std::uint64_t{1} << 32).values);
}

TEST_P(Dropout, does_not_change_when_other_keys_are_masked) {
  const Inputs inputs = random_inputs({}, DType::f64);
  const Tensor mask = Tensor::of<bool>({7}, {true, false, true, true, false, true, true});
  expect_contract(inputs.call(on_engine({.mask = mask, .dropout = 0.5, .seed = 77})));
  expect_contract(inputs.call(on_engine({.window = Window{2, 0}, .dropout = 0.5, .seed = 77})));
}

ON_EVERY_ENGINE(Dropout);

}  // namespace
}  // namespace headway::test
