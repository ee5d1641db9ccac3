#include "engines/cuda/hopper_units.h"

#include <algorithm>

#include "engines/cuda/hopper_forward.h"
#include "engines/cuda/kernels/aligned_rows.h"
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

bool repeats(const ConstTensorView& matrix, int axis) { return matrix.size(axis) == 1 || matrix.stride(axis) == 0; }

std::int64_t row_bytes(const ConstTensorView& matrix) {
  return matrix.size(3) * static_cast<std::int64_t>(size_of(matrix.dtype()));
}

// Rows that are not repeated, of all heads and batch items.
std::int64_t own_rows(const ConstTensorView& matrix) {
  std::int64_t rows = 1;
  for (int axis = 0; axis < 3; ++axis) {
    rows *= repeats(matrix, axis) ? 1 : matrix.size(axis);
  }
  return rows;
}

std::size_t input_bytes(const Problem& problem) {
  const std::int64_t numbers = problem.query.elements() + problem.key.elements() + problem.value.elements();
  return static_cast<std::size_t>(numbers) * size_of(problem.dtype());
}

}  // namespace

std::size_t aligned_matrix_bytes(const Problem& problem) {
  if (problem.bias.has_value() == problem.mask.has_value()) {
    return 0;  // none, or two that are joined on their way
  }
  const ConstTensorView& matrix = problem.bias ? *problem.bias : *problem.mask;
  if (is_mappable(matrix) || !has_rows(matrix) || problem.packed()) {
    return 0;
  }
  // A copy moves the matrix twice more; rows that the guard shifts into place take several times as long. Scratch stays
  // bounded: a larger matrix is left to the guard.
  constexpr std::size_t most_scratch = std::size_t{256} << 20;
  const auto bytes = static_cast<std::size_t>(own_rows(matrix) * aligned_row_bytes(row_bytes(matrix)));
  return bytes <= std::max(input_bytes(problem), most_scratch) ? Workspace::rounded(bytes) : 0;
}

std::optional<ConstTensorView> place_aligned_matrix(const Problem& problem, Workspace& workspace) {
  const std::size_t bytes = aligned_matrix_bytes(problem);
  if (bytes == 0) {
    return std::nullopt;
  }
  const ConstTensorView& matrix = problem.bias ? *problem.bias : *problem.mask;
  const auto element = static_cast<std::int64_t>(size_of(matrix.dtype()));
  const auto count = [&](int axis) { return repeats(matrix, axis) ? std::int64_t{1} : matrix.size(axis); };
  const AlignedRows copy{.from = matrix.data(),
                         .to = workspace.take(bytes),
                         .items = count(0),
                         .heads = count(1),
                         .rows = count(2),
                         .bytes = row_bytes(matrix),
                         .item_step = matrix.stride(0) * element,
                         .head_step = matrix.stride(1) * element,
                         .row_step = matrix.stride(2) * element};
  check(launch_aligned_rows(copy, static_cast<cudaStream_t>(problem.stream)), problem.operation,
        "launching the copy of a mask or bias");
  const std::int64_t row = aligned_row_bytes(copy.bytes) / element, head = row * copy.rows, item = head * copy.heads;
  const auto step = [&](int axis, std::int64_t size) { return repeats(matrix, axis) ? std::int64_t{0} : size; };
  return ConstTensorView(copy.to, matrix.dtype(), matrix.sizes(), {step(0, item), step(1, head), step(2, row), 1},
                         matrix.device());
}

UnitArguments units_of(const Problem& problem, const HopperTile& tile, const std::optional<ConstTensorView>& aligned) {
  UnitArguments units{};
  units.source = UnitSource::elements;
  if (!problem.bias && !problem.mask) {
    return units;
  }
  const ConstTensorView& matrix = aligned ? *aligned : problem.bias ? *problem.bias : *problem.mask;
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
