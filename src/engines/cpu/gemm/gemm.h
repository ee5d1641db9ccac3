// The matrix product: out = left right + bias.
//
// A task makes a block of rows and columns of `out`. It walks panels of columns (64 floats with AVX-512) of `right`
// and, in each, 4 rows at a time: 4 vectors of columns and 4 broadcasts of `left` for 16 FMAs a step. A step takes 256
// bytes of the panel from the second cache and 16 bytes of `left` against 16 cycles of one FMA unit: the FMA units
// bound it. Sums go from the registers into `out`. With bf16 dot products a step does two numbers of depth.
//
// What moves besides: each task reads its columns of `right` once from where they lie, the next panel fetched while one
// is multiplied, and the first 4 rows pack a panel as they use it, so that the others find it in the second cache.
// `left` comes once per panel, 1 byte a cycle. It is copied only where broadcasts cannot use it as it lies: other
// types, other strides, and all that is transposed, whose rows lie too far apart for the cache; once for all columns of
// a task.
//
// An element's bits depend on its own row of `left` and its own column of `right` alone, whatever the tiles, tasks and
// strides: products are summed in chains of gemm_chain steps from the first one on, and the chains in their order.
#pragma once

#include <cstdint>
#include <type_traits>

#include "engines/cpu/gemm/args.h"
#include "engines/cpu/gemm/operands.h"
#include "engines/cpu/gemm/tiles.h"
#include "engines/cpu/kernel/pack.h"
#include "engines/cpu/kernel/ranges.h"
#include "engines/cpu/kernel/scratch.h"
#include "engines/cpu/simd/common.h"

namespace headway::cpu {
namespace {

template <class S, class In>
class Gemm {
 public:
  using Scalar = typename S::Scalar;
  using Vector = typename S::Vector;
  using Operand = typename Operands<S>::Scalar;
  using Packing = GemmOperands<S, In>;
  static constexpr int lanes = S::lanes;
  static constexpr int width = S::lanes * S::panel_vectors;
  static constexpr int fold = Operands<S>::fold;

  static std::int64_t scratch_bytes(const GemmArgs& task) { return Layout(task, nullptr).bytes; }

  // Rows begin .. end of a task. How its scratch is laid out, and whether `left` is copied, is the whole task's affair:
  // some of its rows may lie as broadcasts need them where all of them do not.
  Gemm(const GemmArgs& task, std::int64_t begin, std::int64_t end, void* scratch)
      : args_(task), row_begin_(begin), rows_(end - begin), at_(task, scratch) {}

  HEADWAY_NOINLINE void run() {
    read_bias();
    do {
      chunk_.steps = smaller(at_.chunk, folded<S>(args_.depth) - chunk_.first);
      chunk_.last = chunk_.first + chunk_.steps == folded<S>(args_.depth);
      chunk_.left = left_chunk();
      if (args_.left_transposed) {
        run_chunk<Scalars::along>();
      } else {
        run_chunk<Scalars::across>();
      }
      chunk_.first += chunk_.steps;
    } while (!chunk_.last);
  }

  // found[r]: whether row r of `right` is 0 everywhere.
  HEADWAY_NOINLINE static void find_zero_rows(const GemmArgs& args, std::int64_t begin, std::int64_t end,
                                              std::uint8_t* found) {
    for (std::int64_t r = begin; r < end; ++r) {
      found[r] = is_zero(row_of(args.right, r), args.right.column_stride, args.columns);
    }
  }

 private:
  // Depth is walked in chunks, multiples of a chain: a panel of one, and what a task copies of `left`, stay in the
  // second cache.
  static constexpr std::int64_t long_chunk = 1024, short_chunk = 256;

  // So few rows read a panel where it lies each time.
  static constexpr std::int64_t rows_in_place = fold > 1 ? 8 : 32;

  // Which part of depth is at hand, counted in steps.
  struct Chunk {
    std::int64_t first = 0, steps = 0;
    bool last = false;
    OperandRows<S> left{};
  };

  struct Layout {
    std::int64_t bytes, chunk, row_ld, strip_stride;
    bool copies_left, one_chunk;
    Scalar *totals, *bias;
    Operand *right_copy, *left_copy, *row_copy;

