// attention and attention_varlen that allocate their result, cu_seqlens, and explain for packs.
#include <gtest/gtest.h>

#include "support/inputs.h"
#include "support/run.h"

namespace headway::test {
namespace {

TEST(Allocating, attention_gives_the_bits_of_the_one_that_is_given_memory) {
  for (DType type : float_types) {
    Random random(5);
    const Tensor q = normal({2, 4, 5, 8}, type, random), k = normal({2, 2, 7, 8}, type, random);
    const Tensor v = normal({2, 2, 7, 6}, type, random);
    const AttentionOptions options{.causal = Causal::bottom_right};
    Tensor out({2, 4, 5, 6}, type);
    attention(q, k, v, out, options);
    EXPECT_TRUE(same_bits(attention(q, k, v, options), out));
    EXPECT_EQ(attention(q.view().select(0, 0).select(0, 0), k.view().select(0, 0).select(0, 0),
                        v.view().select(0, 0).select(0, 0))
                  .sizes(),
              (Dims{5, 6}));
  }
}

TEST(Allocating, attention_refuses_with_the_same_texts) {
  EXPECT_THROW(attention(Tensor({2, 3}), Tensor({2, 4}), Tensor({2, 3})), InvalidArgument);
  EXPECT_THROW(attention(Tensor(Dims{}), Tensor({2, 4}), Tensor({2, 3})), InvalidArgument);
  EXPECT_THROW(attention(Tensor({2, 3}), Tensor({2, 3}), Tensor(Dims{})), InvalidArgument);
}

TEST(Allocating, packed_sequences_are_described_by_their_lengths) {
  const Tensor ends = cu_seqlens({3, 0, 5});
  EXPECT_TRUE(same_bits(ends, Tensor::of<std::int64_t>({4}, {0, 3, 3, 8})));
  EXPECT_TRUE(same_bits(cu_seqlens(std::vector<int>{3, 0, 5}), ends));
  EXPECT_TRUE(same_bits(cu_seqlens(std::vector<unsigned char>{3, 0, 5}), ends));
  EXPECT_EQ(cu_seqlens(std::vector<std::int64_t>{}).elements(), 1);
  EXPECT_THROW(cu_seqlens({1, -1}), InvalidArgument);
  const std::int64_t largest = std::numeric_limits<std::int64_t>::max();
  EXPECT_THROW(cu_seqlens({largest, 1}), InvalidArgument);

  Random random(6);
  const Tensor x = normal({8, 2, 16}, DType::f32, random);
  Tensor out({8, 2, 16});
  attention_varlen(x, x, x, ends, ends, out);
  EXPECT_TRUE(same_bits(attention_varlen(x, x, x, ends, ends), out));
}

TEST(Allocating, explain_counts_the_pairs_of_each_sequence_of_a_pack) {
  const Tensor x({8, 2, 16}), ends = cu_seqlens({3, 0, 5});
  const Plan plan = explain_varlen(x, x, x, ends, ends);
  EXPECT_EQ(plan.operation, "attention_varlen");
  EXPECT_EQ(plan.pairs, 2 * (3 * 3 + 5 * 5));
  EXPECT_EQ(explain_varlen(x, x, x, ends, ends, {}, {.backward = true}).operation, "attention_varlen_backward");
  EXPECT_THROW(explain_varlen(x, x, x, ends, cu_seqlens({8})), InvalidArgument);
}

}  // namespace
}  // namespace headway::test
