// Bad calls of attention_paged: an error that names what was expected and what was found, before anything is written.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "serving/paged.h"

namespace headway::test {
namespace {

class PagedErrors : public testing::Test {
 protected:
  template <class Exception = InvalidArgument>
  void expect(const std::vector<std::string>& parts, const PagedKeys& keys, const AttentionOptions& options = {},
              const AttentionOutputs& outputs = {}) {
    EXPECT_TRUE(
        (throws<Exception>("attention_paged", parts, [&] { attention_paged(query, keys, out, options, outputs); })));
    for (const Real value : read(out).values) EXPECT_EQ(value, 7);
  }

  PagedInputs inputs{{.lengths = {40, 17}, .page_size = 16}};
  Tensor query = filled({2, 4, 3, 24}, DType::f32, 1);
  Tensor out = filled({2, 4, 3, 20}, DType::f32, 7);
};

TEST_F(PagedErrors, lengths_and_pages_out_of_range_are_named) {
  set(inputs.lengths, {1}, -1);
  expect({"lengths[1] is -1, expected 0 to 64"}, inputs.keys());
  set(inputs.lengths, {1}, 65);
  expect({"lengths[1] is 65, expected 0 to 64 (4 pages of 16)"}, inputs.keys());
  set(inputs.lengths, {1}, 17);
  for (const double page : {-1.0, 11.0, static_cast<double>(std::numeric_limits<std::int32_t>::max())}) {
    set(inputs.table, {1, 1}, page);
    expect({"block_table[1, 1] is ", "expected 0 to 10"}, inputs.keys());
  }
}

TEST_F(PagedErrors, options_without_a_meaning_for_pages_are_refused) {
  const Tensor mask = filled({1, 1, 1, 1}, DType::b8, 1), bias({1, 1, 1, 1});
  expect({"keys in pages take no mask"}, inputs.keys(), {.mask = mask});
  expect({"keys in pages take no bias"}, inputs.keys(), {.bias = bias});
  expect({"keys in pages take no dropout"}, inputs.keys(), {.dropout = 0.5, .seed = 1});
  Tensor weights({2, 4, 3, 40});
  expect({"weights of sequences in pages have no one shape"}, inputs.keys(), {}, {.weights = weights});
}

TEST_F(PagedErrors, types_that_do_not_belong_together_are_named) {
  PagedKeys keys = inputs.keys();
  const Tensor halves({11, 16, 2, 24}, DType::bf16), floats({2, 4});
  keys.key_pages = halves;
  expect<TypeMismatch>({"value_pages has type f32, key_pages has bf16"}, keys);
  keys.value_pages = halves;
  expect<TypeMismatch>({"key_pages has type bf16, expected the query's f32, or i8 or f8e4m3 with scales"}, keys);
  keys = inputs.keys();
  keys.block_table = floats;
  expect<TypeMismatch>({"block_table has type f32, expected i32 or i64"}, keys);
  keys = inputs.keys();
  keys.lengths = floats;
  expect<TypeMismatch>({"lengths has type f32"}, keys);
}

TEST_F(PagedErrors, scales_come_with_8_bit_pages_and_with_no_others) {
  PagedKeys keys = inputs.keys();
  keys.key_scales = inputs.key_scales;
  expect({"scales belong to pages of i8 or f8e4m3, found pages of f32"}, keys);
  const PagedInputs bytes({.lengths = {40, 17}, .page_size = 16, .type = DType::i8});
  keys = bytes.keys();
  keys.key_scales.reset();
  expect({"pages of i8 need key_scales and value_scales, found one of them"}, keys);
  keys.value_scales.reset();
  expect({"found neither"}, keys);
  keys = bytes.keys();
  const Tensor narrow({11, 16, 1}), wide({11, 16, 2}, DType::f64);
  keys.key_scales = narrow;
  expect({"key_scales has shape (11, 16, 1), expected (11, 16, 2)"}, keys);
  keys.key_scales = wide;
  expect<TypeMismatch>({"key_scales has type f64, expected f32"}, keys);
  const Tensor doubles({2, 4, 3, 24}, DType::f64);
  EXPECT_TRUE((throws<TypeMismatch>("attention_paged", {"query has type f64, expected f32, bf16 or f16"},
                                    [&] { attention_paged(doubles, bytes.keys()); })));
}

TEST_F(PagedErrors, shapes_that_do_not_fit_are_named) {
  PagedKeys keys = inputs.keys();
  keys.key_pages = keys.key_pages.slice(3, 0, 20);
  expect({"key_pages has head_dim 20, query has 24"}, keys);
  keys = inputs.keys();
  keys.value_pages = keys.value_pages.slice(1, 0, 8);
  expect({"expected the same pages, page_size and heads"}, keys);
  keys = inputs.keys();
  keys.key_pages = keys.key_pages.slice(1, 0, 0);
  keys.value_pages = keys.value_pages.slice(1, 0, 0);
  expect({"pages must have 1 or more slots"}, keys);
  keys = inputs.keys();
  keys.key_pages = keys.key_pages.select(0, 0);
  expect({"key_pages must have 4 axes"}, keys);
  keys = inputs.keys();
  keys.block_table = keys.block_table.slice(0, 0, 1);
  expect({"block_table has shape (1, 4), expected (2, pages of a sequence)"}, keys);
  keys = inputs.keys();
  keys.lengths = keys.lengths.slice(0, 0, 1);
  expect({"lengths has shape (1,), expected (2,)"}, keys);
  const Tensor three({2, 3, 3, 24});
  EXPECT_TRUE((throws<InvalidArgument>("attention_paged", {"query has 3 heads, expected a multiple of the 2"},
                                       [&] { attention_paged(three, inputs.keys()); })));
  const Tensor flat({3, 24});
  EXPECT_TRUE((throws<InvalidArgument>("attention_paged", {"query must have 4 axes"},
                                       [&] { attention_paged(flat, inputs.keys()); })));
}

TEST_F(PagedErrors, packed_queries_need_their_bounds) {
  const Tensor packed({5, 4, 24});
  const Tensor bounds = cu_seqlens({2, 2});
  EXPECT_TRUE((throws<InvalidArgument>("attention_paged", {"cu_seqlens_q ends at 4, expected the 5 rows"},
                                       [&] { attention_paged(packed, bounds, inputs.keys()); })));
  const Tensor three = cu_seqlens({2, 2, 1});
  EXPECT_TRUE((throws<InvalidArgument>("attention_paged", {"lengths has shape (2,), expected (3,)"},
                                       [&] { attention_paged(packed, three, inputs.keys()); })));
}

TEST_F(PagedErrors, out_may_not_overlap_what_is_read) {
  Tensor pages({3, 4, 3, 24});  // as large as an output of 24 columns
  const Tensor table = Tensor::of<std::int32_t>({3, 1}, {0, 1, 2}), lengths = Tensor::of<std::int32_t>({3}, {4, 4, 4});
  const PagedKeys keys{pages, pages, table, lengths};
  const Tensor rows({3, 3, 4, 24});
  TensorView over = TensorView(pages).transpose(1, 2);
  EXPECT_TRUE((throws<InvalidArgument>("attention_paged", {"out overlaps key in memory"},
                                       [&] { attention_paged(rows, keys, over); })));
}

TEST_F(PagedErrors, explain_says_pages_and_has_no_backward) {
  const std::string plan = to_string(explain_paged(query, inputs.keys()));
  EXPECT_NE(plan.find("attention_paged on the "), std::string::npos) << plan;
  EXPECT_NE(plan.find("key_pages (11, 16, 2, 24), value_pages (11, 16, 2, 20) f32, up to 40 keys"), std::string::npos)
      << plan;
  EXPECT_NE(plan.find("causal bottom_right, pages of 16"), std::string::npos) << plan;
  EXPECT_TRUE((throws<InvalidArgument>("explain_paged", {"no backward"},
                                       [&] { explain_paged(query, inputs.keys(), {}, {.backward = true}); })));
}

}  // namespace
}  // namespace headway::test