    Layout(const GemmArgs& args, void* memory) : copies_left(!left_is_readable(args)) {
      const std::int64_t rows = args.row_end - args.row_begin;
      const std::int64_t panels = (args.column_end - args.column_begin + width - 1) / width;
      const std::int64_t steps = folded<S>(args.depth);
      chunk = smaller(copies_left ? short_chunk : long_chunk, steps);
      one_chunk = chunk == steps;
      row_ld = (chunk + lanes - 1) / lanes * lanes + 16;  // not a power of two
      strip_stride = (chunk + 4) * 4;                     // neither
      Scratch<char> scratch{static_cast<char*>(memory)};
      totals = scratch.take<Scalar>(rows * (one_chunk ? 1 : panels) * width);
      bias = scratch.take<Scalar>(args.bias == nullptr ? 0 : panels * width);
      right_copy = scratch.take<Operand>(chunk * width);
      const std::int64_t copied = args.left_transposed ? (rows + 3) / 4 * strip_stride : rows * row_ld;
      left_copy = scratch.take<Operand>(copies_left ? copied : 0);
      row_copy = scratch.take<Operand>(copies_left && args.left_transposed ? 4 * padded<S>(rows) : 0);
      bytes = scratch.used;
    }
  };

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

  HEADWAY_INLINE std::int64_t chunk_begin() const { return chunk_.first * fold; }
  HEADWAY_INLINE std::int64_t chunk_depth() const { return smaller(chunk_.steps * fold, args_.depth - chunk_begin()); }

  HEADWAY_INLINE static bool is_zero(const In* row, std::int64_t stride, std::int64_t columns) {
    for (std::int64_t c = 0; c < columns; c += lanes) {  // most rows answer with their first vector
      const Vector x = load_row<S>(row, stride, c, at_most(columns - c, lanes));
      if (S::any(S::not_less_equal(S::abs(x), S::zero()))) {
        return false;
      }
    }
    return true;
  }

  // ---- left ----

  // Whether broadcasts can read the task's part of left where it lies.
  static bool left_is_readable(const GemmArgs& args) {
    const std::int64_t rows = args.row_end - args.row_begin;
    if (fold == 1 && !std::is_same_v<In, Scalar>) {
      return false;
    }
    if (args.left_transposed) {
      return fold == 1 && args.skipped == nullptr && rows == 1 && one_item(args.left, 0, args.depth);
    }
    return args.left.column_stride == 1 && one_item(args.left, args.row_begin, rows) &&
           args.left.row_stride % fold == 0 && args.depth % fold == 0;
  }

  // The chunk's operands of this task's rows: [rows][steps], or by strips when transposed.
  HEADWAY_NOINLINE OperandRows<S> left_chunk() {
    const std::int64_t depth = chunk_depth();
    if (depth == 0) {
      return {at_.right_copy, 0};
    }
    if (!at_.copies_left) {
      const In* first = args_.left_transposed
                            ? row_of(args_.left, chunk_begin()) + row_begin_ * args_.left.column_stride
                            : row_of(args_.left, row_begin_) + chunk_begin();
      return {reinterpret_cast<const Operand*>(first), args_.left.row_stride / fold};
    }
    if (args_.left_transposed) {
      copy_strips();
      return {at_.left_copy, 4};
    }
    for (std::int64_t r = 0; r < rows_; ++r) {
      const In* row = row_of(args_.left, row_begin_ + r);
      Operand* to = at_.left_copy + r * at_.row_ld;
      for (std::int64_t k = 0; k < depth; k += lanes * fold) {
        const int count = at_most(depth - k, lanes * fold);
        In buffer[lanes * fold];
        const In* numbers = neighbours(row, args_.left.column_stride, chunk_begin() + k, count, buffer);
        Packing::store(to + k / fold, Packing::along_row(numbers, count));
      }
    }
    return {at_.left_copy, at_.row_ld};
  }

  // Rows of `left` lie a long way apart and each step takes 4 operands of one: as [strip of 4 columns][step][4] they
  // share cache lines and pages. 4 steps fill a line of floats at a time.
  HEADWAY_INLINE void copy_strips() {
    for (std::int64_t t = 0; t < chunk_.steps; t += 4) {
      const int steps = at_most(chunk_.steps - t, 4);
      const Operand* from[4];
      for (int i = 0; i < 4; ++i) {
        from[i] = i < steps ? left_row((chunk_.first + t + i) * fold, at_.row_copy + i * padded<S>(rows_)) : from[0];
      }
      Operand* to = at_.left_copy + t * 4;
      std::int64_t c = 0;
      for (; c + 4 <= rows_; c += 4, to += at_.strip_stride) {
        HEADWAY_UNROLL
        for (int i = 0; i < 4; ++i) {
          std::memcpy(to + i * 4, from[i] + c, 4 * sizeof(Operand));
        }
      }
      for (int i = 0; i < 4; ++i) {
        for (std::int64_t last = c; last < rows_; ++last) {
          to[i * 4 + last - c] = from[i][last];
        }
      }
    }
  }

