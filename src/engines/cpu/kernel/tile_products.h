// The two products of attention by tiles, for the panels of forward_layout.h.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/operands.h"
#include "engines/cpu/kernel/tiles.h"

namespace headway::cpu {
namespace {

// S^T [keys][queries] = K Q^T for NV vectors of queries: `keys` in rows, `queries` in pairs along d.
template <class S, int NV>
HEADWAY_NOINLINE void scores_by_tiles(const OperandRows<S>& keys, std::int64_t count,
                                      const typename Operands<S>::Scalar* queries, std::int64_t width,
                                      std::int64_t steps, typename S::Scalar* scores) {
  using Operand = typename Operands<S>::Scalar;
  using Scalar = typename S::Scalar;
  const auto block = [&]<int RT, int CT>(std::int64_t j, int n, Scalar* target, std::int64_t ld) HEADWAY_LAMBDA {
    using Block = TileBlock<S, RT, CT>;
    Block::clear();
    Block::template multiply<Operand>({keys.data + j * keys.ld, keys.ld, tile_side * keys.ld},
                                      {queries + n * S::lanes, width, S::lanes}, steps);
    Block::template store<Scalar>({target, ld, tile_side * ld});
  };
  const auto columns = [&]<int RT>(std::int64_t j, Scalar* target, std::int64_t ld) HEADWAY_LAMBDA {
    for (int n = 0; n + 2 <= NV; n += 2) {
      block.template operator()<RT, 2>(j, n, target + n * S::lanes, ld);
    }
    if constexpr (NV % 2 == 1) {
      block.template operator()<RT, 1>(j, NV - 1, target + (NV - 1) * S::lanes, ld);
    }
  };
  std::int64_t j = 0;
  for (; j + 2 * tile_side <= count; j += 2 * tile_side) {
    columns.template operator()<2>(j, scores + j * width, width);
  }
  for (; j < count; j += tile_side) {
    alignas(64) Scalar last[tile_side * NV * S::lanes];  // of which not all rows may be wanted
    columns.template operator()<1>(j, last, NV * S::lanes);
    const std::int64_t rows = count - j < tile_side ? count - j : tile_side;
    for (std::int64_t r = 0; r < rows; ++r) {
      HEADWAY_UNROLL
      for (int n = 0; n < NV; ++n) {
        S::store(scores + (j + r) * width + n * S::lanes, S::load(last + (r * NV + n) * S::lanes));
      }
    }
  }
}

// products [rows][NV vectors] = rows * panel for up to 32 rows: `rows` in rows, the panel in pairs along them. Of the
// last tile's rows some may mean nothing.
template <class S, int NV>
HEADWAY_INLINE void rows_by_tiles(const OperandRows<S>& rows, std::int64_t count,
                                  const typename Operands<S>::Scalar* panel, std::int64_t width, std::int64_t steps,
                                  typename S::Scalar* products) {
  using Operand = typename Operands<S>::Scalar;
  using Scalar = typename S::Scalar;
  constexpr std::int64_t ld = NV * S::lanes;
  const auto block = [&]<int RT, int CT>(int n) HEADWAY_LAMBDA {
    using Block = TileBlock<S, RT, CT>;
    Block::clear();
    Block::template multiply<Operand>({rows.data, rows.ld, tile_side * rows.ld},
                                      {panel + n * S::lanes, width, S::lanes}, steps);
    Block::template store<Scalar>({products + n * S::lanes, ld, tile_side * ld});
  };
  const auto columns = [&]<int RT>() HEADWAY_LAMBDA {
    HEADWAY_UNROLL
    for (int n = 0; n + 2 <= NV; n += 2) {
      block.template operator()<RT, 2>(n);
    }
    if constexpr (NV % 2 == 1) {
      block.template operator()<RT, 1>(NV - 1);
    }
  };
  count > tile_side ? columns.template operator()<2>() : columns.template operator()<1>();
}

// add(row, column, products) for the products of up to 32 rows and columns, a vector at a time; `fill` puts them into
// the tiles.
template <class S, int RT, int CT, class Fill, class Add>
HEADWAY_INLINE void each_product(const Fill& fill, const Add& add) {
  using Block = TileBlock<S, RT, CT>;
  alignas(64) typename S::Scalar sums[RT * tile_side * CT * tile_side];
  Block::clear();
  fill(Block{});
  Block::template store<typename S::Scalar>({sums, CT * tile_side, tile_side * CT * tile_side});
  for (int r = 0; r < RT * tile_side; ++r) {
    HEADWAY_UNROLL
    for (int c = 0; c < CT; ++c) {
      add(r, c * tile_side, S::load(sums + (r * CT + c) * tile_side));
    }
  }
}

// O^T [rows of Dv][queries] += V^T P^T for NV vectors of queries, over `steps` tiles of keys; `rows` in whole tiles.
template <class S, int NV>
HEADWAY_INLINE void add_values_by_tiles(const TileRows<const typename Operands<S>::Scalar>& values,
                                        const TileRows<const typename Operands<S>::Scalar>& weights, std::int64_t steps,
                                        const TileRows<typename S::Scalar>& output, std::int64_t rows) {
  const auto block = [&]<int RT, int CT>(std::int64_t d, int n) HEADWAY_LAMBDA {
    using Block = TileBlock<S, RT, CT>;
    auto a = values;
    auto b = weights;
    auto sums = output;
    a.data += d * values.ld;
    b.data += n * weights.next;
    sums.data += d * output.ld + n * S::lanes;
    Block::load(sums);
    Block::multiply(a, b, steps);
    Block::store(sums);
  };
  const auto columns = [&]<int RT>(std::int64_t d) HEADWAY_LAMBDA {
    for (int n = 0; n + 2 <= NV; n += 2) {
      block.template operator()<RT, 2>(d, n);
    }
    if constexpr (NV % 2 == 1) {
      block.template operator()<RT, 1>(d, NV - 1);
    }
  };
  std::int64_t d = 0;
  for (; d + 2 * tile_side <= rows; d += 2 * tile_side) {
    columns.template operator()<2>(d);
  }
  if (d < rows) {
    columns.template operator()<1>(d);
  }
}

// rows[r][lane] *= factor[lane], unless all factors are 1.
template <class S, int NV>
HEADWAY_INLINE void multiply_rows(typename S::Scalar* rows, std::int64_t width, std::int64_t count,
                                  const typename S::Vector (&factors)[NV]) {
  for (int n = 0; n < NV; ++n) {
    const typename S::Vector one = S::set(1);
    if (!S::any(S::less(factors[n], one)) && !S::any(S::not_less_equal(factors[n], one))) {
      continue;
    }
    for (std::int64_t r = 0; r < count; ++r) {
      typename S::Scalar* at = rows + r * width + n * S::lanes;
      S::store(at, S::load(at) * factors[n]);
    }
  }
}

}  // namespace
}  // namespace headway::cpu
