// A mask allows exactly the pairs of its definition, however it is composed: random expressions against
// bools computed from the definitions.
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <random>
#include <sstream>

#include "headway/headway.h"

namespace headway {
namespace {

using Numbers = std::vector<std::int64_t>;
// Whether query i of batch item b and head h may see key j.
using Rule = std::function<bool(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j)>;

struct Case {
  Mask mask;
  Rule rule;
};

struct Shape {
  std::int64_t batch = 1, heads = 1, queries = 0, keys = 0;
};

class Draw {
 public:
  Draw(unsigned seed, Shape shape, bool with_bools) : random_(seed), shape_(shape), with_bools_(with_bools) {}

  Case expression(int depth) {
    if (depth == 0 || number(0, 3) == 0) {
      return leaf();
    }
    const Case left = expression(depth - 1), right = expression(depth - 1);
    if (number(0, 1) == 0) {
      return {left.mask & right.mask,
              [=](auto b, auto h, auto i, auto j) { return left.rule(b, h, i, j) && right.rule(b, h, i, j); }};
    }
    return {left.mask | right.mask,
            [=](auto b, auto h, auto i, auto j) { return left.rule(b, h, i, j) || right.rule(b, h, i, j); }};
  }

 private:
  std::int64_t number(std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(random_);
  }
  Numbers numbers(std::int64_t count, std::int64_t low, std::int64_t high) {
    Numbers result;
    for (std::int64_t i = 0; i < count; ++i) {
      result.push_back(number(low, high));
    }
    return result;
  }
  static std::int64_t at(const Numbers& numbers, std::int64_t index) {
    return numbers[static_cast<std::size_t>(index)];
  }

  Case leaf() {
    const std::int64_t offset = shape_.keys - shape_.queries;
    switch (number(0, with_bools_ ? 9 : 7)) {
      case 0: return {masks::causal(), [=](auto, auto, auto i, auto j) { return j <= i + offset; }};
      case 1: {
        const std::int64_t left = number(0, 6), right = number(0, 6);
        return {masks::window(left, right),
                [=](auto, auto, auto i, auto j) { return j >= i + offset - left && j <= i + offset + right; }};
      }
      case 2: {
        const std::int64_t n = number(0, shape_.keys + 2);
        return {masks::first(n), [=](auto, auto, auto, auto j) { return j < n; }};
      }
      case 3: {
        const Numbers n = numbers(shape_.batch, 0, shape_.keys);
        return {masks::prefix(n), [=](auto b, auto, auto i, auto j) { return j < at(n, b) || j <= i + offset; }};
      }
      case 4: return documents();
      case 5: return blocks();
      case 6: return tree();
      case 7: return spans();
      case 8: return bools(false);
      default: return bools(true);
    }
  }

  Case documents() {
    const std::int64_t queries = shape_.queries, keys = shape_.keys;
    const Numbers ids = numbers(shape_.batch * queries, -1, 3), key_ids = numbers(keys, -1, 3);
    return {masks::documents(ConstTensorView(ids, {shape_.batch, queries}), masks::Integers(key_ids)),
            [=](auto b, auto, auto i, auto j) {
              return at(ids, b * queries + i) >= 0 && at(ids, b * queries + i) == at(key_ids, j);
            }};
  }

  Case blocks() {
    const std::int64_t query_size = number(1, 5), key_size = number(1, 5), heads = shape_.heads;
    const std::int64_t rows = (shape_.queries + query_size - 1) / query_size;
    const std::int64_t columns = (shape_.keys + key_size - 1) / key_size;
    const Numbers keep = numbers(heads * rows * columns, 0, 1);
    Tensor bools({heads, rows, columns}, DType::b8);
    copy(ConstTensorView(keep, {heads, rows, columns}), bools);
    return {masks::blocks(bools, query_size, key_size), [=](auto, auto h, auto i, auto j) {
              return at(keep, (h * rows + i / query_size) * columns + j / key_size) != 0;
            }};
  }

