// The matrix product by tiles: out = left right + bias, for rows that suit products of pairs (pairs.h).
//
// A task walks the depth in chunks. Of each it copies its rows of `left`, 256 KB or so for the second cache, and then,
// panel by panel, 32 columns of `right` as pairs along the depth, 32 or 64 KB that each block of 32 rows reads again.
// Sums of 32 x 32 stay in four tiles over the chunk. A product loads one tile, so tile loads and products bound it.
//
// An element's bits depend on its own row of `left` and its own column of `right` alone: its products are added 32 at a
// time, in the order of the depth, whatever the chunks.
#pragma once

#include <cstdint>

#include "engines/cpu/gemm/args.h"
#include "engines/cpu/gemm/gemm.h"
#include "engines/cpu/kernel/operands.h"
#include "engines/cpu/kernel/scratch.h"
#include "engines/cpu/kernel/tile_pack.h"
#include "engines/cpu/kernel/tiles.h"
#include "engines/cpu/simd/tiled_bf16.h"

namespace headway::cpu {
namespace {

template <class TileSet>
class Gemm<TiledBF16<TileSet>, bfloat16> {
  using S = TiledBF16<TileSet>;
  using Operand = Operands<S>;
  using Vector = typename Operand::Vector;
  using Element = typename Operand::Scalar;  // a pair

 public:
  static constexpr int width = S::lanes * S::panel_vectors;

  static std::int64_t scratch_bytes(const GemmArgs& task) { return Layout(task, nullptr).bytes; }

  Gemm(const GemmArgs& task, std::int64_t begin, std::int64_t end, void* scratch)
      : args_(task), row_begin_(begin), rows_(end - begin), at_(task, scratch) {}

  HEADWAY_NOINLINE void run() {
    read_bias();
    do {
      depth_ = smaller(at_.chunk, args_.depth - first_);
      steps_ = (depth_ + tile_steps - 1) / tile_steps;
      const bool last = first_ + depth_ == args_.depth;
      copy_left();
      for (std::int64_t c = args_.column_begin; c < args_.column_end; c += side) {
        pack_right(c);
        multiply_panel(c, last);
      }
      first_ += depth_;
    } while (first_ < args_.depth);
  }

 private:
  static constexpr int side = 2 * tile_side;  // of a block of sums
  static constexpr std::int64_t longest_chunk = 1024, usual_chunk = 512;

  struct Layout {
    std::int64_t bytes, chunk, left_ld, totals_ld;
    Element *left, *right;
    float *totals, *bias;

    Layout(const GemmArgs& args, void* memory)
        : chunk(args.depth <= longest_chunk ? args.depth : usual_chunk),
          left_ld(transposed_ld(chunk)),
          totals_ld(in_blocks(args.column_end - args.column_begin)) {
      const std::int64_t rows = in_blocks(args.row_end - args.row_begin);
      Scratch<char> scratch{static_cast<char*>(memory)};
      left = scratch.template take<Element>(rows * left_ld);
      right = scratch.template take<Element>(folded<S>(chunk) * side);
      totals = scratch.template take<float>(chunk < args.depth ? rows * totals_ld : side * side);
      bias = scratch.template take<float>(args.bias == nullptr ? 0 : totals_ld);
      bytes = scratch.used;
    }
  };

  static std::int64_t in_blocks(std::int64_t count) { return (count + side - 1) / side * side; }

  template <class Void>
  static auto* row_of(const ItemRows<Void>& rows, std::int64_t r) {
    auto* first = static_cast<std::conditional_t<std::is_const_v<Void>, const bfloat16, bfloat16>*>(rows.data);
    return first + r / rows.per_item * rows.item_stride + r % rows.per_item * rows.row_stride;
  }
  // Up to 32 neighbours of row r from column `at` on; zeros where the row counts as 0.
  static Vector part_of(const ItemRows<const void>& matrix, std::int64_t r, std::int64_t at, int count, bool counts) {
    return counts ? Packing<S, bfloat16>::row_part(row_of(matrix, r), matrix.column_stride, at, count)
                  : Operand::zero();
  }

  // ---- left ----

  // left[row][depth / 2] in whole blocks of rows and whole tiles of depth.
  HEADWAY_NOINLINE void copy_left() {
    for (std::int64_t r = 0; r < rows_; r += side) {
      for (std::int64_t k = 0; k < depth_; k += tile_steps) {
        args_.left_transposed ? transpose_left(r, k) : copy_left(r, k);
      }
    }
  }
  void copy_left(std::int64_t r, std::int64_t k) {
    const int count = at_most(depth_ - k, tile_steps);
    for (int i = 0; i < side; ++i) {
      Operand::store(at_.left + (r + i) * at_.left_ld + k / 2,
                     part_of(args_.left, row_begin_ + r + i, first_ + k, count, r + i < rows_));
    }
  }
  HEADWAY_INLINE void transpose_left(std::int64_t r, std::int64_t k) {
    const int count = at_most(rows_ - r, side);
    const auto part = [&](int i) HEADWAY_LAMBDA {
      const std::int64_t row = first_ + k + i;
      const bool counts = k + i < depth_ && (args_.skipped == nullptr || args_.skipped[row] == 0);
      return part_of(args_.left, row, row_begin_ + r, count, counts);
    };
    Vector front[tile_pairs], back[tile_pairs];
    for (int pair = 0; pair < tile_pairs; ++pair) {
      Operand::interleave(part(2 * pair), part(2 * pair + 1), front[pair], back[pair]);
    }
    Element* target = at_.left + r * at_.left_ld + k / 2;
    store_transposed<S>(front, target, at_.left_ld);
    store_transposed<S>(back, target + tile_side * at_.left_ld, at_.left_ld);
  }

