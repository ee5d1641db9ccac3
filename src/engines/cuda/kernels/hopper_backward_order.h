// The order of the sums in the Hopper backward: which tiles meet, who works on which, and when each may add.
//
// A key tile's gradients stay with the block of threads that owns it. A query tile's gradient is a sum over key tiles,
// that is, over blocks, and its bits depend on the order of that sum; so every contribution has a rank, and a counter
// for each query tile lets them in one after another. The order is a rule on plain numbers: it depends on the sequence
// alone, not on the batch around it nor on timing. The walks are laid out so that a turn has come when it is wanted.
//
// One sequence of one kv head is the work of a team, or of several that share its query heads or its query tiles out:
// what is said below holds for each of them by itself. Its key tiles [0, N) are dealt to members; a member of a causal
// problem has two, N - 1 - i and i, which together are as long as any other's. For each of its tiles a member walks
// over the (query head of the group, query tile) positions that see it, in ascending order, from a start of its own to
// the end and then, wrapped around, from the beginning to that start. At one position contributions are ordered by
//   chunk (of members, where a team has more than can run at once), first or second tile, wrapped, descending key tile.
// Nobody waits for ever: each member does its own steps in ascending (chunk, tile, wrapped, position), and waits only
// for what is smaller in (chunk, tile, wrapped, position, - key tile).
#pragma once

#include <cmath>
#include <cstdint>

#include "core/host_device.h"

namespace headway::cuda {

inline constexpr int backward_keys = 128;  // of a tile, up to head dim 128

// [begin, end)
struct TileSpan {
  int begin = 0, end = 0;

  HEADWAY_HOST_DEVICE int count() const { return begin < end ? end - begin : 0; }
  HEADWAY_HOST_DEVICE TileSpan within(TileSpan other) const {
    return {begin > other.begin ? begin : other.begin, end < other.end ? end : other.end};
  }
};

enum class TeamShape : std::uint8_t {
  square,    // every real query sees every valid key
  triangle,  // causal: key tile n is seen by the queries from its own position on
  band,      // any other rule
};

// More members of a team than this never run at once.
inline constexpr int largest_chunk = 128;

// A sequence as the order sees it. Distances are cut to what cannot overflow, and query tiles times group times
// largest_chunk fit into 31 bits.
struct BackwardSequence {
  TeamShape shape;
  std::uint8_t row_bits;      // a query tile has 2^row_bits rows
  std::uint8_t key_bits = 7;  // a key tile has 2^key_bits keys
  int group;                  // query heads that share the kv head
  int real_queries;
  int valid_keys;   // keys from here on nobody sees
  int left, right;  // query i sees keys from i + offset - left to i + offset + right
  int offset;
  int chunk;                      // members that run at once
  TileSpan share = {0, 1 << 30};  // the team's own of the query tiles

  HEADWAY_HOST_DEVICE int key_rows() const { return 1 << key_bits; }
  HEADWAY_HOST_DEVICE int query_rows() const { return 1 << row_bits; }
  HEADWAY_HOST_DEVICE int query_tiles() const { return (real_queries + query_rows() - 1) >> row_bits; }
  HEADWAY_HOST_DEVICE int own_query_tiles() const { return share.within({0, query_tiles()}).count(); }

  // Key tiles that some query sees all lie before this one.
  HEADWAY_HOST_DEVICE int seen_tiles() const {
    const int last = real_queries - 1 + offset + right + 1;
    const int seen = last < valid_keys ? last : valid_keys;
    return real_queries == 0 || seen <= 0 ? 0 : (seen + key_rows() - 1) >> key_bits;
  }

  HEADWAY_HOST_DEVICE int members() const {
    return shape == TeamShape::triangle ? (seen_tiles() + 1) / 2 : seen_tiles();
  }

  // The query tiles of the team that see some key of a tile.
  HEADWAY_HOST_DEVICE TileSpan queries_of(int key_tile) const {
    const int first = key_tile << key_bits;
    const int last = first + key_rows() < valid_keys ? first + key_rows() : valid_keys;
    const int low = first - right - offset > 0 ? first - right - offset : 0;
    const int high = last + left - offset < real_queries ? last + left - offset : real_queries;
    return first >= last || low >= high ? TileSpan{} : share.within({low >> row_bits, ((high - 1) >> row_bits) + 1});
  }

