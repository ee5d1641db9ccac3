#include "view/fine_map.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "core/ceil_div.h"
#include "core/parallel.h"
#include "headway/threads.h"

namespace headway::view {
namespace {

// A multiple of the vector width; whatever is narrower than 512 such cells can be computed on request.
constexpr std::int64_t least_cell = 8;

// How many cells of size `cell` the range [begin, end) of a matrix touches.
std::int64_t cells_in(std::int64_t begin, std::int64_t end, std::int64_t cell) {
  return ceil_div(end, cell) - begin / cell;
}

}  // namespace

std::uint16_t short_float(double number) {
  const auto bits = std::bit_cast<std::uint32_t>(std::isfinite(number) ? static_cast<float>(number) : 0.0f);
  return static_cast<std::uint16_t>((bits + 0x8000u) >> 16);
}

float from_short(std::uint16_t half) { return std::bit_cast<float>(std::uint32_t{half} << 16); }

FineMap::FineMap(std::int64_t heads, std::int64_t queries, std::int64_t keys, std::int64_t bytes)
    : queries_(queries), keys_(keys) {
  const double pairs = static_cast<double>(heads) * static_cast<double>(queries) * static_cast<double>(keys);
  const double smallest = std::sqrt(4 * pairs / static_cast<double>(bytes));
  cell_ = std::max<std::int64_t>(static_cast<std::int64_t>(std::ceil(smallest / static_cast<double>(least_cell))), 1) *
          least_cell;
  rows_ = ceil_div(queries, cell_);
  columns_ = ceil_div(keys, cell_);
  mean_.resize(static_cast<std::size_t>(heads * rows_ * columns_));
  max_.resize(mean_.size());
}

CellTaker FineMap::taker(std::int64_t first_head) {
  return {cell_, cell_,
          [this, first_head](std::int64_t head, std::int64_t row, std::span<const double> mean,
                             std::span<const double> max) {
            const std::size_t to = at(first_head + head, row);
            std::transform(mean.begin(), mean.end(), mean_.begin() + static_cast<std::ptrdiff_t>(to), short_float);
            std::transform(max.begin(), max.end(), max_.begin() + static_cast<std::ptrdiff_t>(to), short_float);
          }};
}

Tile FineMap::part(std::int64_t head, const Rectangle& part, std::int64_t cells) const {
  const auto merged = [&](std::int64_t begin, std::int64_t end) {
    return std::max<std::int64_t>(1, ceil_div(ceil_div(end - begin, cell_), cells));
  };
  const std::int64_t by_rows = merged(part.row_begin, part.row_end), by_keys = merged(part.key_begin, part.key_end);
  Tile tile{.row_cell = by_rows * cell_, .key_cell = by_keys * cell_};
  tile.row_begin = part.row_begin / tile.row_cell * tile.row_cell;
  tile.key_begin = part.key_begin / tile.key_cell * tile.key_cell;
  tile.rows = cells_in(part.row_begin, part.row_end, tile.row_cell);
  tile.columns = cells_in(part.key_begin, part.key_end, tile.key_cell);
  tile.mean.resize(static_cast<std::size_t>(tile.rows * tile.columns));
  tile.max.resize(tile.mean.size());
  parallel_for(tile.rows, get_threads(), [&](std::int64_t r, int) { merge_row(head, tile, r); });
  return tile;
}

// Row r of the tile's cells. Every cell of the finer map is read once, so memory bandwidth limits it.
void FineMap::merge_row(std::int64_t head, Tile& tile, std::int64_t r) const {
  const std::int64_t by_rows = tile.row_cell / cell_, by_keys = tile.key_cell / cell_;
  const std::int64_t begin = tile.row_begin / cell_ + r * by_rows, end = std::min(begin + by_rows, rows_);
  const std::int64_t first_column = tile.key_begin / cell_;
  float* means = tile.mean.data() + r * tile.columns;
  float* maxima = tile.max.data() + r * tile.columns;
  std::vector<double> sums(static_cast<std::size_t>(tile.columns));
  for (std::int64_t row = begin; row < end; ++row) {
    const auto height = static_cast<double>(std::min(cell_, queries_ - row * cell_));
    const std::uint16_t* fine_means = mean_.data() + at(head, row);
    const std::uint16_t* fine_maxima = max_.data() + at(head, row);
    for (std::int64_t c = 0; c < tile.columns; ++c) {
      const std::int64_t from = first_column + c * by_keys, to = std::min(from + by_keys, columns_);
      float sum = 0, high = maxima[c];
      for (std::int64_t column = from; column < to; ++column) {
        sum += from_short(fine_means[column]) * static_cast<float>(std::min(cell_, keys_ - column * cell_));
        high = std::max(high, from_short(fine_maxima[column]));
      }
      sums[static_cast<std::size_t>(c)] += static_cast<double>(sum) * height;
      maxima[c] = high;
    }
  }
  const std::int64_t rows = std::min(end * cell_, queries_) - begin * cell_;  // of the matrix
  for (std::int64_t c = 0; c < tile.columns; ++c) {
    const std::int64_t keys = std::min(tile.key_cell, keys_ - tile.key_begin - c * tile.key_cell);
    means[c] = static_cast<float>(sums[static_cast<std::size_t>(c)] / static_cast<double>(rows * keys));
  }
}

}  // namespace headway::view
