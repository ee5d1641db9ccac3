// Rows that later work will read, to be fetched while other rows are computed.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/ranges.h"
#include "engines/cpu/simd/common.h"

namespace headway::cpu {
namespace {

// Rows of a matrix of pairs are far apart, and those of another head anywhere: no hardware prefetcher predicts them.
struct Ahead {
  const char* first = nullptr;
  std::int64_t row_bytes = 0;  // from one row to the next
  std::int64_t bytes = 0;      // of a row that will be read
  std::int64_t rows = 0;

  // Into the first-level cache, or with locality 2 into the second-level one.
  template <int locality = 3>
  HEADWAY_INLINE void fetch(std::int64_t begin, std::int64_t count) const {
    for (std::int64_t r = begin; r < smaller(begin + count, rows); ++r) {
      for (std::int64_t byte = 0; byte < bytes; byte += 64) {
        __builtin_prefetch(first + r * row_bytes + byte, 0, locality);
      }
    }
  }
};

// The cache level into which a tile with NB broadcasts fetches. Tiles with many broadcasts belong to small heads, whose
// matrices often have the same page offsets: the next head's rows would evict this head's from the first-level cache,
// and each fetch into that cache occupies one of few line-fill buffers until the data arrives.
template <int NB>
constexpr int fetched_locality() {
  return NB > 4 ? 2 : 3;
}

// The rows from `first` on, laid out like a matrix of In; none when it is null.
template <class In>
HEADWAY_INLINE Ahead ahead_of(const void* first, const Matrix& like, std::int64_t rows, std::int64_t columns) {
  constexpr auto size = static_cast<std::int64_t>(sizeof(In));
  if (first == nullptr || like.column_stride != 1) {
    return {};
  }
  return {static_cast<const char*>(first), like.row_stride * size, columns * size, rows};
}

}  // namespace
}  // namespace headway::cpu