  // The key tiles that some query of a tile sees.
  HEADWAY_HOST_DEVICE TileSpan keys_of(int query_tile) const {
    const int first = (query_tile << row_bits) + offset;
    const int rows_end = (query_tile + 1) << row_bits;
    const int last = (rows_end < real_queries ? rows_end : real_queries) - 1 + offset;
    const int low = first - left > 0 ? first - left : 0;
    const int high = last + right + 1 < valid_keys ? last + right + 1 : valid_keys;
    return low >= high ? TileSpan{} : TileSpan{low >> key_bits, ((high - 1) >> key_bits) + 1};
  }

  // Whether a query of the tile may not see some key of the other.
  HEADWAY_HOST_DEVICE bool is_edge(int query_tile, int key_tile) const {
    const int first_query = query_tile << row_bits, last_query = first_query + query_rows() - 1;
    const int first_key = key_tile << key_bits, last_key = first_key + key_rows() - 1;
    return last_query >= real_queries || last_key >= valid_keys || first_key < last_query + offset - left ||
           last_key > first_query + offset + right;
  }
};

// The query tiles of one of several teams that share them out: as much work for each. Of a causal problem the last
// tiles see most keys, and the first p of n teams have what the first sqrt(p / n) of the tiles have.
HEADWAY_HOST_DEVICE inline TileSpan query_share(const BackwardSequence& sequence, int team, int teams) {
  const int tiles = sequence.query_tiles();
  const auto begin = [&](int number) {
    if (sequence.shape != TeamShape::triangle) {
      return static_cast<int>(static_cast<std::int64_t>(tiles) * number / teams);
    }
    return static_cast<int>(static_cast<float>(tiles) * sqrtf(static_cast<float>(number) / static_cast<float>(teams)) +
                            0.5f);
  };
  return teams == 1 ? TileSpan{0, tiles} : TileSpan{begin(team), team + 1 == teams ? tiles : begin(team + 1)};
}

// The work of a block of threads: one member of one kv head's team. `team` counts chunks of members of all heads.
struct BackwardItem {
  int head, member, team;
};

// Items in the order in which blocks take them. The items of a chunk follow each other, and the chunks of one head come
// in their order: head by head, or, spread, the first chunks of all heads before the second ones.
HEADWAY_HOST_DEVICE inline BackwardItem backward_item(int item, int items, int members, int chunk, bool spread) {
  if (!spread) {
    const int head = item / members, member = item - head * members;
    return {head, member, head * ((members + chunk - 1) / chunk) + member / chunk};
  }
  const int heads = items / members, number = item / (heads * chunk), first = number * chunk;
  const int size = members - first < chunk ? members - first : chunk, within = item - first * heads;
  const int head = within / size;
  return {head, first + within - head * size, number * heads + head};
}

// A step of a walk: the query head of the group and the query tile.
struct BackwardPosition {
  int head = 0, tile = 0;
};

// The key tiles of one chunk of a team, those taken first and those taken second.
struct BackwardChunk {
  TileSpan first, second;
  // Square: walks start every so many steps, spacing + spacing_rest / first.count(); to divide takes long on a GPU, so
  // it is done once.
  int spacing = 0, spacing_rest = 0;