  Case tree() {
    const std::int64_t offset = shape_.keys - shape_.queries;
    if (offset < 0) {
      return {masks::causal(), [=](auto, auto, auto i, auto j) { return j <= i + offset; }};
    }
    Numbers parents;
    for (std::int64_t i = 0; i < shape_.queries; ++i) {
      parents.push_back(number(0, 2) == 0 ? i - 1 : number(-1, i - 1));
    }
    return {masks::tree(parents), [=](auto, auto, auto i, auto j) {
              if (j < offset) {
                return true;
              }
              std::int64_t token = i;
              while (token >= 0 && token != j - offset) {
                token = at(parents, token);
              }
              return token >= 0;
            }};
  }

  Case spans() {
    const std::int64_t rows = number(1, 4), entries = (shape_.queries + rows - 1) / rows, width = number(0, 3);
    const std::int64_t batch = shape_.batch, heads = shape_.heads;
    Numbers numbers;
    for (std::int64_t i = 0; i < batch * heads * entries * width; ++i) {
      const std::int64_t begin = number(0, shape_.keys);
      numbers.insert(numbers.end(), {begin, number(begin, shape_.keys)});
    }
    return {masks::spans(ConstTensorView(numbers, {batch, heads, entries, width, 2}), rows),
            [=](auto b, auto h, auto i, auto j) {
              for (std::int64_t r = 0; r < width; ++r) {
                const std::int64_t place = 2 * (((b * heads + h) * entries + i / rows) * width + r);
                if (at(numbers, place) <= j && j < at(numbers, place + 1)) {
                  return true;
                }
              }
              return false;
            }};
  }

  Case bools(bool as_spans) {
    const std::int64_t queries = shape_.queries, keys = shape_.keys;
    const Numbers values = numbers(queries * keys, 0, 1);
    Tensor dense({queries, keys}, DType::b8);
    copy(ConstTensorView(values, {queries, keys}), dense);
    return {as_spans ? masks::from_bool(dense) : masks::dense(dense),
            [=](auto, auto, auto i, auto j) { return at(values, i * keys + j) != 0; }};
  }

