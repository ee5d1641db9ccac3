// Rows of a matrix product against one panel of columns, a strip of rows at a time: the sums of a strip stay in
// registers over the whole depth.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/strips.h"
#include "engines/cpu/kernel/tile.h"
#include "engines/cpu/simd/common.h"

namespace headway::cpu {
namespace {

// So many products are summed from 0 before they join the total: a longer chain of one sign loses more than a few
// units, a shorter one costs time.
constexpr std::int64_t gemm_chain = 64;

// A packed panel, [steps][width] on cache lines of its own.
template <class S>
struct PackedPanel {
  static constexpr std::int64_t width = S::lanes * S::panel_vectors;
  const typename S::Scalar* data;

  template <int NV, int NB, Scalars layout>
  HEADWAY_INLINE void accumulate_into(Accumulators<S, NV, NB>& acc, const typename S::Scalar* scalars, std::int64_t ld,
                                      std::int64_t first, std::int64_t steps) const {
    accumulate<S, NV, NB, layout>(acc, data + first * width, width, scalars, ld, steps);
  }
};

// A panel where the user has it, converted as it is read: for so few rows that packing would cost more.
template <class S, class In>
struct PanelInPlace {
  const In* data;
  std::int64_t row_stride;
  int last_count;  // columns in the last vector

  template <int NV, int NB, Scalars layout>
  HEADWAY_INLINE void accumulate_into(Accumulators<S, NV, NB>& acc, const typename S::Scalar* scalars, std::int64_t ld,
                                      std::int64_t first, std::int64_t steps) const {
    const In* row = data + first * row_stride;
    for (std::int64_t t = 0; t < steps; ++t, row += row_stride) {
      typename S::Vector x[NV];
      HEADWAY_UNROLL
      for (int v = 0; v < NV; ++v) {
        x[v] = S::load_first(row + v * S::lanes, v + 1 < NV ? S::lanes : last_count);
      }
      HEADWAY_UNROLL
      for (int c = 0; c < NB; ++c) {
        const typename S::Vector b = S::set(layout == Scalars::across ? scalars[c * ld + t] : scalars[t * ld + c]);
        HEADWAY_UNROLL
        for (int v = 0; v < NV; ++v) {
          acc[c][v] = S::fma(b, x[v], acc[c][v]);
        }
      }
    }
  }
};

// What a panel is multiplied with, and where its sums come from and go to.
template <class S>
struct RowSums {
  using Scalar = typename S::Scalar;
  const Scalar* scalars;  // across: [rows][ld]; along: [strip of 4 rows][step][ld], ld 4 or, for one row alone, any
  std::int64_t ld;
  std::int64_t strip_stride;  // along
  std::int64_t rows, steps;
  const Scalar* start;  // [rows][width]: what the sums go on from, perhaps out itself; null: 0
  Scalar* out;          // whole vectors
  std::int64_t out_ld;
  const Scalar* bias;  // [width], or null: added to what goes out
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
  const typename S::Scalar* scalars =
      sums.scalars + (layout == Scalars::across ? row * sums.ld : row / 4 * sums.strip_stride + row % 4);
  for (std::int64_t first = 0; first < sums.steps; first += gemm_chain) {
    const std::int64_t steps = first + gemm_chain < sums.steps ? gemm_chain : sums.steps - first;
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

// The last rows that fill no strip of 4: three or fewer.
template <class S, int NV, Scalars layout, bool few_rows, class Panel>
HEADWAY_INLINE void sum_last_rows(const Panel& panel, const RowSums<S>& sums, std::int64_t row) {
  if (layout == Scalars::across && !few_rows && sums.rows >= 4 && sums.start != sums.out) {
    sum_strip<S, NV, 4, layout>(panel, sums, sums.rows - 4);  // some rows again, to the same bits
    return;
  }
  if constexpr (few_rows && NV == S::panel_vectors) {  // a panel in place is read once for all of them
    if (sums.rows - row == 3) {
      sum_strip<S, NV, 3, layout>(panel, sums, row);
      return;
    }
    if (sums.rows - row == 2) {
      sum_strip<S, NV, 2, layout>(panel, sums, row);
      return;
    }
  }
  for (; row < sums.rows; ++row) {
    sum_strip<S, NV, 1, layout>(panel, sums, row);
  }
}

template <class S, int NV, Scalars layout, bool few_rows, class Panel>
HEADWAY_NOINLINE void sum_rows(const Panel& panel, const RowSums<S>& sums) {
  constexpr int full = few_rows || layout == Scalars::along ? 4 : broadcasts<S, NV>();
  std::int64_t row = 0;
  if constexpr (full > 4) {
    for (; row + full <= sums.rows; row += full) {
      sum_strip<S, NV, full, layout>(panel, sums, row);
    }
  }
  for (; row + 4 <= sums.rows; row += 4) {
    sum_strip<S, NV, 4, layout>(panel, sums, row);
  }
  if (row < sums.rows) {
    sum_last_rows<S, NV, layout, few_rows>(panel, sums, row);
  }
}

// `vectors` of the panel's vectors hold columns.
template <class S, Scalars layout, bool few_rows, class Panel, int NV = S::panel_vectors>
HEADWAY_INLINE void sum_panel(const Panel& panel, int vectors, const RowSums<S>& sums) {
  if constexpr (NV > 1) {
    if (vectors < NV) {
      sum_panel<S, layout, few_rows, Panel, NV - 1>(panel, vectors, sums);
      return;
    }
  }
  sum_rows<S, NV, layout, few_rows>(panel, sums);
}

}  // namespace
}  // namespace headway::cpu
