// Distributed attention against the oracle, over ranks that are threads: every option, scheme and kind of shard.
#include <gtest/gtest.h>

#include <atomic>

#include "split_on_threads.h"

namespace headway::test {
namespace {

using distributed::Scheme;
using distributed::Sharding;

// Each option meets every number of ranks and every scheme; shards and types take turns.
TEST(DistributedAttention, computes_what_one_process_does_with_every_option) {
  int turn = 0;
  for (const auto& [queries, keys] : {std::pair<std::int64_t, std::int64_t>{22, 22}, {13, 29}}) {
    const Shape shape{
        .batch = 2, .heads = 8, .kv_heads = 4, .queries = queries, .keys = keys, .head_dim = 8, .value_dim = 6};
    for (OptionSet& kind : all_kinds(shape)) {
      for (int ranks = 1; ranks <= 4; ++ranks) {
        for (const Scheme scheme : schemes) {
          if (!is_possible(scheme, {{}, {}, {}, kind.options}, shape.kv_heads, ranks)) continue;
          const DType dtype = turn % 3 == 0 ? float_types[static_cast<std::size_t>(turn / 3 % 4)] : DType::f32;
          const Inputs inputs = random_inputs(shape, dtype, static_cast<std::uint64_t>(turn));
          const auto all = shardings(queries, keys, ranks);
          SCOPED_TRACE(testing::Message()
                       << kind.name << ", " << ranks << " ranks, " << name(scheme) << ", shards "
                       << static_cast<std::size_t>(turn) % all.size() << ", " << dtype << ", " << keys << " keys");
          const Call call = inputs.call(kind.options);
          expect_contract_on_ranks(call, all[static_cast<std::size_t>(turn) % all.size()], scheme, ranks);
          if (testing::Test::HasFailure()) return;
          ++turn;
        }
      }
    }
  }
}

TEST(DistributedAttention, packed_sequences_are_cut_anywhere) {
  Random random(3);
  std::size_t turn = 0;
  const std::vector<std::int64_t> starts = {0, 5, 5, 17, 18, 40, 43}, starts_k = {0, 9, 11, 11, 30, 41, 50};
  for (const bool square : {true, false}) {
    const Packing packing{starts, square ? starts : starts_k};
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const Tensor q = normal({43, 4, 8}, dtype, random);
      const Tensor k = normal({packing.starts_k.back(), 4, 8}, dtype, random),
                   v = normal({packing.starts_k.back(), 4, 6}, dtype, random);
      const Tensor sinks = normal({4}, DType::f32, random), slopes = normal({4}, DType::f32, random, 0.2);
      const Tensor query_lens = Tensor::of<std::int64_t>({6}, {4, 0, 12, 0, 20, 3});
      std::vector<AttentionOptions> all = {
          {}, {.causal = Causal::top_left}, {.causal = Causal::bottom_right, .window = Window{6, {}}}};
      all.push_back({.causal = Causal::bottom_right, .query_lens = query_lens, .alibi_slopes = slopes, .sinks = sinks});
      for (const AttentionOptions& options : all) {
        const Call call{q, k, v, options, packing};
        for (int ranks = 1; ranks <= 4; ++ranks)
          for (const Scheme scheme : schemes) {
            if (scheme == Scheme::hybrid && ranks != 4) continue;
            const auto shards = shardings(43, packing.starts_k.back(), ranks);
            SCOPED_TRACE(testing::Message() << ranks << " ranks, " << name(scheme) << ", " << dtype);
            expect_contract_on_ranks(call, shards[turn++ % shards.size()], scheme, ranks);
            if (testing::Test::HasFailure()) return;
          }
      }
    }
  }
}

// Masks that become spans, and one that stays bools, over shards that cut them anywhere.
TEST(DistributedAttention, structured_masks_are_cut_to_the_shards) {
  const Inputs inputs = random_inputs({.batch = 2, .heads = 4, .kv_heads = 4, .queries = 37, .keys = 37});
  Random random(11);
  std::vector<std::int64_t> ids(74);
  for (std::int64_t n = 0; n < 74; ++n) ids[static_cast<std::size_t>(n)] = n % 37 / 6 + n / 37 % 2 - n % 3 / 2;
  Tensor keep({4, 5, 5}, DType::b8), bools({37, 37}, DType::b8);
  fill_bool(keep, random, 0.5);
  fill_bool(bools, random, 0.5);
  const Mask all[] = {masks::causal(), masks::window(5, 2) | masks::first(4),
                      masks::documents(Tensor::of<std::int64_t>({2, 37}, ids)) & masks::causal(),
                      masks::blocks(keep, 8), masks::dense(bools) & masks::prefix(9)};
  std::size_t turn = 0;
  for (const Mask& mask : all) {
    for (int ranks = 1; ranks <= 4; ++ranks) {
      for (const Scheme scheme : schemes) {
        if (scheme == Scheme::hybrid && ranks != 4) continue;
        const auto shards = shardings(37, 37, ranks);
        SCOPED_TRACE(testing::Message() << to_string(mask) << ", " << ranks << " ranks, " << name(scheme));
        const Tensor as_bools = mask.to_bool(37, 37);
        AttentionOptions options{.mask = as_bools, .dropout = 0.25, .seed = 5};
        const Call expected = inputs.call(options);
        options.mask = mask;
        const Tensor grad_out = normal(expected.out_sizes(), expected.q.dtype(), random);
        const ConstTensorView view = grad_out;
        const Call call = inputs.call(options);
        expect_split(expected, run_split({call, shards[turn++ % shards.size()], scheme}, ranks, &view), grad_out);
        if (testing::Test::HasFailure()) return;
      }
    }
  }
}

// Ranks need no more keys than spans leave, and pairs are counted by them.
TEST(DistributedAttention, spans_leave_out_bytes) {
  const Inputs inputs = random_inputs({.batch = 1, .heads = 2, .kv_heads = 2, .queries = 64, .keys = 64});
  const Mask documents = masks::documents_of({20, 12, 32});
  const Call call = inputs.call({.mask = documents});
  const Sharding halves = distributed::contiguous(64, 64, 2);
  const distributed::Sizes sizes{.heads = 2, .kv_heads = 2, .queries = 64, .keys = 64, .head_dim = 8, .value_dim = 8};
  const distributed::Seen seen = distributed::seen(sizes, call.options);
  EXPECT_EQ(seen.pairs(), 20 * 20 + 12 * 12 + 32 * 32);
  EXPECT_EQ(seen.strips().size(), 3U);
  const auto schedule = distributed::schedule(Scheme::ring, sizes, seen, halves);
  EXPECT_EQ(distributed::least_bytes(schedule), 0);  // the border of the shards is one of documents
  EXPECT_TRUE(schedule.transfers.empty());
  const distributed::Seen causal = distributed::seen(sizes, {.mask = documents & masks::causal()});
  EXPECT_EQ(causal.pairs(), 20 * 21 / 2 + 12 * 13 / 2 + 32 * 33 / 2);
  EXPECT_EQ(causal.strips().size(), 3U);
}

TEST(DistributedAttention, empty_sizes_are_legal) {
  for (const Shape& shape : {Shape{.queries = 0, .keys = 6}, Shape{.queries = 6, .keys = 0}, Shape{.batch = 0},
                             Shape{.queries = 3, .keys = 1, .head_dim = 0}}) {
    const Inputs inputs = random_inputs(shape);
    for (const Scheme scheme : schemes) {
      SCOPED_TRACE(name(scheme));
      const int ranks = ranks_for(scheme, 2);
      expect_contract_on_ranks(inputs.call(), distributed::contiguous(shape.queries, shape.keys, ranks), scheme, ranks);
    }
  }
}

TEST(DistributedAttention, bits_repeat_for_a_number_of_ranks) {
  const Shape shape{
      .batch = 1, .heads = 4, .kv_heads = 4, .queries = 300, .keys = 300, .head_dim = 16, .value_dim = 16};
  const Inputs inputs = random_inputs(shape);
  const Call call = inputs.call({.causal = Causal::square});
  Random random(5);
  const Tensor grad_out = normal(call.out_sizes(), DType::f32, random);
  const ConstTensorView view = grad_out;
  for (const Scheme scheme : schemes) {
    const int ranks = ranks_for(scheme, 3);
    const SplitCall split{call, distributed::zigzag(300, 300, ranks), scheme};
    const SplitResults first = run_split(split, ranks, &view);
    for (int repeat = 0; repeat < 20; ++repeat) {
      const SplitResults again = run_split(split, ranks, &view);
      ASSERT_TRUE(same_bits(first.forward, again.forward)) << name(scheme);
      ASSERT_TRUE(same_bits(*first.gradients, *again.gradients)) << name(scheme);
    }
  }
}

TEST(DistributedAttention, whole_heads_have_the_bits_of_one_process) {
  const Shape shape{
      .batch = 2, .heads = 4, .kv_heads = 2, .queries = 130, .keys = 130, .head_dim = 32, .value_dim = 32};
  const Inputs inputs = random_inputs(shape, DType::bf16);
  const Call call = inputs.call({.causal = Causal::square});
  const SplitResults split = run_split({call, distributed::contiguous(130, 130, 2), Scheme::heads}, 2, nullptr);
  EXPECT_TRUE(same_bits(split.forward, call.run()));
}

TEST(DistributedAttention, sends_the_bytes_of_its_schedule) {
  const Shape shape{
      .batch = 1, .heads = 4, .kv_heads = 4, .queries = 256, .keys = 256, .head_dim = 16, .value_dim = 16};
  const Inputs inputs = random_inputs(shape, DType::bf16);
  const AttentionOptions options{.causal = Causal::square, .window = Window{40, {}}};
  const Call call = inputs.call(options);
  const Sharding sharding = distributed::contiguous(256, 256, 4);
  const distributed::Sizes sizes{
      .heads = 4, .kv_heads = 4, .queries = 256, .keys = 256, .head_dim = 16, .value_dim = 16, .dtype = DType::bf16};
  for (const Scheme scheme : schemes) {
    const distributed::Schedule plan =
        distributed::schedule(scheme, sizes, distributed::seen(sizes, options), sharding);
    double expected = 0;
    for (const distributed::Transfer& transfer : plan.transfers) expected += transfer.bytes;
    double bytes = 0;
    run_split({call, sharding, scheme}, 4, nullptr, &bytes);
    EXPECT_EQ(bytes, expected) << name(scheme);
  }
}

TEST(DistributedAttention, nan_stays_in_the_rows_that_see_it) {
  const Shape shape{.batch = 1, .heads = 2, .kv_heads = 2, .queries = 32, .keys = 32, .head_dim = 8, .value_dim = 8};
  Inputs inputs = random_inputs(shape);
  for (std::int64_t c = 0; c < 8; ++c) {
    inputs.k.at<float>({0, 0, 20, c}) = std::numeric_limits<float>::quiet_NaN();
    inputs.v.at<float>({0, 1, 5, c}) = std::numeric_limits<float>::infinity();
  }
  const Call call = inputs.call({.causal = Causal::square, .window = Window{9, {}}});
  for (const Scheme scheme : schemes) {
    const int ranks = ranks_for(scheme, 2);
    const SplitResults split = run_split({call, distributed::zigzag(32, 32, ranks), scheme}, ranks, nullptr);
    for (std::int64_t i = 0; i < 32; ++i) {
      EXPECT_EQ(std::isnan(split.forward.out.at<float>({0, 0, i, 0})), i >= 20 && i < 30) << name(scheme) << i;
      EXPECT_EQ(std::isfinite(split.forward.out.at<float>({0, 1, i, 0})), i < 5 || i > 14) << name(scheme) << i;
    }
  }
}

// A row without keys has the sink as its lse, rounded to float; what its gradient holds does not count.
TEST(DistributedAttention, sinks_count_once_and_not_for_rows_without_keys) {
  const Inputs inputs = random_inputs({.batch = 2, .heads = 2, .kv_heads = 2, .queries = 12, .keys = 12});
  const Tensor lengths = Tensor::of<std::int64_t>({2}, {12, 0});
  for (const double second : {-0.3, std::numeric_limits<double>::infinity()}) {
    const Tensor sinks = Tensor::of<double>({2}, {0.1, second});
    const Call call = inputs.call({.valid_lens = lengths, .sinks = sinks});
    Random random(9);
    Tensor grad_out = normal(call.out_sizes(), DType::f32, random);
    grad_out.at<float>({1, 0, 3, 2}) = std::numeric_limits<float>::infinity();
    const ConstTensorView view = grad_out;
    for (const Scheme scheme : schemes) {
      SCOPED_TRACE(testing::Message() << name(scheme) << ", sink " << second);
      const int ranks = ranks_for(scheme, 2);
      expect_split(call, run_split({call, distributed::zigzag(12, 12, ranks), scheme}, ranks, &view), grad_out);
    }
  }
}

// The ring of other programs: keys may lie further from the queries than the part is long, and still in their window.
TEST(DistributedPart, windows_reach_past_the_lengths_of_the_part) {
  Random random(4);
  const auto number = [&](std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(random);
  };
  for (int turn = 0; turn < 200; ++turn) {
    const std::int64_t queries = number(1, 9), keys = number(1, 9), offset = number(-30, 30);
    const Window window{number(0, 3) == 0 ? std::nullopt : std::optional(number(0, 40)),
                        number(0, 3) == 0 ? std::nullopt : std::optional(number(0, 40))};
    const Causal causal = number(0, 1) == 0 ? Causal::none : Causal::top_left;
    Tensor allowed({queries, keys}, DType::b8);
    for (std::int64_t i = 0; i < queries; ++i) {
      for (std::int64_t j = 0; j < keys; ++j) {
        const std::int64_t at = i + offset;
        allowed.at<bool>({i, j}) = (!window.left || j >= at - *window.left) &&
                                   (!window.right || j <= at + *window.right) && (causal == Causal::none || j <= at);
      }
    }
    SCOPED_TRACE(testing::Message() << queries << " x " << keys << ", offset " << offset);
    const Inputs inputs = random_inputs({.batch = 1, .heads = 2, .kv_heads = 1, .queries = queries, .keys = keys});
    Tensor out({1, 2, queries, inputs.v.size(3)}), lse({1, 2, queries});
    distributed::attention_part(inputs.q, inputs.k, inputs.v, out, offset, {.causal = causal, .window = window},
                                {.lse = lse});
    expect_forward(inputs.call({.mask = ConstTensorView(allowed)}), out.view(), {.lse = lse.view()});
  }
}

// A float near 10^5 has 7 bits of fraction, so a part cannot tell from lse whether it has all keys of a row.
TEST(DistributedAttention, gradients_of_large_scores_are_those_of_whole_rows) {
  for (const double size : {1e3, 1e4, 1e5}) {
    Inputs inputs = random_inputs({.batch = 1, .heads = 4, .kv_heads = 4, .queries = 24, .keys = 24});
    for (std::int64_t n = 0; n < inputs.q.elements(); ++n) inputs.q.as<float>()[n] *= static_cast<float>(size);
    for (std::int64_t n = 0; n < inputs.k.elements(); ++n) inputs.k.as<float>()[n] = n % 3 == 0 ? 1 : -1;  // ties
    const Call call = inputs.call();
    for (const Scheme scheme : schemes) {
      SCOPED_TRACE(testing::Message() << name(scheme) << ", queries times " << size);
      const int ranks = ranks_for(scheme, 3);
      expect_contract_on_ranks(call, distributed::zigzag(24, 24, ranks), scheme, ranks);
    }
  }
}

// ---- What goes wrong ----

struct Attempt {
  std::vector<Dims> query_sizes = {{1, 2, 4, 8}, {1, 2, 4, 8}};
  std::vector<DType> types = {DType::f32, DType::f32};
  std::vector<distributed::Options> options = {{}, {}};
};

std::vector<std::string> texts_of(const Attempt& attempt) {
  std::vector<std::string> texts;
  ThreadRanks world(2, std::chrono::seconds(5));
  for (const std::exception_ptr& error : world.run([&](distributed::Transport& transport) {
         const auto rank = static_cast<std::size_t>(transport.rank());
         const Tensor q(attempt.query_sizes[rank], attempt.types[rank]);
         Tensor out(q.sizes(), q.dtype());
         distributed::attention(q, q, q, out, transport, attempt.options[rank]);
       })) {
    try {
      if (error) std::rethrow_exception(error);
      texts.emplace_back("none");
    } catch (const std::exception& found) {
      texts.emplace_back(found.what());
    }
  }
  return texts;
}

void expect_on_both(const Attempt& attempt, const std::string& text) {
  const auto texts = texts_of(attempt);
  EXPECT_EQ(texts[0], text);
  EXPECT_EQ(texts[1], text);
}

TEST(DistributedErrors, what_differs_is_named_on_every_rank) {
  Attempt attempt;
  attempt.query_sizes[1] = {1, 2, 4, 16};
  expect_on_both(attempt,
                 "distributed::attention: head_dim is 8 on rank 0 and 16 on rank 1, expected the same on all ranks");
  attempt = {};
  attempt.types[1] = DType::f64;
  expect_on_both(attempt,
                 "distributed::attention: the type is f32 on rank 0 and f64 on rank 1, expected the same on all ranks");
  attempt = {};
  attempt.options[0].attention.causal = Causal::square;
  expect_on_both(
      attempt, "distributed::attention: causal is square on rank 0 and none on rank 1, expected the same on all ranks");
  attempt = {};
  attempt.options[1].attention.window = Window{3, {}};
  expect_on_both(
      attempt,
      "distributed::attention: window is none on rank 0 and (3, unlimited) on rank 1, expected the same on all ranks");
  attempt = {};
  attempt.options[1].scheme = Scheme::heads;
  expect_on_both(
      attempt,
      "distributed::attention: scheme is automatic on rank 0 and heads on rank 1, expected the same on all ranks");
}

TEST(DistributedErrors, masks_that_differ_are_named_on_every_rank) {
  Attempt attempt;
  attempt.options[0].attention.mask = masks::documents({0, 0, 1, 1, 1, 1, 2, 2});
  attempt.options[1].attention.mask = masks::documents({0, 0, 0, 1, 1, 1, 2, 2});
  const auto texts = texts_of(attempt);
  EXPECT_EQ(texts[0], texts[1]);
  EXPECT_EQ(texts[0].rfind("distributed::attention: what the mask allows is (1, 1, 8, ", 0), 0U) << texts[0];
  attempt.options[1].attention.mask = masks::causal();
  expect_on_both(attempt,
                 "distributed::attention: mask is documents(8 ids) on rank 0 and causal() on rank 1, expected the same "
                 "on all ranks");
  attempt.options[0].attention.mask = attempt.options[1].attention.mask = masks::documents({0, 1});
  expect_on_both(attempt,
                 "distributed::attention: rank 0: documents has 2 ids, expected one for each of the 8 queries");
  attempt = {};
  attempt.options[0].attention.dropout = attempt.options[1].attention.dropout = 0.5;
  attempt.options[0].attention.seed = 1;
  attempt.options[1].attention.seed = 2;
  expect_on_both(attempt,
                 "distributed::attention: seed is 1 on rank 0 and 2 on rank 1, expected the same on all ranks");
}

TEST(DistributedErrors, an_error_of_one_rank_is_an_error_of_all) {
  Attempt attempt;
  attempt.query_sizes[1] = {2, 4, 8, 8, 8};
  expect_on_both(attempt,
                 "distributed::attention: rank 1: query must have 4 axes [batch, heads, length, head_dim], or 3 or 2 "
                 "without heads and batch, found shape (2, 4, 8, 8, 8)");
  attempt = {};
  attempt.options[1].attention.dropout = 1.5;
  expect_on_both(attempt, "distributed::attention: rank 1: dropout is 1.5, expected 0 to 1");
  attempt = {};
  const Tensor mask({4, 4}, DType::b8);
  attempt.options[0].attention.mask = attempt.options[1].attention.mask = mask;
  expect_on_both(attempt,
                 "distributed::attention: rank 0: mask has shape (4, 4), which does not broadcast to (1, 2, 4, 8)");
}

TEST(DistributedErrors, shards_must_be_those_that_the_ranks_bring) {
  Attempt attempt;
  attempt.options[0].sharding = attempt.options[1].sharding = distributed::contiguous(9, 8, 2);
  expect_on_both(attempt, "distributed::attention: rank 0 brings 4 queries and 4 keys, its shard has 5 and 4");
  attempt.options[0].sharding = attempt.options[1].sharding = distributed::contiguous(9, 9, 3);
  expect_on_both(attempt, "distributed::attention: the sharding is of 3 ranks, expected 2");
}

// One rank goes on to its next layer while another one goes back: their messages must not be taken for each other's.
TEST(DistributedErrors, a_rank_that_goes_back_while_another_goes_on_is_named) {
  ThreadRanks world(2, std::chrono::seconds(5));
  const Tensor x({1, 2, 4, 8}), lse({1, 2, 4});
  const auto errors = world.run([&](distributed::Transport& transport) {
    Tensor out(x.sizes()), dq(x.sizes());
    if (transport.rank() == 0)
      distributed::attention_backward(x, x, x, x, x, lse, {.dq = dq.view()}, transport);
    else
      distributed::attention(x, x, x, out, transport);
  });
  for (const std::size_t rank : {0, 1}) {
    EXPECT_TRUE(throws<InvalidArgument>(rank == 0 ? "distributed::attention_backward" : "distributed::attention",
                                        {"the call is distributed::attention_backward on rank 0 and "
                                         "distributed::attention on rank 1, expected the same on all ranks"},
                                        [&] { std::rethrow_exception(errors[rank]); }));
  }
}

TEST(DistributedErrors, a_rank_that_does_not_come_is_lost) {
  ThreadRanks world(2, std::chrono::milliseconds(100));
  const auto errors = world.run([&](distributed::Transport& transport) {
    if (transport.rank() == 1) return;
    const Tensor q({1, 2, 4, 8});
    Tensor out(q.sizes());
    distributed::attention(q, q, q, out, transport);
  });
  EXPECT_THROW(std::rethrow_exception(errors[0]), distributed::LostRank);
}

}  // namespace
}  // namespace headway::test