  // This task's part of the operands that begin with row k of a transposed left, where they lie or copied.
  HEADWAY_INLINE const Operand* left_row(std::int64_t k, Operand* copy) const {
    const ItemRows<const void>& left = args_.left;
    if constexpr (fold == 1 && std::is_same_v<In, Scalar>) {
      if (left.column_stride == 1 && !is_skipped(k)) {
        return row_of(left, k) + row_begin_;
      }
    }
    for (std::int64_t c = 0; c < rows_; c += lanes) {
      const int count = at_most(rows_ - c, lanes);
      In buffers[2][lanes] = {};
      const auto columns = [&](std::int64_t row, In* buffer) HEADWAY_LAMBDA -> const In* {
        return is_skipped(row) ? buffer
                               : neighbours(row_of(left, row), left.column_stride, row_begin_ + c, count, buffer);
      };
      const DepthRows<In> rows{columns(k, buffers[0]),
                               fold > 1 && k + 1 < args_.depth ? columns(k + 1, buffers[1]) : nullptr};
      Packing::store(copy + c, Packing::from_rows(rows, count));
    }
    return copy;
  }

  HEADWAY_INLINE bool is_skipped(std::int64_t k) const { return args_.skipped != nullptr && args_.skipped[k] != 0; }

  // ---- right ----

  HEADWAY_INLINE bool right_in_place() const {
    return args_.right.column_stride == 1 && chunk_.steps > 0 && one_item(args_.right, chunk_begin(), chunk_depth());
  }

  // right_copy[step][:] for the chunk and a panel's columns. The last vector of columns is filled up with zeros.
  HEADWAY_NOINLINE void pack(std::int64_t column, int columns) {
    const ItemRows<const void>& right = args_.right;
    const std::int64_t begin = chunk_begin(), depth = chunk_depth();
    const bool by_columns = right.column_stride != 1 && depth > 0 && one_item(right, begin, depth);
    for (int c = 0; c < columns; c += lanes) {
      const int count = at_most(columns - c, lanes);
      by_columns
          ? pack_columns(row_of(right, begin) + (column + c) * right.column_stride, count, depth, at_.right_copy + c)
          : pack_rows(column + c, count, at_.right_copy + c);
    }
  }

  HEADWAY_INLINE void pack_rows(std::int64_t column, int count, Operand* to) {
    const ItemRows<const void>& right = args_.right;
    for (std::int64_t t = 0; t < chunk_.steps; ++t, to += width) {
      const std::int64_t k = chunk_begin() + t * fold;
      In buffers[2][lanes];
      const In* first = neighbours(row_of(right, k), right.column_stride, column, count, buffers[0]);
      const In* second = fold > 1 && k + 1 < args_.depth
                             ? neighbours(row_of(right, k + 1), right.column_stride, column, count, buffers[1])
                             : nullptr;
      Packing::store(to, Packing::from_rows({first, second}, count));
    }
  }

  // The columns are rows of a transposed matrix: whole vectors along the depth, turned around.
  HEADWAY_INLINE void pack_columns(const In* first, int columns, std::int64_t depth, Operand* to) {
    const std::int64_t stride = args_.right.column_stride;
    for (std::int64_t k = 0; k < depth; k += lanes * fold) {
      const int count = at_most(depth - k, lanes * fold);
      typename Operands<S>::Vector block[lanes];
      HEADWAY_UNROLL
      for (int c = 0; c < lanes; ++c) {
        In buffer[lanes * fold];
        block[c] = Packing::along_row(
            neighbours(first + (c < columns ? c : 0) * stride, args_.right.row_stride, k, count, buffer),
            c < columns ? count : 0);
      }
      Packing::transpose(block);
      HEADWAY_UNROLL
      for (int t = 0; t < lanes; ++t) {
        if (t * fold < count) {
          Packing::store(to + (k / fold + t) * width, block[t]);
        }
      }
    }
  }

  // ---- left right ----

  template <Scalars layout>
  HEADWAY_INLINE void run_chunk() {
    const bool in_place = right_in_place();
    for (std::int64_t c = args_.column_begin, p = 0; c < args_.column_end; c += width, ++p) {
      const int columns = at_most(args_.column_end - c, width);
      const bool direct = chunk_.last && stores_directly(columns);
      GemmAhead ahead = ahead_of(p);
      RowSums<S> sums = row_sums(c, p, direct);
      sums.ahead = &ahead;
      if (!in_place) {
        pack(c, columns);
      }
      with_vectors<S::panel_vectors>((columns + lanes - 1) / lanes, [&]<int NV>(Strip<NV>) HEADWAY_LAMBDA {
        if (in_place) {
          sum_rows<S, NV, layout>(
              PanelInPlace<S, In>{row_of(args_.right, chunk_begin()) + c, args_.right.row_stride, chunk_depth(),
                                  columns - (NV - 1) * lanes, rows_ > rows_in_place ? at_.right_copy : nullptr},
              sums);
        } else {
          sum_rows<S, NV, layout>(PackedPanel<S>{at_.right_copy}, sums, 0);
        }
      });
      if (chunk_.last && !direct) {
        store_out(c, columns, sums.out);
      }
    }
  }

