#include "view/fine_map.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "core/ceil_div.h"

namespace headway::view {
namespace {

// Whole vectors; and what is narrower than 512 such cells can be computed while someone waits.
constexpr std::int64_t least_cell = 8;

// How many of `cell` sized cells the span [begin, end) of a matrix touches.
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
  const auto count = static_cast<std::size_t>(tile.columns);
  std::vector<double> sums(count);
  std::vector<float> highest(count);
  const std::int64_t first_row = tile.row_begin / cell_, first_column = tile.key_begin / cell_;
  for (std::int64_t r = 0; r < tile.rows; ++r) {
    std::fill(sums.begin(), sums.end(), 0.0);
    std::fill(highest.begin(), highest.end(), 0.0f);
    const std::int64_t begin = first_row + r * by_rows, end = std::min(begin + by_rows, rows_);
    std::int64_t weights_down = 0;  // rows of the matrix
    for (std::int64_t row = begin; row < end; ++row) {
      const std::int64_t height = std::min(cell_, queries_ - row * cell_);
      weights_down += height;
      const std::uint16_t* means = mean_.data() + at(head, row);
      const std::uint16_t* maxima = max_.data() + at(head, row);
      for (std::int64_t c = 0; c < tile.columns; ++c) {
        const std::int64_t from = first_column + c * by_keys, to = std::min(from + by_keys, columns_);
        float sum = 0, high = 0;
        for (std::int64_t column = from; column < to; ++column) {
          sum += from_short(means[column]) * static_cast<float>(std::min(cell_, keys_ - column * cell_));
          high = std::max(high, from_short(maxima[column]));
        }
        sums[static_cast<std::size_t>(c)] += static_cast<double>(sum) * static_cast<double>(height);
        highest[static_cast<std::size_t>(c)] = std::max(highest[static_cast<std::size_t>(c)], high);
      }
    }
    for (std::int64_t c = 0; c < tile.columns; ++c) {
      const std::int64_t key = tile.key_begin + c * tile.key_cell;
      const std::int64_t weights_across = std::min(tile.key_cell, keys_ - key);
      tile.mean.push_back(
          static_cast<float>(sums[static_cast<std::size_t>(c)] / static_cast<double>(weights_down * weights_across)));
    }
    tile.max.insert(tile.max.end(), highest.begin(), highest.end());
  }
  return tile;
}

}  // namespace headway::view
