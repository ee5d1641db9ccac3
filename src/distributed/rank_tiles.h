// The work of one rank when keys move, in pieces that need little merging.
#pragma once

#include <cstdint>
#include <vector>

#include "distributed/run.h"

namespace headway::distributed {

// A range of this rank's queries. All rows of it see keys of the same tiles.
struct Segment {
  Rows rows;
  std::int64_t first = 0;  // of this rank's rows
  int tiles = 0;
};

// The schedule's tiles of this rank, cut to the queries and keys that see each other: if only a few queries see keys of
// other ranks (windows, documents), the other queries have one tile and are not merged.
struct RankTiles {
  std::vector<Segment> segments;  // every query of this rank once
  std::vector<Tile> tiles;        // by step; their queries are those of one segment

  explicit RankTiles(const Run& run);
  std::size_t segment_of(const Tile& tile) const;
};

}  // namespace headway::distributed
