// The simulator and the texts made from it, against times computed by hand.
#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <tuple>

#include "headway/distributed.h"

namespace headway::distributed {
namespace {

// No latency and no cost of a call: what remains can be done by hand.
constexpr Cluster plain = {
    .flops = 1e9, .bandwidth = 1e6, .latency = 0, .node_bandwidth = 1e6, .node_latency = 0, .call = 0};

TEST(DistributedSimulator, compute_hides_transfers_in_a_ring) {
  const Sizes sizes{.queries = 1024, .keys = 1024, .head_dim = 32, .value_dim = 32};
  const Sharding sharding = contiguous(1024, 1024, 2);
  // Two blocks of 512 x 512 pairs, 128 FLOPs each, take 2 * 33.6 ms; 512 rows of 256 bytes take 131 ms on the wire.
  const Estimate slow = simulate(schedule(Scheme::ring, sizes, seen(sizes), sharding), plain);
  const double block = 512.0 * 512 * 128 / 1e9, wire = 512.0 * 256 / 1e6;
  EXPECT_NEAR(slow.seconds, wire + block, 1e-9);
  EXPECT_NEAR(slow.waiting, wire - block, 1e-9);
  Cluster fast = plain;
  fast.bandwidth = fast.node_bandwidth = 1e9;
  const Estimate hidden = simulate(schedule(Scheme::ring, sizes, seen(sizes), sharding), fast);
  EXPECT_NEAR(hidden.seconds, 2 * block, 1e-9);
  EXPECT_NEAR(hidden.efficiency, 1.0, 1e-9);
  EXPECT_EQ(hidden.bytes, 2 * 512.0 * 256);
  // Gathering waits for all rows first.
  const Estimate gathered = simulate(schedule(Scheme::all_gather, sizes, seen(sizes), sharding), fast);
  EXPECT_NEAR(gathered.seconds, 2 * block + 512.0 * 256 / 1e9, 1e-9);
}

TEST(DistributedSimulator, ranks_that_handle_bytes_compute_less) {
  const Sizes sizes{.queries = 1024, .keys = 1024, .head_dim = 32, .value_dim = 32};
  const Schedule plan = schedule(Scheme::ring, sizes, seen(sizes), contiguous(1024, 1024, 2));
  Cluster cluster = plain;
  cluster.bandwidth = cluster.node_bandwidth = 1e9;
  const double alone = simulate(plan, cluster).seconds;
  cluster.handling = 1e-8;
  // Each rank sends 512 rows of 256 bytes and receives as many, while it computes its first block.
  EXPECT_NEAR(simulate(plan, cluster).seconds, alone + 2 * 512.0 * 256 * 1e-8, 1e-9);
}

TEST(DistributedSimulator, ranks_of_a_node_share_its_link) {
  const Sizes sizes{.queries = 1024, .keys = 1024};
  const Sharding sharding = contiguous(1024, 1024, 4);
  Cluster cluster = plain;
  cluster.flops = 1e15;
  cluster.ranks_per_node = 2;
  const Schedule plan = schedule(Scheme::all_gather, sizes, seen(sizes), sharding);
  // Four blocks of 256 rows leave each node, each to two ranks: 4 * 131072 bytes over its link.
  EXPECT_NEAR(simulate(plan, cluster).seconds, 4 * 256 * 512 / 1e6, 1e-3);
}

TEST(DistributedSimulator, a_decode_step_over_a_long_cache_passes_queries) {
  const Sizes sizes{.batch = 1,
                    .heads = 32,
                    .kv_heads = 8,
                    .queries = 1,
                    .keys = 1 << 20,
                    .head_dim = 128,
                    .value_dim = 128,
                    .dtype = DType::bf16};
  const Seen visible = seen(sizes, {.causal = Causal::bottom_right});
  EXPECT_EQ(choose(sizes, visible, contiguous(1, 1 << 20, 8)), Scheme::pass_query);
}

TEST(DistributedSimulator, reaches_1024_ranks_and_10_million_tokens) {
  const std::int64_t tokens = 10'000'000;
  const Sizes sizes{.heads = 32,
                    .kv_heads = 8,
                    .queries = tokens,
                    .keys = tokens,
                    .head_dim = 128,
                    .value_dim = 128,
                    .dtype = DType::bf16};
  const Seen visible = seen(sizes, {.causal = Causal::square});
  const Cluster cluster = {
      .ranks_per_node = 8, .flops = 4e14, .bandwidth = 4e11, .latency = 5e-6, .node_bandwidth = 4e11};
  const auto start = std::chrono::steady_clock::now();
  const Estimate ring = simulate(schedule(Scheme::ring, sizes, visible, zigzag(tokens, tokens, 1024)), cluster);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
  EXPECT_LT(ring.imbalance, 0.03);
  EXPECT_GT(ring.efficiency, 0.5);
  EXPECT_LE(ring.efficiency, 1.0);
  const Estimate uneven = simulate(schedule(Scheme::ring, sizes, visible, contiguous(tokens, tokens, 1024)), cluster);
  EXPECT_GT(uneven.seconds, 1.8 * ring.seconds);
}

// By hand: 131,072 bytes take 131 ms, a block of 512 x 512 pairs 33.6 ms, half a block 16.8 ms. all_gather does one
// after the other on rank 1; pass_query sends 65.5 kB, computes a block and sends 67.6 kB back.
TEST(DistributedExplain, says_scheme_links_and_time) {
  const Sizes sizes{.queries = 1024, .keys = 1024, .head_dim = 32, .value_dim = 32};
  const std::string text =
      explain(Scheme::ring, sizes, seen(sizes, {.causal = Causal::square}), contiguous(1024, 1024, 2), plain);
  EXPECT_EQ(
      text,
      "distributed attention: ring, 2 ranks, 2 steps\n"
      "  work        50.0 % of the pairs; imbalance 50.0 %\n"
      "  bytes       131 kB in all, at most 131 kB to one rank; K and V once to every rank that sees them: 131 kB\n"
      "  link        0 -> 1  131 kB\n"
      "  time        165 ms estimated, efficiency 20.4 %, the slowest wait 114 ms\n"
      "  not all_gather  181 ms, 131 kB\n"
      "  not heads       needs a kv head for each rank, found 1 for 2 ranks\n"
      "  not pass_query  167 ms, 133 kB\n"
      "  not hybrid      needs groups of 2 ranks or more, as many in each, and a kv head for each rank of a group, "
      "found "
      "2 ranks and 1 kv heads\n");
}

// Two nodes of two ranks. Inside a node heads are split: rank 0 sends rank 1 one head of its 256 rows of Q, K and V and
// gets their out and lse back. Across nodes each rank sends the other node's rank with its head 512 rows of K and V.
TEST(DistributedHybrid, splits_heads_inside_a_group_and_passes_keys_across_groups) {
  const Sizes sizes{.heads = 2, .kv_heads = 2, .queries = 1024, .keys = 1024, .head_dim = 32, .value_dim = 32};
  const Schedule plan = schedule(Scheme::hybrid, sizes, seen(sizes), contiguous(1024, 1024, 4));
  EXPECT_EQ(plan.group, 2);
  EXPECT_EQ(plan.steps, 4);
  std::map<std::tuple<int, int, int>, double> sent;  // by step, from and to
  for (const Transfer& t : plan.transfers) sent[{t.step, t.from, t.to}] += t.bytes;
  std::map<std::tuple<int, int, int>, double> expected;
  for (int rank = 0; rank < 4; ++rank) {
    const int neighbour = rank ^ 1, across = (rank + 2) % 4;
    expected[{1, rank, neighbour}] = 256.0 * (32 + 32 + 32) * 4;
    expected[{2, rank, across}] = 512.0 * (32 + 32) * 4;
    expected[{3, rank, neighbour}] = 256.0 * (32 + 1) * 4;
  }
  EXPECT_EQ(sent, expected);
  // Half of the heads of a group's queries, over the keys of both groups.
  for (int rank = 0; rank < 4; ++rank) {
    double pairs = 0;
    for (const Tile& tile : plan.tiles(rank)) pairs += tile.pairs;
    EXPECT_EQ(pairs, 512.0 * 1024);
  }
  EXPECT_NEAR(simulate(plan, plain).imbalance, 0, 1e-12);
}

// 128 ranks are 128 steps of small blocks for a ring, which no computation hides; there are not as many heads either.
TEST(DistributedHybrid, is_chosen_where_blocks_of_a_ring_are_too_small) {
  const Sizes sizes{.heads = 32,
                    .kv_heads = 8,
                    .queries = 1 << 17,
                    .keys = 1 << 17,
                    .head_dim = 128,
                    .value_dim = 128,
                    .dtype = DType::bf16};
  const Cluster cluster = {.ranks_per_node = 8,
                           .flops = 4e14,
                           .bandwidth = 4e11,
                           .latency = 5e-6,
                           .node_bandwidth = 4e11,
                           .node_latency = 1e-5,
                           .call = 1e-5};
  const Seen visible = seen(sizes, {.causal = Causal::square});
  const Sharding sharding = zigzag(sizes.queries, sizes.keys, 128);
  const Schedule chosen = plan(Scheme::automatic, sizes, visible, sharding, cluster);
  EXPECT_EQ(chosen.scheme, Scheme::hybrid);
  EXPECT_EQ(chosen.group, 8);
  EXPECT_EQ(choose(sizes, visible, sharding, cluster), Scheme::hybrid);
  const double ring = simulate(schedule(Scheme::ring, sizes, visible, sharding), cluster).seconds;
  EXPECT_LT(simulate(chosen, cluster).seconds, 0.7 * ring);
  const std::string text = explain(Scheme::automatic, sizes, visible, sharding, cluster);
  EXPECT_EQ(
      text.find("distributed attention: hybrid, heads in groups of 8 and a ring of 16 groups (chosen by estimated "
                "time), 128 ranks, 18 steps\n"),
      0U)
      << text;
  EXPECT_NE(explain(Scheme::ring, sizes, visible, sharding, cluster).find("heads in groups of 8\n"), std::string::npos);
}

TEST(DistributedHybrid, refuses_groups_that_cannot_be) {
  const Sizes sizes{.heads = 4, .kv_heads = 2, .queries = 8, .keys = 8};
  const auto text_of = [&](int ranks, int group) {
    try {
      schedule(Scheme::hybrid, sizes, seen(sizes), contiguous(8, 8, ranks), false, group);
    } catch (const InvalidArgument& error) {
      return std::string(error.what());
    }
    return std::string("nothing was thrown");
  };
  EXPECT_EQ(text_of(4, 4),
            "distributed: expected groups of a size that divides 4 ranks, with a kv head for each rank of a group and "
            "more than one group, found 4");
  EXPECT_EQ(
      text_of(3, 0),
      "distributed: scheme hybrid needs groups of 2 ranks or more, as many in each, and a kv head for each rank of "
      "a group, found 3 ranks and 2 kv heads");
}

}  // namespace
}  // namespace headway::distributed
