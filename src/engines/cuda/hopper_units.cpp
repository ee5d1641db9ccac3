#include "engines/cuda/hopper_units.h"

#include <algorithm>

#include "engines/cuda/hopper_forward.h"
#include "engines/cuda/tensor_map.h"

namespace headway::cuda {
namespace {

bool repeats_rows(const ConstTensorView& matrix) { return matrix.size(2) == 1 || matrix.stride(2) == 0; }

// Whether neighbouring keys are neighbours in memory.
bool has_rows(const ConstTensorView& matrix) { return matrix.size(3) <= 1 || matrix.stride(3) == 1; }

const void* end_of(const ConstTensorView& matrix) {
  std::int64_t last = 0;
  for (int axis = 0; axis < 4; ++axis) {
    last += std::max<std::int64_t>(0, (matrix.size(axis) - 1) * matrix.stride(axis));
  }
  const auto bytes = static_cast<std::int64_t>(size_of(matrix.dtype()));
  return static_cast<const std::uint8_t*>(matrix.data()) + (last + 1) * bytes;
}

}  // namespace

UnitArguments units_of(const Problem& problem, const HopperTile& tile) {
  UnitArguments units{};
  units.source = UnitSource::elements;
  if (!problem.bias && !problem.mask) {
    return units;
  }
  const ConstTensorView& matrix = problem.bias ? *problem.bias : *problem.mask;
  const auto element_bytes = static_cast<int>(size_of(matrix.dtype()));
  units.each = 4 / element_bytes;
  units.bytes = tile.unit_bytes(element_bytes);
  // A mask in front of a bias differs from row to row even where the bias does not.
  const bool both = problem.bias && problem.mask && problem.query_len > 1;
  units.one_row = repeats_rows(matrix) && !both;
  if (is_mappable(matrix) && !(repeats_rows(matrix) && both)) {
    constexpr int box_row_bytes = 128, unit_rows = 64;
    const MatrixBox box{std::min(tile.keys, box_row_bytes / element_bytes), units.one_row ? 1 : unit_rows};
    units.source = UnitSource::boxes;
    units.map = matrix_map(matrix, box, problem.operation);
    units.steps = steps_of(matrix);
    units.box_bytes = static_cast<std::uint32_t>(box.columns * box.rows * element_bytes);
    units.boxes = tile.keys / box.columns;
    units.box_columns = box.columns;
  } else if (has_rows(matrix)) {
    units.source = UnitSource::rows;
    units.end = end_of(matrix);
  } else {
    units.one_row = false;
  }
  // What the copy engine brings is ready as it is.
  units.prepared = units.source != UnitSource::boxes || (problem.bias && problem.mask);
  return units;
}

}  // namespace headway::cuda
