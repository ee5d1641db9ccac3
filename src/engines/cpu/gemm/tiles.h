// Rows of a matrix product against one panel of columns, a strip of rows at a time: the sums of a strip stay in
// registers over the whole depth.
#pragma once

#include <cstdint>

#include "engines/cpu/gemm/operands.h"
#include "engines/cpu/kernel/ahead.h"
#include "engines/cpu/kernel/strips.h"
#include "engines/cpu/kernel/tile.h"
#include "engines/cpu/simd/common.h"

namespace headway::cpu {
namespace {

// So many products (or pairs of them) are summed from 0 before they join the total: a longer chain of one sign loses
// more than a few units, a shorter one costs time.
constexpr std::int64_t gemm_chain = 64;

// A packed panel, [steps][width] on cache lines of its own.
template <class S>
struct PackedPanel {
  static constexpr std::int64_t width = S::lanes * S::panel_vectors;
  using Operand = typename Operands<S>::Scalar;
  const Operand* data;

  template <int NV, int NB, Scalars layout>
  HEADWAY_INLINE void accumulate_into(Accumulators<S, NV, NB>& acc, const Operand* scalars, std::int64_t ld,
                                      std::int64_t first, std::int64_t steps) const {
    accumulate<S, NV, NB, layout>(acc, data + first * width, width, scalars, ld, steps);
  }
};

// A panel where the user has it, converted as it is read. With `copy` it is packed on the way, for the strips to come:
// the stores go beside the FMAs at no cost.
template <class S, class In>
struct PanelInPlace {
  static constexpr int fold = Operands<S>::fold;
  static constexpr std::int64_t width = S::lanes * S::panel_vectors;
  using Operand = typename Operands<S>::Scalar;
  const In* data;
  std::int64_t row_stride;
  std::int64_t depth;  // rows that there are
  int last_count;      // columns in the last vector
  Operand* copy;       // [steps][width], or null

  template <int NV, int NB, Scalars layout>
  HEADWAY_INLINE void accumulate_into(Accumulators<S, NV, NB>& acc, const Operand* scalars, std::int64_t ld,
                                      std::int64_t first, std::int64_t steps) const {
    if (copy != nullptr) {
      accumulate_steps<NV, NB, layout, true>(acc, scalars, ld, first, steps);
    } else {
      accumulate_steps<NV, NB, layout, false>(acc, scalars, ld, first, steps);
    }
  }

 private:
  template <int NV, int NB, Scalars layout, bool copies>
  HEADWAY_INLINE void accumulate_steps(Accumulators<S, NV, NB>& acc, const Operand* scalars, std::int64_t ld,
                                       std::int64_t first, std::int64_t steps) const {
    using Packing = GemmOperands<S, In>;
    const In* row = data + first * fold * row_stride;
    Operand* to = copy + first * width;
    for (std::int64_t t = 0; t < steps; ++t, row += fold * row_stride) {
      const DepthRows<In> rows{row, (first + t) * fold + 1 < depth ? row + row_stride : nullptr};
      typename Operands<S>::Vector x[NV];
      Packing::load_panel(rows, last_count, x);
      HEADWAY_UNROLL
      for (int v = 0; copies && v < NV; ++v) {
        Packing::store(to + t * width + v * S::lanes, x[v]);
      }
      HEADWAY_UNROLL
      for (int c = 0; c < NB; ++c) {
        const auto b = Operands<S>::broadcast(layout == Scalars::across ? scalars + c * ld + t : scalars + t * ld + c);
        HEADWAY_UNROLL
        for (int v = 0; v < NV; ++v) {
          acc[c][v] = Operands<S>::multiply_add(b, x[v], acc[c][v]);
        }
      }
    }
  }
};

// Rows that will be needed next, a few of which are fetched with each chain of sums.
class AheadByChains {
 public:
  AheadByChains() = default;
  AheadByChains(const Ahead& rows, std::int64_t chains) : rows_(rows), at_once_((rows.rows + chains - 1) / chains) {}

  HEADWAY_INLINE void fetch() {
    rows_.fetch(done_, at_once_);
    done_ += at_once_;
  }

