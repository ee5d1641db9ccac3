// The matrix product: out = left right + bias, one task.
//
// Depth goes in blocks. A block of one panel of columns of `right` (64 floats with AVX-512) is packed once per task and read
// by all its rows, 4 at a time: 4 vectors of columns and 4 broadcasts of `left`, read in place, for 16 FMAs a step. A step
// takes 256 bytes from the first or second cache and 16 bytes of `left` against 16 cycles of one FMA unit: the FMA units
// bound it. Packing moves each number of `right` once per task, 1 / rows of the FMAs' own loads; the next block is fetched
// into the cache while this one is multiplied. Totals, rows x columns, are read and written once per block and go out strip
// by strip with the last one.
//
// An element's bits depend on its own row of `left` and its own column of `right` alone: each block of depth is summed from
// 0 in the order of its steps and then added to the total, whatever the tiles, tasks and strides.
#pragma once

#include <cstdint>
#include <type_traits>

#include "engines/cpu/gemm/args.h"
#include "engines/cpu/gemm/tiles.h"
#include "engines/cpu/kernel/pack.h"
#include "engines/cpu/kernel/scratch.h"
#include "engines/cpu/simd/common.h"

namespace headway::cpu {
namespace {

template <class S, class In>
class Gemm {
 public:
  using Scalar = typename S::Scalar;
  using Vector = typename S::Vector;
  static constexpr int lanes = S::lanes;
  static constexpr int width = S::lanes * S::panel_vectors;
  static constexpr std::int64_t depth_block = HEADWAY_GEMM_DEPTH;  // longer sums of one sign lose more than a few units
  static constexpr std::int64_t in_place_rows = HEADWAY_GEMM_INPLACE;  // up to here a panel is read where it lies

  // Scratch of a task, in Scalars.
  static std::int64_t scratch_size(const GemmArgs& args) { return Layout(args, nullptr).scratch.used; }

  Gemm(const GemmArgs& args, Scalar* scratch)
      : args_(args), rows_(args.row_end - args.row_begin), at_(args, scratch) {}

  HEADWAY_NOINLINE void run() {
    std::int64_t k = 0;
    do {
      const std::int64_t steps = smaller(depth_block, args_.depth - k);
      const Rows<Scalar> left = left_block(k, steps);
      last_ = k + steps == args_.depth;
      Scalar* totals = at_.totals;
      for (std::int64_t c = args_.column_begin; c < args_.column_end; c += width, totals += rows_ * width) {
        block_ = {k, steps, c, at_most(args_.column_end - c, width)};
        totals_ = totals;
        if (args_.left_transposed) {
          run_block<Scalars::along>(left);
        } else {
          run_block<Scalars::across>(left);
        }
      }
      k += steps;
    } while (!last_);
  }

 private:
  // Steps k .. k + steps of depth for the columns of one panel.
  struct Block {
    std::int64_t k, steps, column;
    int columns;
  };

  // Memory that the next block will be packed from, still to be fetched.
  struct Fetch {
    const char* at;
    std::int64_t stride, bytes;  // from row to row; of one row
    std::int64_t rows, rows_per_strip;
  };

  struct Layout {
    Scratch<Scalar> scratch;
    Scalar *totals, *panel, *left_copy;

    Layout(const GemmArgs& args, Scalar* base) : scratch{base} {
      const std::int64_t rows = args.row_end - args.row_begin;
      const std::int64_t panels = (args.column_end - args.column_begin + width - 1) / width;
      totals = scratch.template take<Scalar>(rows * panels * width);
      panel = scratch.template take<Scalar>(depth_block * width);
      left_copy = scratch.template take<Scalar>(depth_block * padded<S>(rows));
    }
  };

  HEADWAY_INLINE static std::int64_t smaller(std::int64_t a, std::int64_t b) { return a < b ? a : b; }

  template <class ListOfRows>
  HEADWAY_INLINE static auto* row_of(const ListOfRows& rows, std::int64_t r) {
    using Element = std::conditional_t<std::is_same_v<ListOfRows, ItemRows>, const In, In>;
    auto* first = static_cast<Element*>(rows.data);
    return r < rows.per_item ? first + r * rows.row_stride
                             : first + r / rows.per_item * rows.item_stride + r % rows.per_item * rows.row_stride;
  }