  std::mt19937 random_;
  Shape shape_;
  bool with_bools_;
};

Shape shape_of(unsigned seed) {
  std::mt19937 random(seed);
  const auto size = [&](int low, int high) { return std::int64_t{std::uniform_int_distribution<>(low, high)(random)}; };
  return {size(1, 3), size(1, 3), size(0, 20), size(0, 20)};
}

// Element [b,h,..] of an axis that may be 1.
std::int64_t along(std::int64_t size, std::int64_t index) { return size == 1 ? 0 : index; }

template <class Visit>
void for_each_pair(const Shape& shape, const Visit& visit) {
  for (std::int64_t b = 0; b < shape.batch; ++b) {
    for (std::int64_t h = 0; h < shape.heads; ++h) {
      for (std::int64_t i = 0; i < shape.queries; ++i) {
        for (std::int64_t j = 0; j < shape.keys; ++j) {
          visit(b, h, i, j);
        }
      }
    }
  }
}

// check(shape, case) for random expressions.
template <class Check>
void for_each_expression(bool with_bools, const Check& check) {
  for (unsigned seed = 0; seed < 500; ++seed) {
    const Shape shape = shape_of(seed);
    const Case drawn = Draw(seed, shape, with_bools).expression(3);
    SCOPED_TRACE(testing::Message() << "seed " << seed << ": " << to_string(drawn.mask));
    check(shape, drawn);
    if (testing::Test::HasFailure()) {
      return;
    }
  }
}

TEST(masks, the_bools_of_an_expression_are_those_of_its_definition) {
  for_each_expression(true, [](const Shape& shape, const Case& drawn) {
    const Tensor bools = drawn.mask.to_bool(shape.queries, shape.keys);
    ASSERT_EQ(bools.sizes(), Dims({drawn.mask.batch(), drawn.mask.heads(), shape.queries, shape.keys}));
    for_each_pair(shape, [&](auto b, auto h, auto i, auto j) {
      ASSERT_EQ(bools.at<bool>({along(bools.size(0), b), along(bools.size(1), h), i, j}), drawn.rule(b, h, i, j))
          << Dims{b, h, i, j};
    });
  });
}

TEST(masks, pairs_are_counted_over_a_mask_s_own_axes) {
  for_each_expression(true, [](const Shape& shape, const Case& drawn) {
    std::int64_t expected = 0;
    for_each_pair(shape, [&](auto b, auto h, auto i, auto j) {
      const bool is_own = b < drawn.mask.batch() && h < drawn.mask.heads();
      expected += is_own && drawn.rule(b, h, i, j) ? 1 : 0;
    });
    EXPECT_EQ(drawn.mask.pairs(shape.queries, shape.keys), expected);
  });
}

// begin 0 < end 0 < begin 1 < end 1 ... and empty ones last; as many as the entry that has most.
TEST(masks, spans_are_sorted_apart_and_as_few_as_may_be) {
  for_each_expression(false, [](const Shape& shape, const Case& drawn) {
    const MaskSpans found = drawn.mask.spans(shape.queries, shape.keys);
    const Tensor& spans = found.spans;
    ASSERT_EQ(spans.size(2), (shape.queries + found.rows - 1) / found.rows);
    std::int64_t most = 0;
    for_each_pair({shape.batch, shape.heads, shape.queries, 1}, [&](auto b, auto h, auto i, auto) {
      std::int64_t runs = 0;
      for (std::int64_t j = 0; j < shape.keys; ++j) {
        runs += drawn.rule(b, h, i, j) && (j == 0 || !drawn.rule(b, h, i, j - 1)) ? 1 : 0;
      }
      most = std::max(most, runs);
      std::int64_t previous = -1;
      for (std::int64_t r = 0; r < spans.size(3); ++r) {
        const auto number = [&](std::int64_t side) {
          return spans.at<std::int32_t>({along(spans.size(0), b), along(spans.size(1), h), i / found.rows, r, side});
        };
        ASSERT_EQ(number(0) < number(1), r < runs);
        ASSERT_TRUE(number(0) > previous || r >= runs);
        previous = number(1);
      }
    });
    EXPECT_EQ(spans.size(3), std::max<std::int64_t>(most, 1));
  });
}

TEST(masks, blocks_stay_lists_for_each_block_of_queries) {
  Tensor keep({4, 4}, DType::b8);
  keep.at<bool>({1, 0}) = keep.at<bool>({1, 1}) = keep.at<bool>({1, 3}) = true;
  const Mask mask = masks::blocks(keep, 64);
  const MaskSpans found = mask.spans(256, 250);
  EXPECT_EQ(found.rows, 64);
  EXPECT_EQ(found.spans.sizes(), Dims({1, 1, 4, 2, 2}));
  EXPECT_EQ(found.spans.at<std::int32_t>({0, 0, 1, 0, 1}), 128);
  EXPECT_EQ(found.spans.at<std::int32_t>({0, 0, 1, 1, 1}), 250);
  EXPECT_EQ((mask & masks::blocks(keep, 64)).spans(256, 250).rows, 64);
  EXPECT_EQ((mask | masks::first(3)).spans(256, 250).rows, 64) << "the first keys are the same for all rows";
  EXPECT_EQ((mask & masks::causal()).spans(256, 256).rows, 1);
}

TEST(masks, documents_from_lengths_leave_the_rest_as_padding) {
  const Tensor bools = masks::documents_of({2, 0, 1}).to_bool(5, 5);
  for (std::int64_t i = 0; i < 5; ++i) {
    for (std::int64_t j = 0; j < 5; ++j) {
      EXPECT_EQ(bools.at<bool>({0, 0, i, j}), (i < 2 && j < 2) || (i == 2 && j == 2));
    }
  }
}

TEST(masks, documents_from_lengths_of_each_batch_item) {
  const std::vector<std::int64_t> lengths = {1, 2, 3, 0};
  EXPECT_EQ(masks::documents_of(ConstTensorView(lengths, {2, 2})).pairs(4, 4), 1 + 4 + 9);
}

TEST(masks, an_id_that_recurs_is_seen_wherever_it_is) {
  const MaskSpans found = masks::documents({7, 7, 3, 7, -1}).spans(5, 5);
  EXPECT_EQ(found.spans.sizes(), Dims({1, 1, 5, 2, 2}));
  EXPECT_EQ(found.spans.at<std::int32_t>({0, 0, 3, 0, 1}), 2);
  EXPECT_EQ(found.spans.at<std::int32_t>({0, 0, 3, 1, 0}), 3);
  EXPECT_EQ(masks::documents({7, 7, 3, 7, -1}).pairs(5, 5), 9 + 1);
}

TEST(masks, one_row_of_bools_is_that_of_every_query) {
  const Tensor row = Tensor::of<bool>({1, 4}, {true, false, true, true});
  EXPECT_EQ(masks::dense(row).pairs(3, 4), 9);
  const Mask spans = masks::from_bool(Tensor({1, 64}, DType::b8));
  EXPECT_EQ(spans.spans(100, 64).rows, 100);
}

TEST(masks, bools_with_many_runs_stay_bools) {
  Tensor stripes({64, 64}, DType::b8), triangle({64, 64}, DType::b8);
  for (std::int64_t i = 0; i < 64; ++i) {
    for (std::int64_t j = 0; j < 64; ++j) {
      stripes.at<bool>({i, j}) = j % 2 == 0;
      triangle.at<bool>({i, j}) = j <= i;
    }
  }
  EXPECT_THROW(masks::from_bool(stripes).spans(64, 64), InvalidArgument);
  EXPECT_EQ(masks::from_bool(triangle).spans(64, 64).spans.sizes(), Dims({1, 1, 64, 1, 2}));
}

TEST(masks, a_window_may_be_as_wide_as_a_number) {
  constexpr std::int64_t largest = std::numeric_limits<std::int64_t>::max();
  EXPECT_EQ(masks::window(largest, 0).pairs(5, 5), 15);
  EXPECT_EQ(masks::window({}, {}).pairs(5, 5), 25);
  EXPECT_EQ(masks::first(largest).pairs(5, 5), 25);
}

TEST(masks, keys_past_32_bits_have_wide_spans) {
  const std::int64_t keys = std::int64_t{1} << 40;
  const MaskSpans found = masks::causal().spans(2, keys);
  EXPECT_EQ(found.spans.at<std::int64_t>({0, 0, 0, 0, 1}), keys - 1);
  EXPECT_EQ(masks::causal().pairs(2, keys), 2 * keys - 1);
}

TEST(masks, a_chain_of_parents_is_one_span_and_takes_no_square_of_time) {
  std::vector<std::int64_t> parents;
  for (std::int64_t i = 0; i < 200000; ++i) {
    parents.push_back(i - 1);
  }
  EXPECT_EQ(masks::tree(parents).spans(200000, 200005).spans.sizes(), Dims({1, 1, 200000, 1, 2}));
}

TEST(masks, a_small_mask_is_drawn_pair_by_pair) {
  EXPECT_EQ((masks::causal() & masks::documents({0, 0, 1})).draw(3, 3),
            "causal() & documents(3 ids): 3 queries x 3 keys, 4 pairs, 44.4 %\n"
            "■ · ·\n"
            "■ ■ ·\n"
            "· · ■");
}

TEST(masks, a_large_mask_is_drawn_in_cells) {
  const std::string drawing = masks::causal().draw(96, 96);
  EXPECT_EQ(drawing.substr(0, drawing.find('\n')), "causal(): 96 queries x 96 keys, cells of 3, 4656 pairs, 50.5 %");
  EXPECT_EQ(std::count(drawing.begin(), drawing.end(), '\n'), 32);
  EXPECT_NE(drawing.find("\n██▓▓· ·"), std::string::npos) << drawing;
}

TEST(masks, a_mask_is_written_as_it_was_made) {
  const Mask mask = (masks::first(4) | masks::window(128, {})) & masks::causal();
  EXPECT_EQ(to_string(mask), "(first(4) | window(128, None)) & causal()");
  std::ostringstream stream;
  stream << masks::causal();
  EXPECT_EQ(stream.str(), masks::causal().draw(8, 8));
}

TEST(masks, the_parts_of_a_mask_may_be_gone) {
  const auto made = [] {
    std::vector<std::int64_t> ids = {0, 0, 1};
    return masks::documents(ids) | masks::first(1);
  };
  EXPECT_EQ(made().pairs(3, 3), 6);
}

}  // namespace
}  // namespace headway
