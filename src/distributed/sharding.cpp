// Who holds which rows: contiguous, zigzag. (balanced.cpp evens out allowed pairs.)
#include <algorithm>
#include <numeric>

#include "core/text.h"
#include "distributed/rows.h"

namespace headway::distributed {
namespace {

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

}  // namespace

void check_ranks(std::int64_t queries, std::int64_t keys, int ranks) {
  if (ranks < 1 || queries < 0 || keys < 0) {
    throw InvalidArgument(text("distributed: expected at least one rank and lengths of 0 or more, found ", ranks,
                               " ranks, ", queries, " queries, ", keys, " keys"));
  }
}

Rows chunk(std::int64_t length, std::int64_t chunks, std::int64_t index) {
  const std::int64_t each = length / chunks;
  const std::int64_t longer = length % chunks;
  const std::int64_t begin = index * each + std::min(index, longer);
  return {begin, begin + each + (index < longer ? 1 : 0)};
}

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

}  // namespace headway::distributed
