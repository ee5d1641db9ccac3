// Attention through structured masks: the oracle gets the same masks as bools.
#include <gtest/gtest.h>

#include <limits>

#include "headway/analysis.h"
#include "headway/masks.h"
#include "support/inputs.h"
#include "support/run.h"

namespace headway::test {
namespace {

struct Named {
  const char* name;
  Mask mask;
};

// Every kind, alone and joined, for `queries` x `keys` with two batch items and four heads.
std::vector<Named> kinds(std::int64_t queries, std::int64_t keys) {
  std::vector<std::int64_t> ids, key_ids, parents;
  for (std::int64_t j = 0; j < keys; ++j) {
    key_ids.push_back(j % 11 == 10 ? -1 : j / 3 % 4);  // ids recur
  }
  for (std::int64_t i = 0; i < queries; ++i) {
    ids.push_back(i % 7 == 6 ? -1 : i / 2 % 4);
    parents.push_back(i % 3 == 2 ? i - 2 : i - 1);
  }
  Tensor keep({4, (queries + 2) / 3, (keys + 2) / 3}, DType::b8), dense({2, 1, queries, keys}, DType::b8);
  for (std::int64_t e = 0; e < keep.elements(); ++e) {
    static_cast<char*>(keep.data())[e] = e * 7 % 5 < 2 ? 1 : 0;
  }
  for (std::int64_t e = 0; e < dense.elements(); ++e) {
    static_cast<char*>(dense.data())[e] = e * 11 % 7 < 4 ? 1 : 0;
  }
  const Mask causal = masks::causal(), documents = masks::documents(ids, masks::Integers(key_ids));
  const Mask blocks = masks::blocks(keep, 3), bools = masks::dense(dense);
  return {{"causal", causal},
          {"window", masks::window(3, 1)},
          {"first", masks::first(2)},
          {"prefix", masks::prefix({3, 0})},
          {"documents", documents},
          {"blocks", blocks},
          {"tree", masks::tree(parents)},
          {"dense", bools},
          {"documents & causal", documents & causal},
          {"window | first", masks::window(2, 0) | masks::first(2)},
          {"blocks & causal", blocks & causal},
          {"blocks | first", blocks | masks::first({1, 4})},
          {"dense & window", bools & masks::window(4, 4)},
          {"dense | first", bools | masks::first(1)},
          {"(dense & documents) | tree", (bools & documents) | masks::tree(parents)},
          {"dense & dense", bools & (masks::dense(dense) | documents) & causal},
          {"nothing", masks::first(0)}};
}

class Masks : public EngineTest {
 protected:
  // The call with the mask, against the oracle with its bools.
  void expect_as_bools(const Inputs& inputs, AttentionOptions options, const Mask& mask) const {
    const std::int64_t queries = inputs.q.size(2), keys = inputs.k.size(2);
    const Tensor bools = mask.to_bool(queries, keys);
    options = on_engine(options);
    options.mask = bools.view();
    const Call expected = inputs.call(options);
    options.mask = mask;
    const Call call = inputs.call(options);
    const Results results = call.run(true);
    expect_forward(expected, results);
    const Tensor grad = random_tensor(expected.out_sizes(), inputs.q.dtype());
    GradientTensors gradients = call.gradients(grad, results);
    expect_backward(expected, grad, gradients);
  }