  // Whether rows first .. first + count are equally far apart.
  HEADWAY_INLINE static bool one_item(const ItemRows& rows, std::int64_t first, std::int64_t count) {
    return first + count <= rows.per_item || first % rows.per_item + count <= rows.per_item;
  }

  // ---- left ----

  // The scalars of depth k .. k + steps for this task's rows, in the compute type: [rows][steps], or [steps][rows] when
  // transposed. In place where that is how they lie.
  HEADWAY_INLINE Rows<Scalar> left_block(std::int64_t k, std::int64_t steps) {
    const bool transposed = args_.left_transposed;
    const std::int64_t first = transposed ? k : args_.row_begin;
    const std::int64_t count = transposed ? steps : rows_;
    const std::int64_t column = transposed ? args_.row_begin : k;
    if (steps == 0) {
      return {at_.left_copy, 0};
    }
    const bool skips = args_.skip_zero_rows && right_has_zero_row(k, steps);
    if constexpr (std::is_same_v<In, Scalar>) {
      if (args_.left.column_stride == 1 && one_item(args_.left, first, count) && !skips) {
        return {row_of(args_.left, first) + column, args_.left.row_stride};
      }
    }
    return copied_left(first, count, column, transposed ? rows_ : steps, skips);
  }

  HEADWAY_NOINLINE Rows<Scalar> copied_left(std::int64_t first, std::int64_t count, std::int64_t column,
                                            std::int64_t columns, bool skips) {
    const std::int64_t ld = args_.left_transposed ? padded<S>(rows_) : depth_block;
    for (std::int64_t r = 0; r < count; ++r) {
      const In* row = row_of(args_.left, first + r);
      const bool skipped = skips && right_row_is_zero(first + r);
      for (std::int64_t c = 0; c < columns; c += lanes) {
        const int some = skipped ? 0 : at_most(columns - c, lanes);
        S::store(at_.left_copy + r * ld + c, load_row<S>(row, args_.left.column_stride, column + c, some));
      }
    }
    return {at_.left_copy, ld};
  }

  // Most rows answer with their first vector.
  HEADWAY_INLINE bool right_row_is_zero(std::int64_t r) const {
    const In* row = row_of(args_.right, r);
    for (std::int64_t c = 0; c < args_.columns; c += lanes) {
      const Vector x = load_row<S>(row, args_.right.column_stride, c, at_most(args_.columns - c, lanes));
      if (S::any(S::not_less_equal(S::abs(x), S::zero()))) {
        return false;
      }
    }
    return true;
  }

  HEADWAY_NOINLINE bool right_has_zero_row(std::int64_t k, std::int64_t steps) const {
    for (std::int64_t t = 0; t < steps; ++t) {
      if (right_row_is_zero(k + t)) {
        return true;
      }
    }
    return false;
  }

  // ---- left right ----

  template <Scalars layout>
  HEADWAY_INLINE void run_block(const Rows<Scalar>& left) {
    const auto [k, steps, column, columns] = block_;
    const int vectors = (columns + lanes - 1) / lanes;
    const Totals<S> totals{totals_, k == 0, strip_done, this};
    const bool in_place = rows_ <= in_place_rows && args_.right.column_stride == 1 && one_item(args_.right, k, steps);
    if (in_place && steps > 0) {
      fetch_.rows = 0;
      const PanelInPlace<S, In> panel{row_of(args_.right, k) + column, args_.right.row_stride,
                                      columns - (vectors - 1) * lanes};
      add_panel<S, layout>(panel, vectors, left.data, left.ld, rows_, steps, totals);
    } else {
      pack_right();
      fetch_ = next_fetch();
      add_panel<S, layout>(PackedPanel<S>{at_.panel}, vectors, left.data, left.ld, rows_, steps, totals);
    }
  }

  static void strip_done(void* gemm, std::int64_t row, std::int64_t rows) {
    auto& self = *static_cast<Gemm*>(gemm);
    self.fetch_some();
    if (self.last_) {
      self.store_rows(row, rows);
    }
  }

