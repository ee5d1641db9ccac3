// Rows of keys and values in pages, as the exact kernels read them: what RowSource is for rows in one tensor. Elements
// of 8 bits become the f32 numbers scale * element.
#pragma once

#include "engines/cuda/kernels/pages.cuh"
#include "engines/cuda/kernels/simt_tile.cuh"

namespace headway::cuda {

template <class Stored>
struct PagedSource {
  static constexpr bool scaled = sizeof(Stored) == 1;
  const Stored* data;  // of the head, in page 0
  const PageArguments& pages;
  const PageScales& scales;
  std::int64_t page, row, feature, first, end, b, g;
  bool chunks;

  __device__ PagedSource(const PageArguments& table, const PageScales& row_scales, const Rows& view,
                         std::int64_t sequence, std::int64_t h, std::int64_t from, std::int64_t count)
      : data(head_of<Stored>(view, 0, h)),
        pages(table),
        scales(row_scales),
        page(view.batch),
        row(view.row),
        feature(view.feature),
        first(from),
        end(count),
        b(sequence),
        g(h),
        chunks(view.chunks && (sizeof(Stored) == 4 || scaled)) {}

  // Elements d to d + 3 of a row; 0 from `width` on.
  template <class Real>
  __device__ void four(int r, std::int64_t d, std::int64_t width, Real* to) const {
    to[0] = to[1] = to[2] = to[3] = 0;
    if (first + r >= end) {
      return;
    }
    const PageSlot at = slot_of(pages, b, first + r);
    const Stored* from = data + at.page * page + at.slot * row + d * feature;
    if constexpr (!scaled) {
      if (chunks && d + 4 <= width) {
        load_four(reinterpret_cast<const Real*>(from), to);
        return;
      }
    }
    Stored elements[4] = {};
    if (scaled && chunks && d + 4 <= width) {
      *reinterpret_cast<std::uint32_t*>(elements) = *reinterpret_cast<const std::uint32_t*>(from);
    } else {
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        elements[x] = d + x < width ? from[x * feature] : Stored{};
      }
    }
    const Real scale = scaled ? Real(scale_at(scales, g, at)) : Real(1);
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      to[x] = d + x < width ? scale * number<Real>(elements[x]) : Real(0);
    }
  }
};

// At once: looking up a row takes longer than its copy.
template <int Threads, int Rows, int Most, class Stored, class Real>
__device__ inline void start_columns(const PagedSource<Stored>& source, int depth, std::int64_t width, Real* to,
                                     int stride) {
  fill_columns<Threads, Rows>(source, 0, depth, width, to, stride);
}

template <int Threads, int Rows, int Cols, class Stored, class Real>
__device__ inline void start_rows(const PagedSource<Stored>& source, std::int64_t d, std::int64_t width, Real* to,
                                  int stride) {
  fill_rows<Threads, Rows, Cols>(source, d, width, static_cast<int>(threadIdx.x),
                                 [&](int r, int k) { return to + r * stride + k; });
}

}  // namespace headway::cuda
