// A trace under construction: steps with their numbers as [batch, heads, rows, columns].
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "headway/trace.h"

namespace headway::tracing {

// Sizes in the order in which all steps are computed; an axis that a step lacks is 1.
struct Extent {
  std::int64_t batch = 1, heads = 1, rows = 1, columns = 1;
};

// Numbers of a step while it is computed.
class Grid {
 public:
  Grid() = default;
  explicit Grid(const Extent& sizes)
      : extent(sizes), numbers(static_cast<std::size_t>(sizes.batch * sizes.heads * sizes.rows * sizes.columns)) {}

  double& operator()(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) { return numbers[at(b, h, i, j)]; }
  double operator()(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const {
    return numbers[at(b, h, i, j)];
  }

  // Calls action(b, h, i, j) for every cell, in order.
  template <class Action>
  void for_each(const Action& action) const {
    for (std::int64_t b = 0; b < extent.batch; ++b) {
      for (std::int64_t h = 0; h < extent.heads; ++h) {
        for (std::int64_t i = 0; i < extent.rows; ++i) {
          for (std::int64_t j = 0; j < extent.columns; ++j) {
            action(b, h, i, j);
          }
        }
      }
    }
  }

  // Every cell from its place.
  template <class Cell>
  static Grid filled(const Extent& sizes, const Cell& cell) {
    Grid grid(sizes);
    grid.for_each([&](auto b, auto h, auto i, auto j) { grid(b, h, i, j) = cell(b, h, i, j); });
    return grid;
  }

  Extent extent;
  std::vector<double> numbers;

 private:
  std::size_t at(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const {
    return static_cast<std::size_t>(((b * extent.heads + h) * extent.rows + i) * extent.columns + j);
  }
};

// Which axes a step shows; a step without a row or column name lacks that axis.
struct Axes {
  bool batch = true, head = true;
  const char* row = nullptr;
  const char* column = nullptr;
};

// Everything of a step but its numbers.
struct Words {
  std::string name;
  std::string symbol;
  std::string formula;
  std::string why;
  TraceKind kind;
  Axes axes;
};

class Builder {
 public:
  // Axes that the user's arrays lack are not shown.
  Builder(bool has_batch, bool has_head) : has_batch_(has_batch), has_head_(has_head) {}

  // InvalidArgument if a step of this size is too large to show; called before any of it is computed.
  void check(const std::string& name, const Axes& axes, const Extent& extent) const;

  // The step's place in the trace.
  std::size_t add(const Words& words, Grid numbers, std::vector<TraceSource> sources = {});

  const Grid& grid(std::size_t step) const { return grids_[step]; }
  std::vector<TraceStep> finish();

 private:
  std::pair<Dims, std::vector<std::string>> shown(const Axes& axes, const Extent& extent) const;

  bool has_batch_, has_head_;
  std::vector<TraceStep> steps_;
  std::deque<Grid> grids_;  // a deque: references to earlier ones stay valid
};

}  // namespace headway::tracing