  // ---- right ----

  // right[tile of columns][depth / 2][column] for 32 columns, zeros behind the last.
  HEADWAY_NOINLINE void pack_right(std::int64_t column) {
    const ItemRows<const void>& right = args_.right;
    const int count = at_most(args_.column_end - column, side);
    const bool by_columns = right.column_stride != 1 && right.row_stride == 1 && args_.depth <= right.per_item;
    Element* back = at_.right + steps_ * tile_pairs * tile_side;
    for (std::int64_t k = 0; k < depth_; k += tile_steps) {
      Element* target = at_.right + k / 2 * tile_side;
      if (by_columns) {
        pack_columns(column, count, k, target);
        pack_columns(column + tile_side, count - tile_side, k, back + k / 2 * tile_side);
        continue;
      }
      for (int pair = 0; pair < tile_pairs; ++pair) {
        const std::int64_t row = k + 2 * pair;
        Vector x, y;
        Operand::interleave(part_of(right, first_ + row, column, count, row < depth_),
                            part_of(right, first_ + row + 1, column, count, row + 1 < depth_), x, y);
        Operand::store(target + pair * tile_side, x);
        Operand::store(back + (target - at_.right) + pair * tile_side, y);
      }
    }
  }
  // The columns are rows of a transposed matrix.
  HEADWAY_INLINE void pack_columns(std::int64_t column, int columns, std::int64_t k, Element* target) {
    const ItemRows<const void> rows{args_.right.data, args_.columns, 0, args_.right.column_stride, 1};
    const int count = at_most(depth_ - k, tile_steps);
    Vector block[tile_pairs];
    for (int c = 0; c < tile_side; ++c) {
      block[c] = part_of(rows, column + c, first_ + k, count, c < columns);
    }
    store_transposed<S>(block, target, tile_side);
  }

  // ---- left right ----

  void multiply_panel(std::int64_t column, bool last) {
    const TileRows<const std::uint32_t> b{at_.right, tile_side, steps_ * tile_pairs * tile_side};
    for (std::int64_t r = 0; r < rows_; r += side) {
      const TileRows<const std::uint32_t> a{at_.left + r * at_.left_ld, at_.left_ld, tile_side * at_.left_ld};
      rows_ - r > tile_side ? multiply<2>(a, b, r, column, last) : multiply<1>(a, b, r, column, last);
    }
  }

  template <int RT>
  HEADWAY_INLINE void multiply(const TileRows<const std::uint32_t>& a, const TileRows<const std::uint32_t>& b,
                               std::int64_t r, std::int64_t column, bool last) {
    using Block = TileBlock<S, RT, 2>;
    const bool whole = at_.chunk == args_.depth;
    const std::int64_t ld = whole ? side : at_.totals_ld;
    float* totals = at_.totals + (whole ? 0 : r * ld + column - args_.column_begin);
    const TileRows<float> sums{totals, ld, tile_side * ld};
    if (first_ == 0) {
      Block::clear();
    } else {
      Block::load(sums);
    }
    Block::multiply(a, b, steps_);
    Block::store(sums);
    if (last) {
      store_out(totals, ld, r, at_most(rows_ - r, RT * tile_side), column);
    }
  }

  void store_out(const float* sums, std::int64_t ld, std::int64_t r, int rows, std::int64_t column) {
    const ItemRows<void>& out = args_.out;
    const float* bias = at_.bias + column - args_.column_begin;
    for (int i = 0; i < rows; ++i) {
      bfloat16* row = row_of(out, row_begin_ + r + i);
      for (int c = 0; c < side && column + c < args_.column_end; c += S::lanes) {
        const typename S::Vector sum = S::load(sums + i * ld + c);
        store_row<S>(row, out.column_stride, column + c, at_most(args_.column_end - column - c, S::lanes),
                     args_.bias == nullptr ? sum : sum + S::load(bias + c));
      }
    }
  }

  void read_bias() {
    const std::int64_t columns = args_.column_end - args_.column_begin;
    for (std::int64_t c = 0; args_.bias != nullptr && c < columns; c += S::lanes) {
      S::store(at_.bias + c, load_row<S>(static_cast<const bfloat16*>(args_.bias), args_.bias_stride,
                                         args_.column_begin + c, at_most(columns - c, S::lanes)));
    }
  }

  const GemmArgs args_;
  const std::int64_t row_begin_, rows_;
  const Layout at_;
  std::int64_t first_ = 0, depth_ = 0, steps_ = 0;  // the chunk of depth at hand
};

}  // namespace
}  // namespace headway::cpu
