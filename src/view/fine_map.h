// A map of every head, fine enough for the zoom levels between the whole matrix and the parts that can be computed on
// request. Coarser cells, of any multiple of its cell size, are merged from it.
#pragma once

#include <cstdint>
#include <vector>

#include "analysis/cells.h"

namespace headway::view {

// Cells over a part of a matrix; those at the matrix's ends may be smaller.
struct Tile {
  std::int64_t row_begin = 0, key_begin = 0;
  std::int64_t row_cell = 1, key_cell = 1;
  std::int64_t rows = 0, columns = 0;
  std::vector<float> mean = {}, max = {};  // rows x columns
};

class FineMap {
 public:
  FineMap() = default;  // empty
  // As fine as `bytes` for all heads allow.
  FineMap(std::int64_t heads, std::int64_t queries, std::int64_t keys, std::int64_t bytes);

  bool empty() const { return mean_.empty(); }

  // The consumer that an analysis fills it through; `first_head` is the index here of the analysis's first head.
  CellTaker taker(std::int64_t first_head);

  // The cells that cover the rectangle of one head, at most `cells` (and one more) along each side.
  Tile part(std::int64_t head, const Rectangle& rectangle, std::int64_t cells) const;

 private:
  void merge_row(std::int64_t head, Tile& tile, std::int64_t r) const;

  // Numbers are stored as the upper halves of floats, which is three digits.
  std::size_t at(std::int64_t head, std::int64_t row) const {
    return static_cast<std::size_t>((head * rows_ + row) * columns_);
  }

  std::int64_t queries_ = 0, keys_ = 0, cell_ = 1;
  std::int64_t rows_ = 0, columns_ = 0;
  std::vector<std::uint16_t> mean_, max_;
};

// The upper half of a float, rounded; 0 for what is not finite.
std::uint16_t short_float(double number);
float from_short(std::uint16_t half);

}  // namespace headway::view