 private:
  Ahead rows_;
  std::int64_t at_once_ = 0, done_ = 0;
};

struct GemmAhead {
  AheadByChains right, left;
};

// What a panel is multiplied with, and where its sums come from and go to.
template <class S>
struct RowSums {
  using Scalar = typename S::Scalar;
  using Operand = typename Operands<S>::Scalar;
  const Operand* scalars;  // across: [rows][ld]; along: [strip of 4 rows][step][ld], ld 4 or, for one row alone, any
  std::int64_t ld;
  std::int64_t strip_stride;  // along
  std::int64_t rows, steps;
  const Scalar* start;  // [rows][width]: what the sums go on from, perhaps out itself; null: 0
  Scalar* out;          // whole vectors
  std::int64_t out_ld;
  const Scalar* bias;  // [width], or null: added to what goes out
  GemmAhead* ahead;
};

template <class S, int NV, int NB, Scalars layout, class Panel>
HEADWAY_INLINE void sum_strip(const Panel& panel, const RowSums<S>& sums, std::int64_t row) {
  constexpr std::int64_t width = S::lanes * S::panel_vectors;
  Accumulators<S, NV, NB> total;
  HEADWAY_UNROLL
  for (int c = 0; c < NB; ++c) {
    HEADWAY_UNROLL
    for (int v = 0; v < NV; ++v) {
      total[c][v] = sums.start == nullptr ? S::zero() : S::load(sums.start + (row + c) * width + v * S::lanes);
    }
  }
  const auto* scalars =
      sums.scalars + (layout == Scalars::across ? row * sums.ld : row / 4 * sums.strip_stride + row % 4);
  for (std::int64_t first = 0; first < sums.steps; first += gemm_chain) {
    const std::int64_t steps = first + gemm_chain < sums.steps ? gemm_chain : sums.steps - first;
    sums.ahead->right.fetch();
    sums.ahead->left.fetch();
    Accumulators<S, NV, NB> acc;
    clear<S, NV, NB>(acc);
    panel.template accumulate_into<NV, NB, layout>(acc, scalars + (layout == Scalars::across ? first : first * sums.ld),
                                                   sums.ld, first, steps);
    HEADWAY_UNROLL
    for (int c = 0; c < NB; ++c) {
      HEADWAY_UNROLL
      for (int v = 0; v < NV; ++v) {
        total[c][v] = total[c][v] + acc[c][v];
      }
    }
  }
  HEADWAY_UNROLL
  for (int c = 0; c < NB; ++c) {
    HEADWAY_UNROLL
    for (int v = 0; v < NV; ++v) {
      const typename S::Vector sum =
          sums.bias == nullptr ? total[c][v] : total[c][v] + S::load(sums.bias + v * S::lanes);
      S::store_first(sums.out + (row + c) * sums.out_ld + v * S::lanes, S::lanes, sum);
    }
  }
}

// Rows from `row` on, three or fewer.
template <class S, int NV, Scalars layout, class Panel>
HEADWAY_NOINLINE void sum_few_rows(const Panel& panel, const RowSums<S>& sums, std::int64_t row) {
  switch (sums.rows - row) {
    case 3: sum_strip<S, NV, 3, layout>(panel, sums, row); break;
    case 2: sum_strip<S, NV, 2, layout>(panel, sums, row); break;
    case 1: sum_strip<S, NV, 1, layout>(panel, sums, row); break;
    default: break;
  }
}

// Rows from `row`, a multiple of 4, on.
template <class S, int NV, Scalars layout>
HEADWAY_NOINLINE void sum_rows(const PackedPanel<S>& panel, const RowSums<S>& sums, std::int64_t row) {
  constexpr int full = layout == Scalars::along ? 4 : broadcasts<S, NV>();
  if constexpr (full > 4) {
    for (; row + full <= sums.rows; row += full) {
      sum_strip<S, NV, full, layout>(panel, sums, row);
    }
  }
  for (; row + 4 <= sums.rows; row += 4) {
    sum_strip<S, NV, 4, layout>(panel, sums, row);
  }
  sum_few_rows<S, NV, layout>(panel, sums, row);
}

// All rows against a panel in place; with a copy, only the first four, which make it.
template <class S, int NV, Scalars layout, class In>
HEADWAY_NOINLINE void sum_rows(const PanelInPlace<S, In>& panel, const RowSums<S>& sums) {
  std::int64_t row = 0;
  for (; row + 4 <= sums.rows && (row == 0 || panel.copy == nullptr); row += 4) {
    sum_strip<S, NV, 4, layout>(panel, sums, row);
  }
  if (panel.copy != nullptr) {
    sum_rows<S, NV, layout>(PackedPanel<S>{panel.copy}, sums, row);
  } else {
    sum_few_rows<S, NV, layout>(panel, sums, row);
  }
}

}  // namespace
}  // namespace headway::cpu
