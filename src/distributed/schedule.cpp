// From sizes, shards and what may be seen to transfers and tiles: plain data that the executor runs and the simulator
// times. Nothing here depends on which rank asks, so all ranks come to the same schedule.
#include <algorithm>
#include <functional>
#include <numeric>

#include "core/text.h"
#include "distributed/rows.h"
#include "distributed/schedule_parts.h"

namespace headway::distributed {
namespace {

// ---- Checks ----

void check_shards(const char* name, const std::vector<Shard>& shards, std::int64_t length) {
  Shard all;
  for (std::size_t rank = 0; rank < shards.size(); ++rank) {
    for (const Rows& rows : shards[rank]) {
      if (rows.begin < 0 || rows.end < rows.begin || rows.end > length) {
        throw InvalidArgument(text("distributed: expected ", name, " between 0 and ", length, ", found ", rows.begin,
                                   " to ", rows.end, " in the shard of rank ", rank));
      }
      all.push_back(rows);
    }
  }
  std::erase_if(all, [](Rows rows) { return rows.count() == 0; });
  std::sort(all.begin(), all.end(), [](Rows a, Rows b) { return a.begin < b.begin; });
  std::int64_t end = 0;
  for (const Rows& rows : all) {
    if (rows.begin != end) {
      throw InvalidArgument(text("distributed: ", rows.begin < end ? "two shards hold " : "no shard holds ", name,
                                 " from ", std::min(rows.begin, end), " on"));
    }
    end = rows.end;
  }
  if (end != length) {
    throw InvalidArgument(text("distributed: the shards hold ", end, " ", name, ", expected ", length));
  }
}

void check(Scheme scheme, const Sizes& sizes, const Seen& seen, const Sharding& sharding, bool backward) {
  const std::size_t ranks = sharding.queries.size();
  if (ranks == 0 || sharding.keys.size() != ranks) {
    throw InvalidArgument(text("distributed: expected a shard of queries and one of keys for each rank, found ", ranks,
                               " and ", sharding.keys.size()));
  }
  if (seen.queries() != sizes.queries || seen.keys() != sizes.keys) {
    throw InvalidArgument(text("distributed: what may be seen is of ", seen.queries(), " queries and ", seen.keys(),
                               " keys, the sizes are ", sizes.queries, " and ", sizes.keys));
  }
  check_shards("queries", sharding.queries, sizes.queries);
  check_shards("keys", sharding.keys, sizes.keys);
  if (const std::string reason = impossible(scheme, sizes, static_cast<int>(ranks), backward); !reason.empty()) {
    throw InvalidArgument(text("distributed: scheme ", name(scheme), " ", reason));
  }
}

int checked_group(const Sizes& sizes, int ranks, int group) {
  const std::vector<int> possible = group_sizes(sizes, ranks);
  if (group == 0) {
    return possible.front();
  }
  if (std::find(possible.begin(), possible.end(), group) == possible.end()) {
    throw InvalidArgument(text("distributed: expected groups of a size that divides ", ranks,
                               " ranks, with a kv head for each rank of a group and more than one group, found ",
                               group));
  }
  return group;
}

// ---- Keys and values that move ----

// A run of a rank's key rows that the same ranks need.
struct KeyPiece {
  Rows rows;
  std::vector<int> receivers;  // in ring order from the owner
};

std::vector<KeyPiece> key_pieces_of(int owner, const Schedule& schedule, const std::vector<Shard>& needed) {
  const int ranks = schedule.ranks();
  const Shard mine = joined(schedule.sharding.keys[static_cast<std::size_t>(owner)]);
  struct Wanted {
    Rows rows;
    int rank;
  };
  std::vector<Wanted> wanted;
  std::vector<std::int64_t> borders;
  for (int distance = 1; distance < ranks; ++distance) {  // ring order
    const int rank = (owner + distance) % ranks;
    for (const Rows& rows : common(mine, needed[static_cast<std::size_t>(rank)])) {
      wanted.push_back({rows, rank});
      borders.insert(borders.end(), {rows.begin, rows.end});
    }
  }
  std::sort(borders.begin(), borders.end());
  borders.erase(std::unique(borders.begin(), borders.end()), borders.end());
  std::vector<KeyPiece> pieces;
  for (std::size_t n = 0; n + 1 < borders.size(); ++n) {
    KeyPiece piece{{borders[n], borders[n + 1]}, {}};
    for (const Wanted& want : wanted) {
      if (want.rows.begin <= piece.rows.begin && want.rows.end >= piece.rows.end) {
        piece.receivers.push_back(want.rank);
      }
    }
    if (!piece.receivers.empty()) {
      pieces.push_back(std::move(piece));
    }
  }
  return pieces;
}

// At step n a rank receives from the shard of the rank n places before it, whose rows its neighbour passes on if it had
// them itself a step ago; else they come from their owner. So no rank gets rows of two others at once, or rows that it
// does not need. Gradients of the piece go straight to its owner in the step after the one that computed them.
void move_along_ring(Schedule& schedule, int owner, const KeyPiece& piece, const RowBytes& bytes) {
  const int ranks = schedule.ranks();
  const auto rows = static_cast<double>(piece.rows.count());
  int before = owner;
  for (const int receiver : piece.receivers) {
    const int step = (receiver - owner + ranks) % ranks;
    const int holder = (receiver - before + ranks) % ranks == 1 ? before : owner;
    schedule.transfers.push_back({step, holder, receiver, piece.rows, rows * bytes.key_value});
    if (schedule.backward) {
      schedule.transfers.push_back({step + 1, receiver, owner, piece.rows, rows * bytes.key_gradient, true});
    }
    before = receiver;
  }
}

void gather_all(Schedule& schedule, int owner, const KeyPiece& piece, const RowBytes& bytes) {
  const auto rows = static_cast<double>(piece.rows.count());
  for (const int receiver : piece.receivers) {
    schedule.transfers.push_back({1, owner, receiver, piece.rows, rows * bytes.key_value});
    if (schedule.backward) {
      schedule.transfers.push_back({2, receiver, owner, piece.rows, rows * bytes.key_gradient, true});
    }
  }
}

void add_key_transfers(Schedule& schedule, const RowBytes& bytes) {
  std::vector<Shard> needed;
  for (const Shard& shard : schedule.sharding.queries) {
    needed.push_back(schedule.seen.keys_of(shard));
  }
  for (int owner = 0; owner < schedule.ranks(); ++owner) {
    for (const KeyPiece& piece : key_pieces_of(owner, schedule, needed)) {
      schedule.scheme == Scheme::ring ? move_along_ring(schedule, owner, piece, bytes)
                                      : gather_all(schedule, owner, piece, bytes);
    }
  }
}

// ---- The other schemes ----

void add_query_transfers(Schedule& schedule, const RowBytes& bytes) {
  const int ranks = schedule.ranks();
  for (int to = 0; to < ranks; ++to) {
    const Shard needed = schedule.seen.queries_of(schedule.sharding.keys[static_cast<std::size_t>(to)]);
    for (int distance = 1; distance < ranks; ++distance) {
      const int from = (to + distance) % ranks;
      for (const Rows& rows : common(joined(schedule.sharding.queries[static_cast<std::size_t>(from)]), needed)) {
        const auto number = static_cast<double>(rows.count());
        schedule.transfers.push_back({1, from, to, rows, number * bytes.query});
        schedule.transfers.push_back({2, to, from, rows, number * bytes.partial, true});
      }
    }
  }
}

struct HeadBytes {
  double inputs = 0;
  double results = 0;
};

// What `from` sends so that `to` can compute its heads of these rows, and gets back.
HeadBytes head_bytes(const Schedule& schedule, const RowBytes& bytes, int from, int to) {
  const auto share = static_cast<double>(heads_of(schedule, to).kv_heads.count()) /
                     static_cast<double>(std::max<std::int64_t>(schedule.sizes.kv_heads, 1));
  const auto queries = static_cast<double>(count(schedule.sharding.queries[static_cast<std::size_t>(from)])) * share;
  const auto keys = static_cast<double>(count(schedule.sharding.keys[static_cast<std::size_t>(from)])) * share;
  if (schedule.backward) {
    return {queries * (bytes.query + 2 * bytes.out + bytes.lse) + keys * bytes.key_value,
            queries * bytes.query + keys * bytes.key_value};
  }
  return {queries * bytes.query + keys * bytes.key_value, queries * (bytes.out + bytes.lse)};
}

// Inside every group: heads out in step 1, and home in step `home`.
void add_head_transfers(Schedule& schedule, const RowBytes& bytes, int home) {
  for (int from = 0; from < schedule.ranks(); ++from) {
    const RankGroup group = group_of(schedule, from);
    for (int distance = 1; distance < group.size; ++distance) {
      const int to = group.first + (from - group.first + distance) % group.size;
      const HeadBytes there = head_bytes(schedule, bytes, from, to);
      schedule.transfers.push_back({1, from, to, {}, there.inputs});
      schedule.transfers.push_back({home, to, from, {}, there.results, true});
    }
  }
}

// The rows of a group are those of its ranks; in the ring rank g is group g.
Sharding grouped(const Sharding& sharding, int group) {
  const auto of_groups = [&](const std::vector<Shard>& of_ranks) {
    std::vector<Shard> result;
    for (std::size_t first = 0; first < of_ranks.size(); first += static_cast<std::size_t>(group)) {
      Shard all;
      for (std::size_t rank = first; rank < first + static_cast<std::size_t>(group); ++rank) {
        all.insert(all.end(), of_ranks[rank].begin(), of_ranks[rank].end());
      }
      result.push_back(joined(std::move(all)));
    }
    return result;
  };
  return {of_groups(sharding.queries), of_groups(sharding.keys)};
}

// Every rank is on a ring with the ranks of the other groups that have its heads.
void add_hybrid_transfers(Schedule& result, const RowBytes& bytes) {
  result.ring = std::make_shared<const Schedule>(
      schedule(Scheme::ring, result.sizes, result.seen, grouped(result.sharding, result.group), result.backward));
  add_head_transfers(result, bytes, result.ring->steps + 1);
  const auto kv_heads = static_cast<double>(std::max<std::int64_t>(result.sizes.kv_heads, 1));
  for (const Transfer& of_groups : result.ring->transfers) {
    for (int member = 0; member < result.group; ++member) {
      Transfer transfer = of_groups;
      transfer.step += 1;
      transfer.from = of_groups.from * result.group + member;
      transfer.to = of_groups.to * result.group + member;
      transfer.bytes *= static_cast<double>(heads_of(result, member).kv_heads.count()) / kv_heads;
      result.transfers.push_back(transfer);
    }
  }
}

// ---- Order ----

void sort_by_receiver(Schedule& schedule) {
  const auto ranks = static_cast<std::size_t>(schedule.ranks());
  std::stable_sort(schedule.transfers.begin(), schedule.transfers.end(),
                   [](const Transfer& a, const Transfer& b) { return a.to != b.to ? a.to < b.to : a.step < b.step; });
  schedule.received_at.assign(ranks + 1, 0);
  schedule.steps = 1;
  for (const Transfer& transfer : schedule.transfers) {
    ++schedule.received_at[static_cast<std::size_t>(transfer.to) + 1];
    schedule.steps = std::max(schedule.steps, transfer.step + 1);
  }
  std::partial_sum(schedule.received_at.begin(), schedule.received_at.end(), schedule.received_at.begin());
  // Gathered keys and whole heads are computed in step 1, also where nothing moves.
  const bool starts_at_1 = schedule.scheme != Scheme::ring && schedule.scheme != Scheme::pass_query;
  schedule.steps = std::max(schedule.steps, starts_at_1 ? 2 : 1);
}

void add_tiles(const Seen& seen, int step, const Shard& queries, const Shard& keys, std::vector<Tile>& tiles) {
  for (const Rows& rows : queries) {
    for (const Rows& of_keys : keys) {
      if (const double pairs = seen.pairs(rows, of_keys); pairs > 0) {
        tiles.push_back({step, rows, of_keys, pairs});
      }
    }
  }
}

}  // namespace

const char* name(Scheme scheme) {
  switch (scheme) {
    case Scheme::automatic: return "automatic";
    case Scheme::ring: return "ring";
    case Scheme::all_gather: return "all_gather";
    case Scheme::heads: return "heads";
    case Scheme::hybrid: return "hybrid";
    default: return "pass_query";
  }
}

std::string impossible(Scheme scheme, const Sizes& sizes, int ranks, bool backward) {
  if (scheme == Scheme::automatic) {
    return "is not one: choose() makes it one";
  }
  if (scheme == Scheme::heads && sizes.kv_heads < ranks) {
    return text("needs a kv head for each rank, found ", sizes.kv_heads, " for ", ranks, " ranks");
  }
  if (scheme == Scheme::pass_query && backward) {
    return "has no backward";
  }
  if (scheme == Scheme::hybrid && group_sizes(sizes, ranks).empty()) {
    return text("needs groups of 2 ranks or more, as many in each, and a kv head for each rank of a group, found ",
                ranks, " ranks and ", sizes.kv_heads, " kv heads");
  }
  return {};
}

std::vector<int> group_sizes(const Sizes& sizes, int ranks) {
  std::vector<int> result;
  for (int size = ranks / 2; size >= 2; --size) {  // of all ranks: that is heads
    if (ranks % size == 0 && size <= sizes.kv_heads) {
      result.push_back(size);
    }
  }
  return result;
}

RowBytes row_bytes(const Sizes& sizes) {
  const auto element = static_cast<double>(size_of(sizes.dtype));
  const double accumulator = sizes.dtype == DType::f64 ? 8 : 4;
  const auto queries = static_cast<double>(sizes.batch * sizes.heads);
  const auto keys = static_cast<double>(sizes.batch * sizes.kv_heads);
  const auto head_dim = static_cast<double>(sizes.head_dim);
  const auto value_dim = static_cast<double>(sizes.value_dim);
  return {.query = queries * head_dim * element,
          .key_value = keys * (head_dim + value_dim) * element,
          .key_gradient = keys * (head_dim + value_dim) * accumulator,
          .partial = queries * (value_dim + 1) * accumulator,
          .out = queries * value_dim * element,
          .lse = queries * accumulator};
}

RankGroup group_of(const Schedule& schedule, int rank) { return {rank - rank % schedule.group, schedule.group}; }

HeadShare heads_of(const Schedule& schedule, int rank) {
  const Sizes& sizes = schedule.sizes;
  const auto border = [&](std::int64_t member) { return sizes.kv_heads * member / schedule.group; };
  const std::int64_t shared = sizes.kv_heads == 0 ? 0 : sizes.heads / sizes.kv_heads;  // query heads of a kv head
  const int member = rank % schedule.group;
  const Rows kv_heads = {border(member), border(member + 1)};
  return {kv_heads, {kv_heads.begin * shared, kv_heads.end * shared}};
}

Schedule schedule(Scheme scheme, const Sizes& sizes, const Seen& seen, const Sharding& sharding, bool backward,
                  int group) {
  check(scheme, sizes, seen, sharding, backward);
  Schedule result{.scheme = scheme, .backward = backward, .sizes = sizes, .sharding = sharding, .seen = seen};
  const RowBytes bytes = row_bytes(sizes);
  if (scheme == Scheme::heads) {
    result.group = result.ranks();
    add_head_transfers(result, bytes, 2);
  } else if (scheme == Scheme::hybrid) {
    result.group = checked_group(sizes, result.ranks(), group);
    add_hybrid_transfers(result, bytes);
  } else if (scheme == Scheme::pass_query) {
    add_query_transfers(result, bytes);
  } else {
    add_key_transfers(result, bytes);
  }
  sort_by_receiver(result);
  return result;
}

std::span<const Transfer> Schedule::received_by(int rank) const {
  const std::size_t begin = received_at[static_cast<std::size_t>(rank)];
  return std::span(transfers).subspan(begin, received_at[static_cast<std::size_t>(rank) + 1] - begin);
}

std::vector<Tile> Schedule::tiles(int rank) const {
  const Shard& queries = sharding.queries[static_cast<std::size_t>(rank)];
  const Shard& keys = sharding.keys[static_cast<std::size_t>(rank)];
  std::vector<Tile> result;
  if (scheme == Scheme::heads) {
    add_tiles(seen, 1, {{0, sizes.queries}}, {{0, sizes.keys}}, result);
    return result;
  }
  if (scheme == Scheme::hybrid) {
    result = ring->tiles(rank / group);
    for (Tile& tile : result) {
      ++tile.step;
    }
    return result;
  }
  if (scheme == Scheme::all_gather) {
    add_tiles(seen, 1, queries, seen.keys_of(queries), result);
    return result;
  }
  add_tiles(seen, 0, queries, keys, result);
  const std::span<const Transfer> received = received_by(rank);
  for (std::size_t n = 0; n < received.size();) {
    const int step = received[n].step;
    Shard rows;
    for (; n < received.size() && received[n].step == step; ++n) {
      if (!received[n].result) {
        rows.push_back(received[n].rows);
      }
    }
    rows = joined(std::move(rows));
    scheme == Scheme::pass_query ? add_tiles(seen, step, rows, keys, result)
                                 : add_tiles(seen, step, queries, rows, result);
  }
  return result;
}

double least_bytes(const Schedule& schedule) {
  const double row = row_bytes(schedule.sizes).key_value;
  double bytes = 0;
  for (std::size_t rank = 0; rank < schedule.sharding.queries.size(); ++rank) {
    const Shard needed = schedule.seen.keys_of(schedule.sharding.queries[rank]);
    const Shard own = common(joined(schedule.sharding.keys[rank]), needed);
    bytes += static_cast<double>(count(needed) - count(own)) * row;
  }
  return bytes;
}

}  // namespace headway::distributed
