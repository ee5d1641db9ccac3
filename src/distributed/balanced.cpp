// Shards that give every rank nearly as many rows and allowed pairs, and that send little.
#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <queue>
#include <random>

#include "core/text.h"
#include "distributed/rows.h"

namespace headway::distributed {
namespace {

constexpr double good_enough = 0.05;      // of imbalance: what is above it counts before all else
constexpr std::int64_t most_chunks = 64;  // of a rank: more would cut the sequence into tiles too small to be fast
// Receiving a key row takes about as long as computing so many pairs, and one more range in a rank's shard (calls of an
// engine, merged rows) as receiving so many rows. Machines differ by a factor of ten in both.
constexpr double pairs_of_a_row = 200, rows_of_a_range = 32;

struct Candidate {
  Candidate() = default;
  Candidate(const Seen& seen, std::vector<Shard> of_ranks) : shards(std::move(of_ranks)) {
    double most = 0, all = 0, rows = 0;
    for (const Shard& shard : shards) {
      double pairs = 0;
      for (const Rows& range : shard) {
        pairs += seen.pairs(range, {0, seen.keys()});
      }
      most = std::max(most, pairs);
      all += pairs;
      rows += static_cast<double>(count(without(seen.keys_of(shard), shard))) +
              rows_of_a_range * static_cast<double>(shard.size());
    }
    const double mean = all / static_cast<double>(shards.size());
    excess = all > 0 ? std::max(most / mean - 1, good_enough) : good_enough;
    pairs_lost = most - mean + pairs_of_a_row * rows / static_cast<double>(shards.size());
  }
  bool is_worse_than(const Candidate& other) const {
    return excess != other.excess ? excess > other.excess : pairs_lost > other.pairs_lost;
  }

  std::vector<Shard> shards;
  double excess = 0;      // imbalance (the most pairs of a rank over the mean, minus 1), from good_enough on
  double pairs_lost = 0;  // of a rank: what imbalance and transfers cost
};

// Equal numbers of chunks for every rank, the chunks with most pairs first, each to the rank with the fewest pairs so
// far that still has room.
std::vector<Shard> spread_chunks(const Seen& seen, int ranks, std::int64_t chunks_of_rank) {
  const std::int64_t chunks = chunks_of_rank * ranks;
  std::vector<Rows> rows(static_cast<std::size_t>(chunks));
  std::vector<double> pairs(rows.size());
  for (std::int64_t c = 0; c < chunks; ++c) {
    const auto at = static_cast<std::size_t>(c);
    rows[at] = chunk(seen.queries(), chunks, c);
    pairs[at] = seen.pairs(rows[at], {0, seen.keys()});
  }
  std::vector<std::size_t> order(rows.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return pairs[a] > pairs[b]; });

  using Load = std::pair<double, int>;  // pairs so far, rank
  std::priority_queue<Load, std::vector<Load>, std::greater<>> loads;
  for (int r = 0; r < ranks; ++r) {
    loads.emplace(0.0, r);
  }
  std::vector<std::vector<Rows>> chosen(static_cast<std::size_t>(ranks));
  for (const std::size_t c : order) {
    const auto [load, rank] = loads.top();
    loads.pop();
    auto& mine = chosen[static_cast<std::size_t>(rank)];
    mine.push_back(rows[c]);
    if (static_cast<std::int64_t>(mine.size()) < chunks_of_rank) {
      loads.emplace(load + pairs[c], rank);
    }
  }
  std::vector<Shard> shards;
  for (const auto& mine : chosen) {
    shards.push_back(joined(mine));
  }
  return shards;
}

// Blocks of at least `shortest` rows, but for the last, that see and are seen by no row outside of them.
std::vector<Rows> independent_blocks(const Seen& seen, std::int64_t shortest) {
  std::vector<Rows> reaches;
  for (const Strip& strip : seen.strips()) {
    reaches.push_back({std::min(strip.queries.begin, strip.keys.begin), std::max(strip.queries.end, strip.keys.end)});
  }
  std::sort(reaches.begin(), reaches.end(), [](Rows a, Rows b) { return a.begin < b.begin; });
  std::vector<Rows> blocks;
  std::int64_t begin = 0, reached = 0;
  for (const Rows& reach : reaches) {
    if (reach.begin >= reached && reach.begin - begin >= shortest) {
      blocks.push_back({begin, reach.begin});
      begin = reach.begin;
    }
    reached = std::max(reached, reach.end);
  }
  blocks.push_back({begin, seen.queries()});
  return blocks;
}

// Where each rank's rows end among blocks that lie one after the other: at an equal share of the rows or, if a block
// ends nearly there (ranks then have the same rows within 1 %), with that block, so that nothing is cut.
std::vector<std::int64_t> ends_of_ranks(const std::vector<Rows>& blocks, std::int64_t length, int ranks) {
  const std::int64_t slack = length / ranks / 200;
  std::vector<std::int64_t> ends;
  std::int64_t end = 0;  // of a block
  std::size_t next = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    const std::int64_t share = chunk(length, ranks, rank).end;
    std::int64_t before = end;
    for (; end < share && next < blocks.size(); ++next) {
      before = end;
      end += blocks[next].count();
    }
    const std::int64_t nearest = end - share < share - before ? end : before;
    const bool is_near = std::abs(nearest - share) <= slack && (ends.empty() || nearest >= ends.back());
    ends.push_back(is_near ? nearest : share);
  }
  return ends;
}