  HEADWAY_HOST_DEVICE BackwardChunk(const BackwardSequence& sequence, int member) {
    const int seen = sequence.seen_tiles(), members = sequence.members();
    const int begin = member / sequence.chunk * sequence.chunk;
    const int end = begin + sequence.chunk < members ? begin + sequence.chunk : members;
    if (sequence.shape == TeamShape::triangle) {
      first = {seen - end, seen - begin};
      second = {begin, end < seen / 2 ? end : seen / 2};
    } else {
      first = {begin, end};
    }
    if (sequence.shape == TeamShape::square && begin < end) {
      const int steps = sequence.group * sequence.own_query_tiles();
      spacing = steps / (end - begin);
      spacing_rest = steps - spacing * (end - begin);
    }
  }
};

// How many steps after the first position that sees a key tile its walk starts.
HEADWAY_HOST_DEVICE inline int steps_before_start(const BackwardSequence& sequence, const BackwardChunk& chunk,
                                                  int key_tile, bool second) {
  if (sequence.shape == TeamShape::square) {
    // All around the circle, so that no two are at the same place.
    const int before = key_tile - chunk.first.begin;
    const int steps = before * chunk.spacing;
    return chunk.spacing_rest == 0 ? steps : steps + before * chunk.spacing_rest / chunk.first.count();
  }
  if (second) {
    // Where it would be by now if it had begun with this tile: neighbours then keep their distance.
    const int partner = sequence.seen_tiles() - 1 - key_tile;
    const int steps = sequence.group * sequence.queries_of(partner).count();
    const int last = sequence.group * sequence.queries_of(key_tile).count() - 1;
    return steps < last ? steps : last;
  }
  return 0;
}

// The position so many steps after the first of those that see a key tile.
HEADWAY_HOST_DEVICE inline BackwardPosition position_after(TileSpan queries, int steps) {
  const int head = steps < queries.count() ? 0 : steps / queries.count();
  return {head, queries.begin + steps - head * queries.count()};
}

// A member's walk for one of its key tiles. Each step can be asked about by itself, so that threads share the work.
class BackwardWalk {
 public:
  HEADWAY_HOST_DEVICE BackwardWalk(const BackwardSequence& sequence, const BackwardChunk& chunk, int key_tile,
                                   bool second)
      : sequence_(sequence),
        chunk_(chunk),
        queries_(sequence.queries_of(key_tile)),
        key_tile_(key_tile),
        second_(second),
        start_(queries_.count() == 0 ? 0 : steps_before_start(sequence, chunk, key_tile, second)) {}

  HEADWAY_HOST_DEVICE int steps() const { return sequence_.group * queries_.count(); }

  // The tiles whose walks this one meets: those of the same chunk that are taken first, or second, too.
  HEADWAY_HOST_DEVICE TileSpan tiles() const { return second_ ? chunk_.second : chunk_.first; }

  // Where such a tile's walk starts, as a number that grows along walks: a higher tile never starts earlier. Tiles that
  // nobody sees come first.
  HEADWAY_HOST_DEVICE int start_of(int key_tile) const {
    const TileSpan queries = sequence_.queries_of(key_tile);
    return queries.count() == 0
               ? -1
               : place(position_after(queries, steps_before_start(sequence_, chunk_, key_tile, second_)));
  }

  HEADWAY_HOST_DEVICE BackwardPosition position(int step) const {
    return position_after(queries_, start_ + step - (wrapped(step) ? steps() : 0));
  }

  // How many contributions to the step's position come before its own. starts(t) is start_of(t).
  template <class Starts>
  HEADWAY_HOST_DEVICE int rank(int step, const Starts& starts) const {
    const BackwardPosition at = position(step);
    const TileSpan all = tiles(), seen = sequence_.keys_of(at.tile);
    const auto count = [&](int begin, int end) { return seen.within({begin, end}).count(); };
    const auto not_started = [&](TileSpan span) {  // the first of them, or the span's end
      while (span.begin < span.end) {
        const int middle = (span.begin + span.end) / 2;
        if (starts(middle) > place(at)) {
          span.end = middle;
        } else {
          span.begin = middle + 1;
        }
      }
      return span.begin;
    };
    // Earlier chunks have the tiles outside of this one's on its own side.
    int before = sequence_.shape == TeamShape::triangle
                     ? count(chunk_.first.end, seen.end) + count(seen.begin, chunk_.second.begin)
                     : count(seen.begin, chunk_.first.begin);
    before += second_ ? count(chunk_.first.begin, chunk_.first.end) : 0;
    return wrapped(step)
               ? before + count(all.begin, not_started({all.begin, key_tile_})) + count(key_tile_ + 1, all.end)
               : before + count(key_tile_ + 1, not_started({key_tile_ + 1, all.end}));
  }

 private:
  HEADWAY_HOST_DEVICE bool wrapped(int step) const { return start_ + step >= steps(); }

  HEADWAY_HOST_DEVICE int place(BackwardPosition at) const { return at.head * sequence_.query_tiles() + at.tile; }

  const BackwardSequence& sequence_;
  const BackwardChunk& chunk_;
  TileSpan queries_;
  int key_tile_;
  bool second_;
  int start_;  // steps from the first position
};

}  // namespace headway::cuda
