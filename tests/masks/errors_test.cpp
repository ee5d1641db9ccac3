// The errors of masks, word for word.
#include <gtest/gtest.h>

#include <functional>

#include "headway/headway.h"

namespace headway {
namespace {

template <class Expected>
std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Expected& error) {
    return error.what();
  } catch (const Error& error) {
    return std::string("another class: ") + error.what();
  }
  return "none";
}

std::string invalid(const std::function<void()>& call) { return error_of<InvalidArgument>(call); }

TEST(mask_errors, windows_and_counts_below_0) {
  EXPECT_EQ(invalid([] { masks::window(-1, 0); }),
            "masks.window: left is -1, expected 0 or more, or None for unlimited");
  EXPECT_EQ(invalid([] { masks::window(0, -2); }),
            "masks.window: right is -2, expected 0 or more, or None for unlimited");
  EXPECT_EQ(invalid([] { masks::first(-3); }), "masks.first: n is -3, expected 0 or more");
  EXPECT_EQ(invalid([] { masks::prefix({2, -3}); }), "masks.prefix: n[1] is -3, expected 0 or more");
}

TEST(mask_errors, ids_of_the_wrong_length) {
  const Mask mask = masks::documents({0, 0, 1});
  EXPECT_EQ(invalid([&] { mask.pairs(4, 4); }),
            "Mask.pairs: documents has 3 ids, expected one for each of the 4 queries");
  EXPECT_EQ(
      invalid([&] { mask.to_bool(3, 4); }),
      "Mask.to_bool: documents has 3 ids, expected one for each of the 4 keys: give key_ids where they are not the "
      "queries' own tokens");
  EXPECT_EQ(invalid([] {
              masks::documents({0, 1}, masks::Integers{0, 1, 1}).spans(2, 4);
            }),
            "Mask.spans: documents has 3 key_ids, expected one for each of the 4 keys");
  EXPECT_EQ(invalid([] { masks::documents(3); }),
            "masks.documents: ids has shape (), expected (tokens,) or (batch, tokens)");
  EXPECT_EQ(invalid([] {
              masks::documents(Tensor({2, 3}, DType::i64), masks::Integers(Tensor({3, 3}, DType::i64)));
            }),
            "masks.documents: key_ids has batch 3, ids has 2");
  EXPECT_EQ(invalid([] {
              masks::documents_of({2, 3}).pairs(4, 4);
            }),
            "Mask.pairs: documents has lengths with a sum of 5, expected at most the 4 queries");
  EXPECT_EQ(invalid([] {
              masks::documents_of({2, 3}).pairs(5, 6);
            }),
            "Mask.pairs: documents of lengths are of queries and keys alike, found 5 queries and 6 keys: give ids and "
            "key_ids");
  EXPECT_EQ(invalid([] {
              masks::documents_of({2, -3});
            }),
            "masks.documents: lengths has -3, expected 0 or more, and a sum below 2^63");
}

TEST(mask_errors, a_parent_after_its_child) {
  EXPECT_EQ(invalid([] {
              masks::tree({-1, 2, 1});
            }),
            "masks.tree: parents[1] is 2, expected a token before it, or -1 for a root");
  EXPECT_EQ(invalid([] {
              masks::tree({-1, 1});
            }),
            "masks.tree: parents[1] is 1, expected a token before it, or -1 for a root");
  EXPECT_EQ(invalid([] { masks::tree({-2}); }),
            "masks.tree: parents[0] is -2, expected a token before it, or -1 for a root");
  EXPECT_EQ(
      invalid([] {
        masks::tree({-1, 0}).pairs(2, 1);
      }),
      "Mask.pairs: tree has 2 tokens, expected as many as queries and at most as many as keys, found 2 queries and "
      "1 keys");
}

TEST(mask_errors, spans_outside_of_the_keys_or_backwards) {
  const auto spans = [](std::int64_t begin, std::int64_t end) {
    return masks::spans(Tensor::of<std::int64_t>({1, 1, 2}, {begin, end}));
  };
  EXPECT_EQ(invalid([&] { spans(3, 2); }), "masks.spans: span 0 of entry 0 is (3, 2), expected 0 <= begin <= end");
  EXPECT_EQ(invalid([&] { spans(-1, 2); }), "masks.spans: span 0 of entry 0 is (-1, 2), expected 0 <= begin <= end");
  EXPECT_EQ(invalid([&] { spans(0, 9).pairs(1, 8); }),
            "Mask.pairs: spans has an end of 9, expected at most the 8 keys");
  EXPECT_EQ(invalid([&] { spans(0, 8).pairs(2, 8); }),
            "Mask.pairs: spans has 1 entries of 1 row, expected 2 for 2 queries");
  EXPECT_EQ(invalid([] {
              masks::spans({0, 1});
            }),
            "masks.spans: found shape (2,), expected (entries, spans, 2), with heads and batch in front or without");
  EXPECT_EQ(invalid([] {
              masks::spans(Tensor({1, 1, 2}, DType::i32), 0);
            }),
            "masks.spans: rows is 0, expected 1 or more");
}