  // ---- right ----

  // Whether a block is packed along the rows of `right`, not along its columns.
  HEADWAY_INLINE bool packs_rows() const {
    return args_.right.column_stride == 1 || !one_item(args_.right, block_.k, block_.steps);
  }

  // panel[t][c] = right(k + t, column + c); the last vector is filled up with zeros.
  HEADWAY_NOINLINE void pack_right() {
    const auto [k, steps, column, columns] = block_;
    const ItemRows& right = args_.right;
    if (packs_rows()) {
      for (std::int64_t t = 0; t < steps; ++t) {
        const In* row = row_of(right, k + t);
        Scalar* to = at_.panel + t * width;
        if (columns == width && right.column_stride == 1) {
          HEADWAY_UNROLL
          for (int c = 0; c < width; c += lanes) {
            S::store(to + c, S::load_first(row + column + c, lanes));
          }
          continue;
        }
        for (int c = 0; c < columns; c += lanes) {
          S::store(to + c, load_row<S>(row, right.column_stride, column + c, at_most(columns - c, lanes)));
        }
      }
      return;
    }
    const Matrix columns_as_rows{row_of(right, k), right.column_stride, right.row_stride};
    for (int c = 0; c < columns; c += lanes) {
      pack_transposed<S, In>(columns_as_rows, column + c, at_most(columns - c, lanes), steps, Scalar{1}, at_.panel + c,
                             width);
    }
  }

  // What pack_right will read next, cut into as many parts as there are strips.
  HEADWAY_INLINE Fetch next_fetch() const {
    auto [k, steps, column, columns] = block_;
    column += width;
    if (column >= args_.column_end) {
      column = args_.column_begin;
      k += steps;
    }
    const ItemRows& right = args_.right;
    steps = smaller(depth_block, args_.depth - k);
    columns = at_most(args_.column_end - column, width);
    if (steps == 0 || !one_item(right, k, steps) || (right.column_stride != 1 && right.row_stride != 1)) {
      return {};
    }
    const bool along_rows = right.column_stride == 1;
    const std::int64_t size = sizeof(In);
    const std::int64_t rows = along_rows ? steps : columns;
    const std::int64_t strips = rows_ / S::tile_scalars + 1;
    return {reinterpret_cast<const char*>(row_of(right, k) + column * right.column_stride),
            (along_rows ? right.row_stride : right.column_stride) * size, (along_rows ? columns : steps) * size, rows,
            (rows + strips - 1) / strips};
  }

  HEADWAY_INLINE void fetch_some() {
    const std::int64_t count = smaller(fetch_.rows, fetch_.rows_per_strip);
    for (std::int64_t r = 0; r < count; ++r, fetch_.at += fetch_.stride) {
      for (std::int64_t b = 0; b < fetch_.bytes; b += 64) {
        __builtin_prefetch(fetch_.at + b, 0, 2);
      }
    }
    fetch_.rows -= count;
  }

  // ---- out ----

  HEADWAY_INLINE void store_rows(std::int64_t row, std::int64_t rows) const {
    const auto [k, steps, column, columns] = block_;
    for (std::int64_t r = row; r < row + rows; ++r) {
      In* to = row_of(args_.out, args_.row_begin + r);
      const Scalar* totals = totals_ + r * width;
      for (int c = 0; c < columns; c += lanes) {
        const int some = at_most(columns - c, lanes);
        Vector sum = S::load(totals + c);
        if (args_.bias != nullptr) {
          sum = sum + load_row<S>(static_cast<const In*>(args_.bias), args_.bias_stride, column + c, some);
        }
        store_row<S>(to, args_.out.column_stride, column + c, some, sum);
      }
    }
  }

  const GemmArgs args_;
  const std::int64_t rows_;
  const Layout at_;
  Block block_{};
  Scalar* totals_ = nullptr;  // of the block's columns
  bool last_ = false;         // whether the block ends the sums
  Fetch fetch_{};
};

}  // namespace
}  // namespace headway::cpu
