// The schedule against the definition: which pairs are allowed is counted one by one here, not by strips.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>

#include "headway/distributed.h"

namespace headway::distributed {
namespace {

struct Case {
  std::string name;
  Sizes sizes;
  AttentionOptions options;
  std::optional<Packing> packing;
  std::vector<std::shared_ptr<Tensor>> storage;

  ConstTensorView keep(std::vector<std::int64_t> values, Dims shape) {
    storage.push_back(std::make_shared<Tensor>(Tensor::of<std::int64_t>(shape, values)));
    return *storage.back();
  }
};

// The rule of docs/contract.md for one pair of one batch item.
bool allowed(const Case& c, std::int64_t b, std::int64_t i, std::int64_t j) {
  std::int64_t queries = c.sizes.queries, keys = c.sizes.keys;
  if (c.packing) {
    const auto* starts_q = c.packing->cu_seqlens_q.as<std::int64_t>();
    const auto* starts_k = c.packing->cu_seqlens_k.as<std::int64_t>();
    if (i < starts_q[b] || i >= starts_q[b + 1] || j < starts_k[b] || j >= starts_k[b + 1]) return false;
    queries = starts_q[b + 1] - starts_q[b];
    keys = starts_k[b + 1] - starts_k[b];
    i -= starts_q[b];
    j -= starts_k[b];
  }
  std::int64_t len_q = queries, len_k = keys;
  if (c.options.query_lens) {
    len_q = c.options.query_lens->as<std::int64_t>()[b];
    if (i >= len_q) return false;
  }
  if (c.options.valid_lens) {
    const bool per_row = c.options.valid_lens->rank() == 2;
    const auto* lens = c.options.valid_lens->as<std::int64_t>();
    if (j >= (per_row ? lens[b * c.options.valid_lens->size(1) + i] : lens[b])) return false;
    if (!per_row) len_k = lens[b];
  }
  const Causal causal = c.options.causal;
  const std::int64_t offset = causal == Causal::none           ? keys - queries
                              : causal == Causal::bottom_right ? len_k - len_q
                                                               : 0;
  if (causal != Causal::none && j > i + offset) return false;
  if (c.options.window) {
    if (c.options.window->left && j < i + offset - *c.options.window->left) return false;
    if (c.options.window->right && j > i + offset + *c.options.window->right) return false;
  }
  return true;
}

std::int64_t items(const Case& c) { return c.packing ? c.packing->cu_seqlens_q.size(0) - 1 : c.sizes.batch; }

bool seen_by_any(const Case& c, std::int64_t i, std::int64_t j) {
  for (std::int64_t b = 0; b < items(c); ++b)
    if (allowed(c, b, i, j)) return true;
  return false;
}

std::vector<Case> cases() {
  std::vector<Case> all;
  const auto add = [&](std::string name, std::int64_t queries, std::int64_t keys, AttentionOptions options = {}) {
    Case c{std::move(name), {.batch = 2, .heads = 4, .kv_heads = 4, .queries = queries, .keys = keys}, options, {}, {}};
    all.push_back(std::move(c));
    return &all.back();
  };
  add("everything", 13, 29);
  add("causal", 37, 37, {.causal = Causal::square});
  add("causal of fewer queries", 9, 41, {.causal = Causal::bottom_right});
  add("causal of more queries", 41, 9, {.causal = Causal::bottom_right});
  add("window", 37, 37, {.window = Window{3, 2}});
  add("causal window", 40, 40, {.causal = Causal::top_left, .window = Window{5, {}}});
  add("right window", 20, 31, {.window = Window{{}, 1}});
  add("no queries", 0, 7);
  add("no keys", 7, 0);
  Case* lens = add("lengths", 23, 31, {.causal = Causal::bottom_right});
  lens->options.valid_lens = lens->keep({17, 0}, {2});
  lens->options.query_lens = lens->keep({23, 4}, {2});
  Case* rows = add("lengths of rows", 6, 11);
  rows->options.valid_lens = rows->keep({3, 3, 11, 0, 5, 5, 1, 2, 3, 4, 5, 6}, {2, 6});
  Case* packed = add("packed", 40, 40, {.causal = Causal::square});
  packed->sizes.batch = 1;
  packed->packing = Packing{packed->keep({0, 7, 7, 26, 31, 40}, {6}), packed->keep({0, 7, 7, 26, 31, 40}, {6})};
  Case* cross = add("packed, other keys", 20, 33, {.causal = Causal::bottom_right, .window = Window{4, {}}});
  cross->sizes.batch = 1;
  cross->packing = Packing{cross->keep({0, 11, 12, 20}, {4}), cross->keep({0, 2, 30, 33}, {4})};
  return all;
}

std::vector<Sharding> shardings(const Sizes& sizes, int ranks, std::mt19937& random) {
  std::vector<Sharding> all = {contiguous(sizes.queries, sizes.keys, ranks), zigzag(sizes.queries, sizes.keys, ranks)};
  const auto uneven = [&](std::int64_t length) {  // ranks with 0 rows among them
    std::vector<std::int64_t> cuts = {0, length};
    for (int r = 1; r < ranks; ++r) cuts.push_back(std::uniform_int_distribution<std::int64_t>(0, length)(random));
    std::sort(cuts.begin(), cuts.end());
    std::vector<std::int64_t> lengths;
    for (std::size_t n = 0; n + 1 < cuts.size(); ++n) lengths.push_back(cuts[n + 1] - cuts[n]);
    return lengths;
  };
  all.push_back(contiguous(uneven(sizes.queries), uneven(sizes.keys)));
  return all;
}

bool holds(const Shard& shard, std::int64_t row) {
  return std::any_of(shard.begin(), shard.end(), [&](Rows r) { return r.begin <= row && row < r.end; });
}

TEST(DistributedSeen, counts_the_pairs_that_the_contract_allows) {
  std::mt19937 random(1);
  for (const Case& c : cases()) {
    const Seen visible = seen(c.sizes, c.options, c.packing);
    for (int n = 0; n < 40; ++n) {
      const auto draw = [&](std::int64_t length) {
        const auto a = std::uniform_int_distribution<std::int64_t>(0, length)(random);
        const auto b = std::uniform_int_distribution<std::int64_t>(0, length)(random);
        return Rows{std::min(a, b), std::max(a, b)};
      };
      const Rows queries = draw(c.sizes.queries), keys = draw(c.sizes.keys);
      double expected = 0;
      std::set<std::int64_t> keys_seen, queries_that_see;
      for (std::int64_t i = queries.begin; i < queries.end; ++i)
        for (std::int64_t j = 0; j < c.sizes.keys; ++j)
          for (std::int64_t b = 0; b < items(c); ++b)
            if (allowed(c, b, i, j)) {
              keys_seen.insert(j);
              if (j >= keys.begin && j < keys.end) expected += 1;
            }
      for (std::int64_t i = 0; i < c.sizes.queries; ++i)
        for (std::int64_t j = keys.begin; j < keys.end; ++j)
          if (seen_by_any(c, i, j)) queries_that_see.insert(i);
      EXPECT_EQ(visible.pairs(queries, keys), expected) << c.name;
      const Shard found = visible.keys_of({queries}), seeing = visible.queries_of({keys});
      for (std::int64_t j = 0; j < c.sizes.keys; ++j) EXPECT_EQ(holds(found, j), keys_seen.contains(j)) << c.name;
      for (std::int64_t i = 0; i < c.sizes.queries; ++i)
        EXPECT_EQ(holds(seeing, i), queries_that_see.contains(i)) << c.name;
    }
  }
}

// Follows the transfers step by step: a rank sends what it holds, and computes with what it holds.
void expect_every_pair_once(const Case& c, const Schedule& plan) {
  const auto ranks = static_cast<std::size_t>(plan.ranks());
  const bool moves_queries = plan.scheme == Scheme::pass_query;
  std::vector<std::set<std::int64_t>> held(ranks);  // moving rows at each rank: kept once received
  const auto& owned = moves_queries ? plan.sharding.queries : plan.sharding.keys;
  for (std::size_t r = 0; r < ranks; ++r)
    for (const Rows& rows : owned[r])
      for (std::int64_t j = rows.begin; j < rows.end; ++j) held[r].insert(j);
  std::map<std::pair<std::int64_t, std::int64_t>, int> computed;
  std::vector<std::vector<Tile>> tiles;
  for (std::size_t r = 0; r < ranks; ++r) tiles.push_back(plan.tiles(static_cast<int>(r)));
  for (int step = 0; step < plan.steps; ++step) {
    const auto before = held;
    for (const Transfer& t : plan.transfers)
      if (t.step == step && !t.result)
        for (std::int64_t j = t.rows.begin; j < t.rows.end; ++j) {
          ASSERT_TRUE(before[static_cast<std::size_t>(t.from)].contains(j)) << c.name << ": sent before it came";
          ASSERT_TRUE(held[static_cast<std::size_t>(t.to)].insert(j).second) << c.name << ": came twice";
        }
    for (std::size_t r = 0; r < ranks; ++r)
      for (const Tile& tile : tiles[r])
        if (tile.step == step)
          for (std::int64_t i = tile.queries.begin; i < tile.queries.end; ++i)
            for (std::int64_t j = tile.keys.begin; j < tile.keys.end; ++j) {
              if (!seen_by_any(c, i, j)) continue;
              ASSERT_TRUE(held[r].contains(moves_queries ? i : j)) << c.name;
              ASSERT_TRUE(
                  holds(moves_queries ? plan.sharding.keys[r] : plan.sharding.queries[r], moves_queries ? j : i));
              ++computed[{i, j}];
            }
  }
  for (std::int64_t i = 0; i < c.sizes.queries; ++i)
    for (std::int64_t j = 0; j < c.sizes.keys; ++j)
      ASSERT_EQ((computed[{i, j}]), seen_by_any(c, i, j) ? 1 : 0) << c.name << " (" << i << ", " << j << ")";
}

TEST(DistributedSchedule, computes_every_allowed_pair_once_with_rows_that_have_arrived) {
  std::mt19937 random(2);
  for (const Case& c : cases()) {
    const Seen visible = seen(c.sizes, c.options, c.packing);
    for (int ranks = 1; ranks <= 4; ++ranks) {
      for (const Sharding& sharding : shardings(c.sizes, ranks, random)) {
        for (const Scheme scheme : {Scheme::ring, Scheme::all_gather, Scheme::pass_query}) {
          expect_every_pair_once(c, schedule(scheme, c.sizes, visible, sharding));
        }
      }
    }
  }
}

TEST(DistributedSchedule, sends_each_row_once_to_every_rank_that_sees_it_and_to_no_other) {
  std::mt19937 random(3);
  for (const Case& c : cases()) {
    const Seen visible = seen(c.sizes, c.options, c.packing);
    const double row = static_cast<double>(c.sizes.batch * c.sizes.kv_heads * 128 * 4);
    for (int ranks = 1; ranks <= 4; ++ranks) {
      for (const Sharding& sharding : shardings(c.sizes, ranks, random)) {
        double least = 0;
        for (std::size_t r = 0; r < sharding.queries.size(); ++r)
          for (std::int64_t j = 0; j < c.sizes.keys; ++j) {
            bool sees = false;
            for (std::int64_t i = 0; i < c.sizes.queries && !sees; ++i)
              sees = holds(sharding.queries[r], i) && seen_by_any(c, i, j);
            if (sees && !holds(sharding.keys[r], j)) least += row;
          }
        for (const Scheme scheme : {Scheme::ring, Scheme::all_gather}) {
          const Schedule plan = schedule(scheme, c.sizes, visible, sharding);
          double bytes = 0;
          for (const Transfer& t : plan.transfers) bytes += t.bytes;
          EXPECT_EQ(bytes, least) << c.name << ", " << ranks << " ranks, " << name(scheme);
          EXPECT_EQ(least_bytes(plan), least);
        }
      }
    }
  }
}

TEST(DistributedSchedule, a_rank_that_the_mask_excludes_gets_nothing) {
  const Sizes sizes{.queries = 4096, .keys = 4096};
  const Seen visible = seen(sizes, {.causal = Causal::square, .window = Window{100, {}}});
  const Schedule plan = schedule(Scheme::ring, sizes, visible, contiguous(4096, 4096, 8));
  EXPECT_TRUE(plan.received_by(0).empty());
  for (const Transfer& t : plan.transfers) {
    EXPECT_EQ(t.to, t.from + 1);
    EXPECT_EQ(t.rows.count(), 100);
  }
}

TEST(DistributedSchedule, ring_neighbours_pass_blocks_on) {
  const Sizes sizes{.queries = 64, .keys = 64};
  const Schedule plan = schedule(Scheme::ring, sizes, seen(sizes), contiguous(64, 64, 4));
  EXPECT_EQ(plan.steps, 4);
  EXPECT_EQ(plan.transfers.size(), 12U);
  for (const Transfer& t : plan.transfers) EXPECT_EQ(t.to, (t.from + 1) % 4);
}

double imbalance(const Seen& visible, const Sharding& sharding) {
  double most = 0, all = 0;
  for (const Shard& shard : sharding.queries) {
    double pairs = 0;
    for (const Rows& rows : shard) pairs += visible.pairs(rows, {0, visible.keys()});
    most = std::max(most, pairs);
    all += pairs;
  }
  return most * static_cast<double>(sharding.queries.size()) / all - 1;
}

TEST(DistributedSharding, zigzag_and_balanced_share_causal_work_within_3_percent) {
  for (const std::int64_t length : {16384, 16381, 100003}) {
    const Sizes sizes{.queries = length, .keys = length};
    const Seen visible = seen(sizes, {.causal = Causal::square});
    for (const int ranks : {2, 3, 4, 16, 64}) {
      EXPECT_LT(imbalance(visible, zigzag(length, length, ranks)), 0.03) << length << ' ' << ranks;
      EXPECT_LT(imbalance(visible, balanced(visible, ranks)), 0.03) << length << ' ' << ranks;
    }
    EXPECT_GT(imbalance(visible, contiguous(length, length, 4)), 0.5);
  }
}

TEST(DistributedSharding, balanced_shares_random_documents_within_8_percent) {
  std::mt19937 random(4);
  for (int draw = 0; draw < 20; ++draw) {
    std::vector<std::int64_t> lengths;
    std::int64_t total = 0;
    while (total < 32768) {  // most are short, some are long
      lengths.push_back(static_cast<std::int64_t>(16 * std::exp(std::uniform_real_distribution<>(0, 6.5)(random))));
      total += lengths.back();
    }
    const Tensor bounds = cu_seqlens(lengths);
    const Sizes sizes{.queries = total, .keys = total};
    const Seen visible = seen(sizes, {.causal = Causal::square}, Packing{bounds, bounds});
    for (const int ranks : {2, 4, 8}) {
      const Sharding sharding = balanced(visible, ranks);
      EXPECT_LT(imbalance(visible, sharding), 0.08) << draw << ' ' << ranks;
      for (const Shard& shard : sharding.queries) {  // rows, and so memory, are shared evenly too
        const double share = static_cast<double>(total) / ranks;
        EXPECT_NEAR(static_cast<double>(count(shard)), share, std::max(64.0, 0.01 * share));
      }
    }
  }
}

TEST(DistributedSharding, balanced_keeps_documents_whole_where_it_can) {
  const std::vector<std::int64_t> lengths = {267, 2981, 35, 2951, 88, 164, 1517, 151, 328, 18, 1009, 308,
                                             98,  1222, 84, 193,  33, 146, 48,   67,  991, 74, 230,  3381};
  const Tensor bounds = cu_seqlens(lengths);
  const Sizes sizes{.queries = 16384, .keys = 16384};
  const Seen visible = seen(sizes, {.causal = Causal::square}, Packing{bounds, bounds});
  const Sharding sharding = balanced(visible, 2);
  EXPECT_LT(imbalance(visible, sharding), 0.01);
  std::set<std::int64_t> cuts;
  for (const Shard& shard : sharding.queries)
    for (const Rows& rows : shard) cuts.insert({rows.begin, rows.end});
  for (std::int64_t n = 0; n < bounds.elements(); ++n) cuts.erase(bounds.as<std::int64_t>()[n]);
  EXPECT_LE(cuts.size(), 1U);  // 6 documents are cut by equal chunks
  EXPECT_EQ(balanced(visible, 2), sharding);
}

TEST(DistributedSharding, balanced_cuts_no_document_to_even_out_a_few_rows) {
  const Tensor bounds = cu_seqlens({4110, 4090, 4090, 4094});
  const Sizes sizes{.queries = 16384, .keys = 16384};
  const Seen visible = seen(sizes, {.causal = Causal::square}, Packing{bounds, bounds});
  EXPECT_TRUE(schedule(Scheme::ring, sizes, visible, balanced(visible, 2)).transfers.empty());
}

std::string text_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "nothing was thrown";
}

TEST(DistributedSchedule, refuses_shards_that_miss_or_repeat_rows) {
  const Sizes sizes{.kv_heads = 1, .queries = 8, .keys = 8};
  const Seen visible = seen(sizes);
  const auto attempt = [&](const Sharding& sharding, Scheme scheme = Scheme::ring, bool backward = false) {
    return text_of([&] { schedule(scheme, sizes, visible, sharding, backward); });
  };
  Sharding good = contiguous(8, 8, 2);
  Sharding bad = good;
  bad.queries[0] = {{0, 3}};
  EXPECT_EQ(attempt(bad), "distributed: no shard holds queries from 3 on");
  bad.queries[0] = {{0, 5}};
  EXPECT_EQ(attempt(bad), "distributed: two shards hold queries from 4 on");
  bad = good;
  bad.keys[1] = {{4, 9}};
  EXPECT_EQ(attempt(bad), "distributed: expected keys between 0 and 8, found 4 to 9 in the shard of rank 1");
  bad.keys[1] = {};
  EXPECT_EQ(attempt(bad), "distributed: the shards hold 4 keys, expected 8");
  EXPECT_EQ(attempt(good, Scheme::heads),
            "distributed: scheme heads needs a kv head for each rank, found 1 for 2 ranks");
  EXPECT_EQ(attempt(good, Scheme::pass_query, true), "distributed: scheme pass_query has no backward");
}

}  // namespace
}  // namespace headway::distributed