TEST(mask_errors, blocks_and_bools_of_other_sizes) {
  const Tensor keep({2, 3}, DType::b8);
  EXPECT_EQ(invalid([&] { masks::blocks(keep, 4).pairs(8, 8); }),
            "Mask.pairs: blocks has 2 x 3 blocks, expected 2 x 2 of 4 for 8 queries and 8 keys");
  EXPECT_EQ(invalid([&] { masks::blocks(keep, 0); }), "masks.blocks: size is 0, expected 1 or more");
  EXPECT_EQ(invalid([&] { masks::dense(keep).pairs(2, 4); }), "Mask.pairs: dense has 2 x 3 bools, expected 2 x 4");
  EXPECT_EQ(invalid([&] { masks::dense(Tensor({4}, DType::b8)); }),
            "masks.dense: the array has shape (4,), expected 2 axes, or 3 or 4 with heads and batch");
  EXPECT_EQ(error_of<TypeMismatch>([] {
              masks::dense(Tensor({2, 2}, DType::i32));
            }),
            "masks.dense: the array has type i32, expected bool (true = attend)");
  EXPECT_EQ(error_of<TypeMismatch>([] { masks::tree(Tensor({2}, DType::f32)); }),
            "masks: found an array of type f32, expected integers");
}

TEST(mask_errors, axes_that_do_not_broadcast) {
  EXPECT_EQ(invalid([] {
              masks::prefix({1, 2}) & masks::prefix({1, 2, 3});
            }),
            "masks: the left mask has 2 batch items, the right one 3: expected as many, or 1");
  EXPECT_EQ(invalid([] {
              masks::dense(Tensor({2, 4, 4}, DType::b8)) | masks::dense(Tensor({3, 4, 4}, DType::b8));
            }),
            "masks: the left mask has 2 heads, the right one 3: expected as many, or 1");
}

TEST(mask_errors, bounds_of_packed_sequences) {
  const auto parts = [](std::initializer_list<std::int64_t> queries, std::initializer_list<std::int64_t> keys) {
    const std::vector<std::int64_t> q(queries), k(keys);
    masks::causal().parts(ConstTensorView(q, {q.size()}), ConstTensorView(k, {k.size()}));
  };
  EXPECT_EQ(invalid([&] { parts({1, 2}, {0, 2}); }), "Mask.parts: cu_seqlens_q[0] is 1, expected 0");
  EXPECT_EQ(invalid([&] { parts({0, 3}, {0, 3, 2}); }), "Mask.parts: cu_seqlens_k[2] is 2, expected 3 or more");
  EXPECT_EQ(invalid([&] { parts({0, 3}, {0, 3, 4}); }), "Mask.parts: cu_seqlens_k has 2 sequences, cu_seqlens_q has 1");
  EXPECT_EQ(invalid([] { masks::causal().parts(Tensor({2}), Tensor({2}, DType::i32)); }),
            "Mask.parts: cu_seqlens_q is f32 of shape (2,) on cpu, expected integers (sequences + 1,) in host memory");
}

TEST(mask_errors, dense_parts_have_no_spans_and_sizes_have_ends) {
  EXPECT_EQ(invalid([] {
              (masks::dense(Tensor({2, 2}, DType::b8)) & masks::causal()).spans(2, 2);
            }),
            "Mask.spans: dense(2 x 2) & causal() has a dense part, expected none: from_bool finds the spans of bools");
  EXPECT_EQ(invalid([] { masks::causal().pairs(-1, 4); }),
            "Mask.pairs: expected sizes from 0 to 2^60, found -1 queries and 4 keys");
  constexpr std::int64_t huge = std::int64_t{1} << 60;
  EXPECT_EQ(
      invalid([] { masks::causal().pairs(huge, huge); }),
      "masks: expected at most 2^32 rows over all batch items and heads, found 1152921504606846976 for each of 1");
  EXPECT_EQ(invalid([] { masks::causal().draw(1 << 25, 1); }),
            "Mask.draw: found 33554432 queries, expected at most 16777216");
  EXPECT_EQ(invalid([] {
              masks::blocks(Tensor({2, 2}, DType::b8), huge);
            }),
            "masks.blocks: size is 1152921504606846976, expected 2 of them to be at most 2^60");
  const Mask long_documents = masks::documents_of({huge - 1, 1});  // takes no memory for tokens
  EXPECT_EQ(invalid([&] { long_documents.pairs(4, 4); }),
            "Mask.pairs: documents has lengths with a sum of 1152921504606846976, expected at most the 4 queries");
  EXPECT_EQ(to_string(long_documents), "documents(2 lengths)");
  EXPECT_EQ(invalid([] { masks::first(std::int64_t{1} << 60).pairs(1 << 20, std::int64_t{1} << 60); }),
            "Mask.pairs: expected fewer than 2^63 pairs");
}

}  // namespace
}  // namespace headway