  // What to fetch while panel p is multiplied: the next one, and its share of what the next chunk copies of left.
  GemmAhead ahead_of(std::int64_t p) const {
    constexpr std::int64_t few_strips = 4;
    const std::int64_t strips = rows_ / 4;
    if (strips < few_strips) {
      return {};
    }
    const std::int64_t chains = strips * ((chunk_.steps + gemm_chain - 1) / gemm_chain);
    const std::int64_t panels = (args_.column_end - args_.column_begin + width - 1) / width;
    const std::int64_t next_begin = chunk_begin() + chunk_depth();
    const std::int64_t next_depth = smaller(at_.chunk * fold, args_.depth - next_begin);
    GemmAhead ahead;
    if (p + 1 < panels) {
      const std::int64_t column = args_.column_begin + (p + 1) * width;
      ahead.right = rows_ahead(args_.right, chunk_begin(), chunk_depth(), column,
                               smaller(args_.column_end - column, width), chains);
    } else if (!chunk_.last) {
      ahead.right = rows_ahead(args_.right, next_begin, next_depth, args_.column_begin, width, chains);
    }
    if (args_.left_transposed && !chunk_.last) {
      const std::int64_t begin = next_depth * p / panels, end = next_depth * (p + 1) / panels;
      ahead.left = rows_ahead(args_.left, next_begin + begin, end - begin, row_begin_, rows_, chains);
    }
    return ahead;
  }

  static AheadByChains rows_ahead(const ItemRows<const void>& matrix, std::int64_t row, std::int64_t rows,
                                  std::int64_t column, std::int64_t columns, std::int64_t chains) {
    if (matrix.column_stride != 1 || rows == 0 || !one_item(matrix, row, rows)) {
      return {};
    }
    constexpr auto element = static_cast<std::int64_t>(sizeof(In));
    return {{reinterpret_cast<const char*>(row_of(matrix, row) + column), matrix.row_stride * element,
             columns * element, rows},
            chains};
  }

  // ---- out ----

  // Whether the tiles' whole vectors can go where the user wants them.
  HEADWAY_INLINE bool stores_directly(int columns) const {
    return std::is_same_v<In, Scalar> && columns % lanes == 0 && args_.out.column_stride == 1 &&
           one_item(args_.out, row_begin_, rows_);
  }

  HEADWAY_INLINE RowSums<S> row_sums(std::int64_t column, std::int64_t panel, bool direct) const {
    Scalar* totals = at_.totals + (at_.one_chunk ? 0 : panel * rows_ * width);
    RowSums<S> sums{};
    sums.scalars = chunk_.left.data;
    sums.ld = chunk_.left.ld;
    sums.strip_stride = at_.strip_stride;
    sums.rows = rows_;
    sums.steps = chunk_.steps;
    sums.start = chunk_.first == 0 ? nullptr : totals;
    sums.out = totals;
    sums.out_ld = width;
    sums.bias = chunk_.last && args_.bias != nullptr ? at_.bias + panel * width : nullptr;
    if constexpr (std::is_same_v<In, Scalar>) {
      if (direct) {
        sums.out = row_of(args_.out, row_begin_) + column;
        sums.out_ld = args_.out.row_stride;
      }
    }
    return sums;
  }

  HEADWAY_NOINLINE void store_out(std::int64_t column, int columns, const Scalar* totals) const {
    for (std::int64_t r = 0; r < rows_; ++r, totals += width) {
      In* to = row_of(args_.out, row_begin_ + r);
      for (int c = 0; c < columns; c += lanes) {
        store_row<S>(to, args_.out.column_stride, column + c, at_most(columns - c, lanes), S::load(totals + c));
      }
    }
  }

  HEADWAY_INLINE void read_bias() {
    const std::int64_t columns = args_.bias == nullptr ? 0 : args_.column_end - args_.column_begin;
    for (std::int64_t c = 0; c < columns; c += lanes) {
      S::store(at_.bias + c, load_row<S>(static_cast<const In*>(args_.bias), args_.bias_stride, args_.column_begin + c,
                                         at_most(columns - c, lanes)));
    }
  }

  const GemmArgs args_;
  const std::int64_t row_begin_, rows_;
  const Layout at_;
  Chunk chunk_;
};

}  // namespace
}  // namespace headway::cpu
