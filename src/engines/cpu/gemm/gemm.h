// The matrix product: out = left right + bias.
//
// A task makes a block of rows and columns of `out`. It walks panels of columns (64 floats with AVX-512) of the packed
// `right` and, in each, 4 rows at a time: 4 vectors of columns and 4 broadcasts of `left`, read in place, for 16 FMAs a
// step. A step takes 256 bytes from the second cache and 16 bytes of `left` against 16 cycles of one FMA unit: the FMA
// units bound it. Sums go from the registers into `out`.
//
// What moves besides: packing reads and writes `right` once per call, or once per task where the task packs its own,
// which costs 1 / rows of the FMAs' own loads. `left` is copied only where broadcasts cannot use it as it lies: other
// types, other strides, and all that is transposed, whose rows lie too far apart for the cache.
//
// An element's bits depend on its own row of `left` and its own column of `right` alone, whatever the tiles, tasks and
// strides: products are summed in chains of gemm_chain steps from the first one on, and the chains in their order.
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
  // Depth is walked in chunks, multiples of a chain: what a task copies stays in the second cache.
  static constexpr std::int64_t long_chunk = 1024, short_chunk = 256;
  // So few rows read a panel where it lies: packing would cost more, and converting it for each strip not yet.
  static constexpr std::int64_t in_place_rows = std::is_same_v<In, Scalar> ? 256 : 128;

  // Scratch of a task, in Scalars.
  static std::int64_t scratch_size(const GemmArgs& args) { return Layout(args, nullptr).scratch.used; }

  Gemm(const GemmArgs& args, Scalar* scratch) : args_(args), rows_(args.row_end - args.row_begin), at_(args, scratch) {}

  HEADWAY_NOINLINE void run() {
    read_bias();
    read_totals();
    chunk_.k = args_.depth_begin;
    do {
      chunk_.steps = smaller(at_.chunk, args_.depth_end - chunk_.k);
      chunk_.last = chunk_.k + chunk_.steps == args_.depth_end;
      chunk_.left = left_chunk();
      if (args_.left_transposed) {
        run_chunk<Scalars::along>();
      } else {
        run_chunk<Scalars::across>();
      }
      chunk_.k += chunk_.steps;
    } while (!chunk_.last);
  }

  // The steps k_begin .. k_end of what GemmArgs::packed holds.
  static void pack_part(const GemmArgs& args, std::int64_t k_begin, std::int64_t k_end, Scalar* packed) {
    pack(args, k_begin, k_end, packed + (k_begin - args.depth_begin) * width,
         (args.depth_end - args.depth_begin) * width);
  }

 private:
  // packed[panel][k][:] for depth k_begin .. k_end of this task's columns, panels panel_size Scalars apart. The last
  // vector of columns is filled up with zeros.
  HEADWAY_NOINLINE static void pack(const GemmArgs& args, std::int64_t k_begin, std::int64_t k_end, Scalar* packed,
                                    std::int64_t panel_size) {
    const ItemRows<const void>& right = args.right;
    const std::int64_t steps = k_end - k_begin;
    if (steps == 0) {
      return;
    }
    if (right.column_stride == 1 || !one_item(right, k_begin, steps)) {
      for (std::int64_t k = k_begin; k < k_end; ++k, packed += width) {
        pack_row(row_of(right, k), right.column_stride, args.column_begin, args.column_end, packed, panel_size);
      }
      return;
    }
    const Matrix columns_as_rows{row_of(right, k_begin), right.column_stride, right.row_stride};
    for (std::int64_t column = args.column_begin; column < args.column_end; column += width, packed += panel_size) {
      const int columns = at_most(args.column_end - column, width);
      for (int c = 0; c < columns; c += lanes) {
        pack_transposed<S, In>(columns_as_rows, column + c, at_most(columns - c, lanes), steps, Scalar{1}, packed + c,
                               width);
      }
    }
  }

  static constexpr std::int64_t row_copy_ld = short_chunk + 16;        // not a power of two
  static constexpr std::int64_t strip_stride = (short_chunk + 4) * 4;  // neither

  // Which part of depth is at hand.
  struct Chunk {
    std::int64_t k = 0, steps = 0;
    bool last = false;
    Rows<Scalar> left{};
  };

  struct Layout {
    Scratch<Scalar> scratch;
    std::int64_t chunk;
    Scalar *totals, *right_copy, *left_copy, *row_copy, *bias;

    Layout(const GemmArgs& args, Scalar* base) : scratch{base} {
      const std::int64_t rows = args.row_end - args.row_begin;
      const std::int64_t panels = (args.column_end - args.column_begin + width - 1) / width;
      const bool copies_left = !left_is_readable(args);
      chunk = args.packed != nullptr && !copies_left ? long_chunk : short_chunk;
      totals = scratch.template take<Scalar>(rows * panels * width);
      right_copy = scratch.template take<Scalar>(args.packed == nullptr ? panels * short_chunk * width : 0);
      left_copy = scratch.template take<Scalar>(copies_left ? copy_size(args, rows) : 0);
      row_copy = scratch.template take<Scalar>(copies_left && args.left_transposed ? 4 * padded<S>(rows) : 0);
      bias = scratch.template take<Scalar>(args.bias == nullptr ? 0 : panels * width);
    }
    static std::int64_t copy_size(const GemmArgs& args, std::int64_t rows) {
      return args.left_transposed ? (rows + 3) / 4 * strip_stride : rows * row_copy_ld;
    }
  };

  HEADWAY_INLINE static std::int64_t smaller(std::int64_t a, std::int64_t b) { return a < b ? a : b; }

  template <class Void>
  HEADWAY_INLINE static auto* row_of(const ItemRows<Void>& rows, std::int64_t r) {
    auto* first = static_cast<std::conditional_t<std::is_const_v<Void>, const In, In>*>(rows.data);
    return r < rows.per_item ? first + r * rows.row_stride
                             : first + r / rows.per_item * rows.item_stride + r % rows.per_item * rows.row_stride;
  }

  // Whether rows first .. first + count are equally far apart.
  template <class Void>
  HEADWAY_INLINE static bool one_item(const ItemRows<Void>& rows, std::int64_t first, std::int64_t count) {
    return first + count <= rows.per_item || first % rows.per_item + count <= rows.per_item;
  }

  // ---- left ----

  // Whether broadcasts can read the task's part of left where it lies.
  static bool left_is_readable(const GemmArgs& args) {
    if (!std::is_same_v<In, Scalar> || args.skip_zero_rows) {
      return false;
    }
    const std::int64_t rows = args.row_end - args.row_begin;
    return args.left_transposed ? rows == 1 && one_item(args.left, args.depth_begin, args.depth_end - args.depth_begin)
                                : args.left.column_stride == 1 && one_item(args.left, args.row_begin, rows);
  }

  // The chunk's scalars of this task's rows, in the compute type: [rows][steps], or by strips when transposed.
  HEADWAY_NOINLINE Rows<Scalar> left_chunk() {
    const std::int64_t first = args_.left_transposed ? chunk_.k : args_.row_begin;
    const std::int64_t column = args_.left_transposed ? args_.row_begin : chunk_.k;
    if (chunk_.steps == 0) {
      return {at_.totals, 0};
    }
    if constexpr (std::is_same_v<In, Scalar>) {
      if (left_is_readable(args_)) {
        return {row_of(args_.left, first) + column * args_.left.column_stride, args_.left.row_stride};
      }
    }
    if (args_.left_transposed) {
      copy_strips();
      return {at_.left_copy, 4};
    }
    for (std::int64_t r = 0; r < rows_; ++r) {
      copy_row(row_of(args_.left, first + r), args_.left.column_stride, column, chunk_.steps,
               at_.left_copy + r * row_copy_ld);
    }
    return {at_.left_copy, row_copy_ld};
  }

  // Rows of `left` lie a long way apart and each step takes 4 numbers of one: as [strip of 4 columns][step][4] they
  // share cache lines and pages. 4 steps fill a line of floats at a time.
  HEADWAY_INLINE void copy_strips() {
    for (std::int64_t t = 0; t < chunk_.steps; t += 4) {
      const int steps = at_most(chunk_.steps - t, 4);
      const Scalar* from[4];
      for (int i = 0; i < 4; ++i) {
        from[i] = i < steps ? left_row(chunk_.k + t + i, at_.row_copy + i * padded<S>(rows_)) : from[0];
      }
      Scalar* to = at_.left_copy + t * 4;
      std::int64_t c = 0;
      for (; c + 4 <= rows_; c += 4, to += strip_stride) {
        HEADWAY_UNROLL
        for (int i = 0; i < 4; ++i) {
          std::memcpy(to + i * 4, from[i] + c, 4 * sizeof(Scalar));
        }
      }
      for (int i = 0; i < 4; ++i) {
        for (std::int64_t last = c; last < rows_; ++last) {
          to[i * 4 + last - c] = from[i][last];
        }
      }
    }
  }

  // This task's part of row r of a transposed left, where it lies or copied.
  HEADWAY_INLINE const Scalar* left_row(std::int64_t r, Scalar* copy) const {
    const In* row = row_of(args_.left, r);
    if (args_.skip_zero_rows && right_row_is_zero(r)) {
      for (std::int64_t c = 0; c < rows_; c += lanes) {
        S::store(copy + c, S::zero());
      }
      return copy;
    }
    if constexpr (std::is_same_v<In, Scalar>) {
      if (args_.left.column_stride == 1) {
        return row + args_.row_begin;
      }
    }
    copy_row(row, args_.left.column_stride, args_.row_begin, rows_, copy);
    return copy;
  }

  // to[c] = row[(column + c) * stride], the last vector filled up with zeros.
  HEADWAY_INLINE static void copy_row(const In* row, std::int64_t stride, std::int64_t column, std::int64_t columns,
                                      Scalar* to) {
    std::int64_t c = 0;
    for (; stride == 1 && c + lanes <= columns; c += lanes) {
      S::store(to + c, S::load_first(row + column + c, lanes));
    }
    for (; c < columns; c += lanes) {
      S::store(to + c, load_row<S>(row, stride, column + c, at_most(columns - c, lanes)));
    }
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

  // ---- right ----

  HEADWAY_INLINE static void pack_row(const In* row, std::int64_t stride, std::int64_t begin, std::int64_t end,
                                      Scalar* packed, std::int64_t panel_size) {
    for (std::int64_t column = begin; column < end; column += width, packed += panel_size) {
      if (stride == 1 && column + width <= end) {
        HEADWAY_UNROLL
        for (int c = 0; c < width; c += lanes) {
          S::store(packed + c, S::load_first(row + column + c, lanes));
        }
      } else {
        copy_row(row, stride, column, smaller(end - column, width), packed);
      }
    }
  }

  HEADWAY_INLINE bool reads_right_in_place() const {
    return args_.packed == nullptr && rows_ <= (args_.left_transposed ? 1 : in_place_rows) && chunk_.steps > 0 &&
           args_.right.column_stride == 1 && one_item(args_.right, chunk_.k, chunk_.steps);
  }

  // ---- left right ----

  template <Scalars layout>
  HEADWAY_INLINE void run_chunk() {
    const bool in_place = reads_right_in_place();
    const Scalar* packed = at_.right_copy;
    std::int64_t panel_size = short_chunk * width;
    if (args_.packed != nullptr) {
      panel_size = (args_.depth_end - args_.depth_begin) * width;
      packed = static_cast<const Scalar*>(args_.packed) +
               (args_.column_begin - args_.packed_begin) / width * panel_size + (chunk_.k - args_.depth_begin) * width;
    } else if (!in_place) {
      pack(args_, chunk_.k, chunk_.k + chunk_.steps, at_.right_copy, panel_size);
    }
    for (std::int64_t c = args_.column_begin, p = 0; c < args_.column_end; c += width, ++p) {
      const int columns = at_most(args_.column_end - c, width);
      const int vectors = (columns + lanes - 1) / lanes;
      const bool direct = chunk_.last && stores_directly(columns);
      const RowSums<S> sums = row_sums(c, p, direct);
      if (in_place) {
        const PanelInPlace<S, In> panel{row_of(args_.right, chunk_.k) + c, args_.right.row_stride,
                                        columns - (vectors - 1) * lanes};
        sum_panel<S, layout, true>(panel, vectors, sums);
      } else {
        sum_panel<S, layout, false>(PackedPanel<S>{packed + p * panel_size}, vectors, sums);
      }
      if (chunk_.last && !direct) {
        store_out(c, columns, sums.out);
      }
    }
  }

  // ---- out ----

  // Whether the tiles' whole vectors can go where the user wants them.
  HEADWAY_INLINE bool stores_directly(int columns) const {
    return std::is_same_v<In, Scalar> && columns % lanes == 0 && args_.out.column_stride == 1 &&
           one_item(args_.out, args_.row_begin, rows_);
  }

  HEADWAY_INLINE RowSums<S> row_sums(std::int64_t column, std::int64_t panel, bool direct) const {
    Scalar* totals = at_.totals + panel * rows_ * width;
    RowSums<S> sums{};
    sums.scalars = chunk_.left.data;
    sums.ld = chunk_.left.ld;
    sums.strip_stride = strip_stride;
    sums.rows = rows_;
    sums.steps = chunk_.steps;
    sums.start = chunk_.k == 0 ? nullptr : totals;
    sums.out = totals;
    sums.out_ld = width;
    sums.bias = chunk_.k + chunk_.steps == args_.depth && args_.bias != nullptr ? at_.bias + panel * width : nullptr;
    if constexpr (std::is_same_v<In, Scalar>) {
      if (direct) {
        sums.out = row_of(args_.out, args_.row_begin) + column;
        sums.out_ld = args_.out.row_stride;
      }
    }
    return sums;
  }

  HEADWAY_NOINLINE void store_out(std::int64_t column, int columns, const Scalar* totals) const {
    for (std::int64_t r = 0; r < rows_; ++r, totals += width) {
      In* to = row_of(args_.out, args_.row_begin + r);
      for (int c = 0; c < columns; c += lanes) {
        store_row<S>(to, args_.out.column_stride, column + c, at_most(columns - c, lanes), S::load(totals + c));
      }
    }
  }

  // What earlier parts of depth have left in `out`.
  HEADWAY_NOINLINE void read_totals() {
    if (args_.depth_begin == 0) {
      return;
    }
    Scalar* totals = at_.totals;
    for (std::int64_t c = args_.column_begin; c < args_.column_end; c += width) {
      for (std::int64_t r = 0; r < rows_; ++r, totals += width) {
        copy_row(row_of(args_.out, args_.row_begin + r), args_.out.column_stride, c,
                 smaller(args_.column_end - c, width), totals);
      }
    }
  }

  HEADWAY_INLINE void read_bias() {
    if (args_.bias != nullptr) {
      copy_row(static_cast<const In*>(args_.bias), args_.bias_stride, args_.column_begin,
               args_.column_end - args_.column_begin, at_.bias);
    }
  }

  const GemmArgs args_;
  const std::int64_t rows_;
  const Layout at_;
  Chunk chunk_;
};

}  // namespace
}  // namespace headway::cpu
