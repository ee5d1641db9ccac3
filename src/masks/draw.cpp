#include "masks/draw.h"

#include <array>
#include <vector>

#include "core/ceil_div.h"
#include "core/text.h"

namespace headway {
namespace {

constexpr std::int64_t most_rows = 32, most_columns = 48;  // cells, each two characters wide: about a square

// How many pairs are allowed in each cell of `side` x `side` pairs, row by row.
struct Cells {
  Cells(const MaskNode& node, MaskSizes mask_sizes, std::int64_t cell_side)
      : sizes(mask_sizes),
        side(cell_side),
        rows(ceil_div(sizes.queries, side)),
        columns(ceil_div(sizes.keys, side)),
        counts(static_cast<std::size_t>(rows * columns)) {
    constexpr std::int64_t at_once = 4096;
    for (std::int64_t begin = 0; begin < sizes.queries; begin += at_once) {
      const std::int64_t end = std::min(begin + at_once, sizes.queries);
      SpanLists lists(sizes.keys);
      node.append({.sizes = sizes, .begin = begin, .end = end}, lists);
      for (std::int64_t i = begin; i < end; ++i) {
        add(i / side, lists[static_cast<std::size_t>(i - begin)]);
      }
    }
  }

  void add(std::int64_t row, std::span<const Span> spans) {
    for (const Span& span : spans) {
      total += span.end - span.begin;
      for (std::int64_t column = span.begin / side; column * side < span.end; ++column) {
        const std::int64_t begin = std::max(span.begin, column * side), end = std::min(span.end, (column + 1) * side);
        counts[static_cast<std::size_t>(row * columns + column)] += end - begin;
      }
    }
  }
  // Of the pairs of a cell, which has fewer of them at the ends.
  double share(std::int64_t row, std::int64_t column) const {
    const std::int64_t queries = std::min(side, sizes.queries - row * side);
    const std::int64_t keys = std::min(side, sizes.keys - column * side);
    return static_cast<double>(counts[static_cast<std::size_t>(row * columns + column)]) /
           static_cast<double>(queries * keys);
  }

  MaskSizes sizes;
  std::int64_t side, rows, columns;
  std::vector<std::int64_t> counts;
  std::int64_t total = 0;
};

const char* cell_text(bool is_pair, double share) {
  if (is_pair) {
    return share > 0 ? "■ " : "· ";
  }
  if (share == 0) {
    return "· ";
  }
  static constexpr std::array<const char*, 4> shades = {"░░", "▒▒", "▓▓", "██"};
  return share == 1 ? shades[3] : shades[static_cast<std::size_t>(share * 3)];
}

std::string heading(const MaskNode& node, const Cells& cells) {
  const MaskTraits& traits = node.traits;
  const double all = static_cast<double>(cells.sizes.queries) * static_cast<double>(cells.sizes.keys);
  std::string line = text(traits.text, ": ", cells.sizes.queries, " queries x ", cells.sizes.keys, " keys, ");
  if (cells.side > 1) {
    line += text("cells of ", cells.side, ", ");
  }
  if (traits.batch > 1 || traits.heads > 1) {
    line += text("the first of ", traits.batch, " x ", traits.heads, " (batch x heads), ");
  }
  const double share = all == 0 ? 0 : static_cast<double>(cells.total) / all;
  return line +
         text(cells.total, " pairs, ", static_cast<double>(static_cast<std::int64_t>(1000 * share + 0.5)) / 10, " %");
}

}  // namespace

std::string drawing_of(const MaskNode& node, MaskSizes sizes) {
  const std::int64_t side =
      std::max({ceil_div(sizes.queries, most_rows), ceil_div(sizes.keys, most_columns), std::int64_t{1}});
  const Cells cells(node, sizes, side);
  std::string drawing = heading(node, cells);
  for (std::int64_t row = 0; row < cells.rows; ++row) {
    std::string line;
    for (std::int64_t column = 0; column < cells.columns; ++column) {
      line += cell_text(side == 1, cells.share(row, column));
    }
    drawing += '\n' + line.substr(0, line.find_last_not_of(' ') + 1);
  }
  return drawing;
}

}  // namespace headway
