// Rows of a matrix product against one panel of columns: total[row][:] += the sum over a block of depth, held in registers.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/strips.h"
#include "engines/cpu/kernel/tile.h"
#include "engines/cpu/simd/common.h"

namespace headway::cpu {
namespace {

// The panel as a packed block, [steps][width] on cache lines of its own.
template <class S>
struct PackedPanel {
  static constexpr std::int64_t width = S::lanes * S::panel_vectors;
  const typename S::Scalar* data;

  template <int NV, int NB, Scalars layout>
  HEADWAY_INLINE void accumulate_into(Accumulators<S, NV, NB>& acc, const typename S::Scalar* scalars, std::int64_t ld,
                                      std::int64_t steps) const {
    accumulate<S, NV, NB, layout>(acc, data, width, scalars, ld, steps);
  }
};

// The panel where the user has it, converted as it is read: for so few rows that packing would cost more.
template <class S, class In>
struct PanelInPlace {
  const In* data;
  std::int64_t row_stride;
  int last_count;  // columns in the last vector

  template <int NV, int NB, Scalars layout>
  HEADWAY_INLINE void accumulate_into(Accumulators<S, NV, NB>& acc, const typename S::Scalar* scalars, std::int64_t ld,
                                      std::int64_t steps) const {
    const In* row = data;
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

// What one call adds to: totals [rows][width], started by the first block of depth. After each strip of rows `done` hears
// which ones they were: it has the FMAs of the next strip to hide its loads and stores behind.
template <class S>
struct Totals {
  static constexpr std::int64_t width = S::lanes * S::panel_vectors;
  typename S::Scalar* data;
  bool first;
  void (*done)(void* context, std::int64_t row, std::int64_t rows);
  void* context;
};

template <class S, int NV, int NB, Scalars layout, class Panel>
HEADWAY_INLINE void add_strip(const Panel& panel, const typename S::Scalar* scalars, std::int64_t ld, std::int64_t steps,
                              const Totals<S>& totals, std::int64_t row) {
  Accumulators<S, NV, NB> acc;
  clear<S, NV, NB>(acc);
  panel.template accumulate_into<NV, NB, layout>(acc, scalars + (layout == Scalars::across ? row * ld : row), ld, steps);
  typename S::Scalar* at = totals.data + row * totals.width;
  HEADWAY_UNROLL
  for (int c = 0; c < NB; ++c) {
    HEADWAY_UNROLL
    for (int v = 0; v < NV; ++v) {
      typename S::Scalar* total = at + c * totals.width + v * S::lanes;
      S::store(total, totals.first ? acc[c][v] : S::load(total) + acc[c][v]);
    }
  }
  totals.done(totals.context, row, NB);
}

template <class S, int NV, Scalars layout, class Panel>
HEADWAY_NOINLINE void add_rows(const Panel& panel, const typename S::Scalar* scalars, std::int64_t ld, std::int64_t rows,
                               std::int64_t steps, const Totals<S>& totals) {
  constexpr int full = broadcasts<S, NV>();
  const auto strip = [&]<int NB>(Strip<NB>, std::int64_t row) HEADWAY_LAMBDA {
    add_strip<S, NV, NB, layout>(panel, scalars, ld, steps, totals, row);
  };
  std::int64_t row = 0;
  for (; row + full <= rows; row += full) {
    strip(Strip<full>{}, row);
  }
  for (; row + 4 <= rows; row += 4) {
    strip(Strip<4>{}, row);
  }
  switch (rows - row) {
    case 3: strip(Strip<3>{}, row); break;
    case 2: strip(Strip<2>{}, row); break;
    case 1: strip(Strip<1>{}, row); break;
    default: break;
  }
}

// `vectors` of the panel's vectors hold columns.
template <class S, Scalars layout, class Panel, int NV = S::panel_vectors>
HEADWAY_INLINE void add_panel(const Panel& panel, int vectors, const typename S::Scalar* scalars, std::int64_t ld,
                              std::int64_t rows, std::int64_t steps, const Totals<S>& totals) {
  if constexpr (NV > 1) {
    if (vectors < NV) {
      add_panel<S, layout, Panel, NV - 1>(panel, vectors, scalars, ld, rows, steps, totals);
      return;
    }
  }
  add_rows<S, NV, layout>(panel, scalars, ld, rows, steps, totals);
}

}  // namespace
}  // namespace headway::cpu
