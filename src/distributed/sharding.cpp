// Who holds which rows: contiguous, zigzag, balanced by allowed pairs.
#include <algorithm>
#include <numeric>
#include <queue>

#include "core/text.h"
#include "distributed/rows.h"

namespace headway::distributed {
namespace {

void check_ranks(std::int64_t queries, std::int64_t keys, int ranks) {
  if (ranks < 1 || queries < 0 || keys < 0) {
    throw InvalidArgument(text("distributed: expected at least one rank and lengths of 0 or more, found ", ranks,
                               " ranks, ", queries, " queries, ", keys, " keys"));
  }
}

// Chunk `index` of `chunks` nearly equal ones of `length` rows: the first ones have one row more.
Rows chunk(std::int64_t length, std::int64_t chunks, std::int64_t index) {
  const std::int64_t each = length / chunks;
  const std::int64_t longer = length % chunks;
  const std::int64_t begin = index * each + std::min(index, longer);
  return {begin, begin + each + (index < longer ? 1 : 0)};
}

// Without chunks of 0 rows, and with neighbours joined.
Shard shard_of(const std::vector<Rows>& chunks) { return joined(chunks); }

std::vector<Shard> contiguous_shards(std::int64_t length, int ranks) {
  std::vector<Shard> shards;
  for (int r = 0; r < ranks; ++r) {
    shards.push_back(shard_of({chunk(length, ranks, r)}));
  }
  return shards;
}

std::vector<Shard> contiguous_shards(std::span<const std::int64_t> lengths) {
  std::vector<Shard> shards;
  std::int64_t begin = 0;
  for (const std::int64_t length : lengths) {
    std::int64_t end = 0;
    if (length < 0 || __builtin_add_overflow(begin, length, &end)) {
      throw InvalidArgument(
          text("distributed::contiguous: expected lengths of 0 or more whose sum is below 2^63, found ", length));
    }
    shards.push_back(shard_of({{begin, end}}));
    begin = end;
  }
  return shards;
}

std::vector<Shard> zigzag_shards(std::int64_t length, int ranks) {
  std::vector<Shard> shards;
  for (int r = 0; r < ranks; ++r) {
    shards.push_back(shard_of({chunk(length, 2 * ranks, r), chunk(length, 2 * ranks, 2 * ranks - 1 - r)}));
  }
  return shards;
}

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
    shards.push_back(shard_of(mine));
  }
  return shards;
}

double imbalance(const Seen& seen, const std::vector<Shard>& shards) {
  double most = 0;
  double all = 0;
  for (const Shard& shard : shards) {
    double pairs = 0;
    for (const Rows& rows : shard) {
      pairs += seen.pairs(rows, {0, seen.keys()});
    }
    most = std::max(most, pairs);
    all += pairs;
  }
  return all > 0 ? most * static_cast<double>(shards.size()) / all - 1 : 0;
}

}  // namespace

std::int64_t count(const Shard& shard) {
  return std::accumulate(shard.begin(), shard.end(), std::int64_t{0},
                         [](std::int64_t sum, Rows rows) { return sum + rows.count(); });
}

Sharding contiguous(std::int64_t queries, std::int64_t keys, int ranks) {
  check_ranks(queries, keys, ranks);
  return {contiguous_shards(queries, ranks), contiguous_shards(keys, ranks)};
}

Sharding contiguous(std::span<const std::int64_t> queries, std::span<const std::int64_t> keys) {
  if (queries.size() != keys.size() || queries.empty()) {
    throw InvalidArgument(text("distributed::contiguous: expected a length for each rank, found ", queries.size(),
                               " of queries and ", keys.size(), " of keys"));
  }
  return {contiguous_shards(queries), contiguous_shards(keys)};
}

Sharding zigzag(std::int64_t queries, std::int64_t keys, int ranks) {
  check_ranks(queries, keys, ranks);
  return {zigzag_shards(queries, ranks), zigzag_shards(keys, ranks)};
}

Sharding balanced(const Seen& seen, int ranks) {
  check_ranks(seen.queries(), seen.keys(), ranks);
  if (seen.queries() != seen.keys()) {
    throw InvalidArgument(
        text("distributed::balanced: expected as many queries as keys, found ", seen.queries(), " and ", seen.keys()));
  }
  constexpr double good_enough = 0.05;      // fewer, longer chunks are faster than a last percent of balance
  constexpr std::int64_t most_chunks = 64;  // of a rank: more would cut the sequence into tiles too small to be fast
  std::vector<Shard> best = contiguous_shards(seen.queries(), ranks);
  double best_imbalance = imbalance(seen, best);
  for (std::int64_t chunks = 2; chunks <= most_chunks && best_imbalance > good_enough; chunks *= 2) {
    if (chunks * ranks > seen.queries()) {
      break;
    }
    std::vector<Shard> shards = spread_chunks(seen, ranks, chunks);
    if (const double found = imbalance(seen, shards); found < best_imbalance) {
      best = std::move(shards);
      best_imbalance = found;
    }
  }
  return {best, best};
}

}  // namespace headway::distributed
