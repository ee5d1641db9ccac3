#include "distributed/rank_tiles.h"

#include <algorithm>

#include "distributed/rows.h"

namespace headway::distributed {
namespace {

// From the first of some ranges to the last.
Rows hull(const Shard& ranges) { return ranges.empty() ? Rows{} : Rows{ranges.front().begin, ranges.back().end}; }

// Calls of an engine have a cost: a range of queries that would fall into more pieces stays whole.
constexpr std::size_t most_pieces = 8;

}  // namespace

RankTiles::RankTiles(const Run& run) {
  const Seen& seen = run.schedule.seen;
  const std::vector<Tile> whole = run.schedule.tiles(run.rank());
  std::int64_t first = 0;
  for (const Rows& mine : run.queries()) {
    std::vector<std::int64_t> borders = {mine.begin, mine.end};
    for (const Tile& tile : whole) {
      if (tile.queries == mine) {
        const Rows seeing = hull(common(seen.queries_of({tile.keys}), {mine}));
        borders.insert(borders.end(), {seeing.begin, seeing.end});
      }
    }
    std::sort(borders.begin(), borders.end());
    borders.erase(std::unique(borders.begin(), borders.end()), borders.end());
    if (borders.size() > most_pieces + 1) {
      borders = {mine.begin, mine.end};
    }
    for (std::size_t n = 0; n + 1 < borders.size(); ++n) {
      segments.push_back({{borders[n], borders[n + 1]}, first, 0});
      first += borders[n + 1] - borders[n];
    }
  }
  for (const Tile& tile : whole) {
    for (Segment& segment : segments) {
      if (overlap(segment.rows, tile.queries).count() <= 0) {
        continue;
      }
      const Rows keys = hull(common(seen.keys_of({segment.rows}), {tile.keys}));
      if (const double pairs = seen.pairs(segment.rows, keys); keys.count() > 0 && pairs > 0) {
        tiles.push_back({tile.step, segment.rows, keys, pairs});
        ++segment.tiles;
      }
    }
  }
}

std::size_t RankTiles::segment_of(const Tile& tile) const {
  const auto found = std::find_if(segments.begin(), segments.end(),
                                  [&](const Segment& segment) { return segment.rows == tile.queries; });
  return static_cast<std::size_t>(found - segments.begin());
}

}  // namespace headway::distributed