  static Tensor random_tensor(const Dims& sizes, DType dtype) {
    Tensor tensor(sizes, DType::f64);
    for (std::int64_t e = 0; e < tensor.elements(); ++e) {
      tensor.as<double>()[e] = static_cast<double>(e * 37 % 101) / 50 - 1;
    }
    return convert(tensor, dtype);
  }
};

TEST_P(Masks, of_every_kind_and_type_are_their_bools) {
  for (const DType type : float_types) {
    const Inputs inputs = random_inputs({.queries = 9, .keys = 13}, type);
    for (const Named& one : kinds(9, 13)) {
      SCOPED_TRACE(one.name);
      expect_as_bools(inputs, {}, one.mask);
    }
  }
}

TEST_P(Masks, come_with_every_other_option_on_top) {
  const Shape shape{.queries = 9, .keys = 13};
  const Inputs inputs = random_inputs(shape);
  const std::vector<Named> masks = kinds(9, 13);
  std::size_t next = 0;
  for (const OptionSet& set : all_kinds(shape)) {
    if (set.options.mask) {
      continue;  // a call has one mask
    }
    for (int n = 0; n < 4; ++n) {
      const Named& one = masks[next++ % masks.size()];
      SCOPED_TRACE(set.name + " with " + one.name);
      expect_as_bools(inputs, set.options, one.mask);
    }
  }
}

TEST_P(Masks, of_several_tiles_are_their_bools) {
  const Inputs inputs = random_inputs({.batch = 2, .heads = 4, .kv_heads = 1, .queries = 150, .keys = 330});
  for (const Named& one : kinds(150, 330)) {
    SCOPED_TRACE(one.name);
    expect_as_bools(inputs, {.causal = Causal::bottom_right}, one.mask);
  }
}

TEST_P(Masks, hide_what_forbidden_keys_hold) {
  const std::int64_t length = 40;
  Inputs inputs = random_inputs({.batch = 1, .heads = 2, .kv_heads = 1, .queries = length, .keys = length});
  std::vector<std::int64_t> ids(length);
  for (std::int64_t i = 0; i < length; ++i) {
    ids[static_cast<std::size_t>(i)] = i % 8 == 3 ? -1 : i / 16;
  }
  const auto poison = [&](Tensor& tensor) {
    for (std::int64_t j = 3; j < length; j += 8) {
      for (std::int64_t d = 0; d < tensor.size(3); ++d) {
        tensor.at<float>({0, 0, j, d}) = std::numeric_limits<float>::quiet_NaN();
      }
    }
  };
  const Call call = inputs.call(on_engine({.mask = masks::documents(ids) & masks::causal()}));
  const Tensor grad = random_tensor(call.out_sizes(), DType::f32);
  const Results clean = call.run();
  const GradientTensors clean_gradients = call.gradients(grad, clean);
  poison(inputs.k);
  poison(inputs.v);
  const Results results = call.run();
  EXPECT_TRUE(same_bits(clean, results));
  EXPECT_TRUE(same_bits(clean_gradients, call.gradients(grad, results)));
}

TEST_P(Masks, of_a_call_without_heads_or_batch) {
  const Inputs inputs = random_inputs({.batch = 2, .heads = 1, .kv_heads = 1, .queries = 9, .keys = 13});
  const Mask mask = masks::prefix({3, 0}) & masks::window(5, {});
  const Tensor whole = attention(inputs.q, inputs.k, inputs.v, on_engine({.mask = mask}));
  const auto without_heads = [](const Tensor& tensor) { return tensor.view().select(1, 0); };
  const Tensor items =
      attention(without_heads(inputs.q), without_heads(inputs.k), without_heads(inputs.v), on_engine({.mask = mask}));
  const auto item = [](const Tensor& tensor) { return tensor.view().select(0, 0).select(0, 0); };
  const Tensor one = attention(item(inputs.q), item(inputs.k), item(inputs.v),
                               on_engine({.mask = masks::prefix(3) & masks::window(5, {})}));
  EXPECT_EQ(read(whole).values, read(items).values);
  EXPECT_TRUE(std::equal(one.as<float>(), one.as<float>() + one.elements(), whole.as<float>()));
}

// Positions count inside each sequence of its own length: the pack gives what its sequences give alone.
TEST_P(Masks, of_packed_sequences_are_those_of_each) {
  const Inputs inputs = random_inputs({.batch = 1, .heads = 2, .kv_heads = 1, .queries = 17, .keys = 21});
  const auto packed = [](const Tensor& tensor) { return tensor.view().select(0, 0).transpose(0, 1); };
  const std::vector<std::int64_t> starts_q = {0, 5, 5, 12, 17}, starts_k = {0, 9, 10, 17, 21};
  const ConstTensorView bounds_q(starts_q, {5}), bounds_k(starts_k, {5});
  const Tensor dense = (masks::window(1, 3) | masks::first(2)).to_bool(7, 9);
  const Mask rows = masks::prefix({2, 1, 0, 3}) & masks::window(4, {});
  for (const bool with_dense : {false, true}) {
    const Mask mask = with_dense ? masks::dense(dense) & rows : rows;
    const Tensor out = attention_varlen(packed(inputs.q), packed(inputs.k), packed(inputs.v), bounds_q, bounds_k,
                                        on_engine({.mask = mask}));
    for (std::size_t b = 0; b + 1 < starts_q.size(); ++b) {
      const auto part = [&](const Tensor& tensor, const std::vector<std::int64_t>& starts) {
        return tensor.view().slice(2, starts[b], starts[b + 1]);
      };
      const std::int64_t queries = starts_q[b + 1] - starts_q[b], keys = starts_k[b + 1] - starts_k[b];
      const std::int64_t n = std::vector<std::int64_t>{2, 1, 0, 3}[b];
      const Mask own = masks::prefix(n) & masks::window(4, {});
      const ConstTensorView cut = dense.view().slice(2, 0, queries).slice(3, 0, keys);
      const Tensor alone = attention(part(inputs.q, starts_q), part(inputs.k, starts_k), part(inputs.v, starts_k),
                                     on_engine({.mask = with_dense ? masks::dense(cut) & own : own}));
      for (std::int64_t h = 0; h < 2; ++h) {
        for (std::int64_t i = 0; i < queries; ++i) {
          for (std::int64_t d = 0; d < out.size(2); ++d) {
            ASSERT_EQ(out.at<float>({starts_q[b] + i, h, d}), alone.at<float>({0, h, i, d})) << b << ' ' << i;
          }
        }
      }
    }
  }
}

TEST_P(Masks, are_seen_by_the_analysis_and_the_plan) {
  const Inputs inputs = random_inputs({.batch = 1, .heads = 1, .kv_heads = 1, .queries = 30, .keys = 30});
  const Mask mask = masks::documents_of({10, 20}) & masks::causal();
  const AttentionOptions options = on_engine({.mask = mask});
  EXPECT_EQ(explain(inputs.q, inputs.k, inputs.v, options).pairs, static_cast<double>(mask.pairs(30, 30)));
  const Analysis found = analyze(inputs.q, inputs.k, options);
  EXPECT_EQ(read(found.first).values[12], 0) << "key 0 is of the other document";
  EXPECT_GT(read(found.first).values[5], 0);
}

TEST_P(Masks, that_do_not_fit_are_refused) {
  const Inputs inputs = random_inputs({});
  const auto refused = [&](const Mask& mask) {
    try {
      attention(inputs.q, inputs.k, inputs.v, on_engine({.mask = mask}));
    } catch (const InvalidArgument& error) {
      return std::string(error.what());
    }
    return std::string("nothing was thrown");
  };
  EXPECT_EQ(refused(masks::prefix({1, 2, 3})), "attention: mask has 3 batch items, expected 2 or 1");
  EXPECT_EQ(refused(masks::dense(Tensor({3, 5, 7}, DType::b8))), "attention: mask has 3 heads, expected 4 or 1");
  EXPECT_EQ(refused(masks::documents({0, 1})),
            "attention: documents has 2 ids, expected one for each of the 5 queries");
  EXPECT_EQ(refused(masks::spans(Tensor::of<std::int32_t>({5, 1, 2}, {0, 8, 0, 0, 0, 0, 0, 0, 0, 0}))),
            "attention: spans has an end of 8, expected at most the 7 keys");
  const Tensor spans({5, 1, 2}, DType::i32);
  EXPECT_TRUE(throws<InvalidArgument>(
      "attention", {"found spans and a structured mask, expected one: masks.spans(array) & mask joins them"},
      [&] { attention(inputs.q, inputs.k, inputs.v, on_engine({.mask = masks::causal(), .spans = spans})); }));
}

TEST_P(Masks, of_packed_sequences_that_do_not_fit_are_refused) {
  const Tensor rows({7, 1, 4});
  const std::vector<std::int64_t> starts = {0, 3, 7};
  const ConstTensorView bounds(starts, {3});
  const auto varlen = [&](const Mask& mask) {
    return [&, mask] { attention_varlen(rows, rows, rows, bounds, bounds, on_engine({.mask = mask})); };
  };
  EXPECT_TRUE(throws<InvalidArgument>("attention_varlen",
                                      {"sequence 1: documents has 3 ids, expected one for each of the 4 queries"},
                                      varlen(masks::documents({0, 0, 1}))));
  EXPECT_TRUE(throws<InvalidArgument>("attention_varlen", {"mask has 3 batch items for sequences, expected 2 or 1"},
                                      varlen(masks::prefix({1, 2, 3}))));
  EXPECT_TRUE(throws<Unsupported>("attention_varlen", {"joins bools with other masks, expected one dense part"},
                                  varlen(masks::dense(Tensor({4, 4}, DType::b8)) | masks::causal())));
}

ON_EVERY_HOST_ENGINE(Masks);

}  // namespace
}  // namespace headway::test
