// How the cells of a map meet the tiles of rows that fill them. A piece is what one tile has of one row of cells: cells
// may span many tiles and tiles many cells. The piece of tile t and row of cells r has the number t + r. Going down the
// rows, t or r grows with every new piece, so that no two share a number, and a tile's pieces follow each other.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace headway::cuda {

constexpr std::int64_t analysis_rows = 64;  // of a tile

// Numbers for all pieces of `rows` rows.
HEADWAY_HOST_DEVICE inline std::int64_t piece_count(std::int64_t rows, std::int64_t row_cell) {
  return rows == 0 ? 0 : (rows - 1) / analysis_rows + (rows - 1) / row_cell + 1;
}

// The pieces of a tile.
struct TilePieces {
  std::int64_t tile, row_cell;
  std::int64_t first;  // row of cells
  int rows, count;

  HEADWAY_HOST_DEVICE std::int64_t number(int piece) const { return tile + first + piece; }
  // Its rows in the tile.
  HEADWAY_HOST_DEVICE int begin(int piece) const {
    const std::int64_t at = (first + piece) * row_cell - tile * analysis_rows;
    return at > 0 ? static_cast<int>(at) : 0;
  }
  HEADWAY_HOST_DEVICE int end(int piece) const {
    const std::int64_t at = (first + piece + 1) * row_cell - tile * analysis_rows;
    return at < rows ? static_cast<int>(at) : rows;
  }
};

HEADWAY_HOST_DEVICE inline TilePieces tile_pieces(std::int64_t tile, int rows, std::int64_t row_cell) {
  const std::int64_t begin = tile * analysis_rows, first = begin / row_cell;
  return {tile, row_cell, first, rows, static_cast<int>((begin + rows - 1) / row_cell - first + 1)};
}

}  // namespace headway::cuda