// The blocks one after the other, shared out to the ranks.
std::vector<Shard> dealt(const std::vector<Rows>& blocks, std::int64_t length, int ranks) {
  const std::vector<std::int64_t> ends = ends_of_ranks(blocks, length, ranks);
  std::vector<Shard> shards(static_cast<std::size_t>(ranks));
  std::size_t rank = 0;
  std::int64_t at = 0;
  for (Rows rest : blocks) {
    while (rest.count() > 0) {
      while (at == ends[rank]) {
        ++rank;
      }
      const std::int64_t taken = std::min(ends[rank] - at, rest.count());
      shards[rank].push_back({rest.begin, rest.begin + taken});
      rest.begin += taken;
      at += taken;
    }
  }
  for (Shard& shard : shards) {
    shard = joined(std::move(shard));
  }
  return shards;
}

// Orders the blocks so that sharing them out in equal numbers of rows, with few cuts, balances the pairs too.
// From a few orders, swaps two blocks at a time where that makes nothing worse; every process finds the same.
Candidate deal_blocks(const Seen& seen, int ranks) {
  constexpr std::int64_t blocks_of_rank = 32;
  std::vector<Rows> blocks = independent_blocks(seen, seen.queries() / (blocks_of_rank * ranks));
  Candidate best(seen, dealt(blocks, seen.queries(), ranks));
  if (blocks.size() < 2) {
    return best;
  }
  std::mt19937_64 random;
  const auto place = [&](std::size_t places) -> Rows& { return blocks[random() % places]; };
  constexpr int orders = 4;
  const std::size_t swaps = std::clamp<std::size_t>(100'000 / seen.strips().size(), 50, 400);
  for (int order = 0; order < orders; ++order) {
    for (std::size_t n = blocks.size(); order > 0 && n > 1; --n) {
      std::swap(blocks[n - 1], place(n));
    }
    Candidate current(seen, dealt(blocks, seen.queries(), ranks));
    for (std::size_t n = 0; n < swaps; ++n) {
      Rows &one = place(blocks.size()), &other = place(blocks.size());
      std::swap(one, other);
      Candidate changed(seen, dealt(blocks, seen.queries(), ranks));
      if (changed.is_worse_than(current)) {
        std::swap(one, other);
      } else {
        current = std::move(changed);
      }
    }
    if (best.is_worse_than(current)) {
      best = std::move(current);
    }
  }
  return best;
}

}  // namespace

Sharding balanced(const Seen& seen, int ranks) {
  check_ranks(seen.queries(), seen.keys(), ranks);
  if (seen.queries() != seen.keys()) {
    throw InvalidArgument(
        text("distributed::balanced: expected as many queries as keys, found ", seen.queries(), " and ", seen.keys()));
  }
  Candidate best = deal_blocks(seen, ranks);
  for (std::int64_t chunks = 1;
       chunks <= most_chunks && chunks * ranks <= std::max<std::int64_t>(seen.queries(), ranks); chunks *= 2) {
    Candidate one(seen, spread_chunks(seen, ranks, chunks));
    const bool is_good = one.excess == good_enough;
    if (best.is_worse_than(one)) {
      best = std::move(one);
    }
    if (is_good) {  // more chunks would send more
      break;
    }
  }
  return {best.shards, best.shards};
}

}  // namespace headway::distributed
