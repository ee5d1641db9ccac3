// Which pairs of a tile of the backward pass are allowed, but for biases of -inf: those that the rows' ranges and
// spans, the mask and Tile::wanted leave.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/backward_tile_data.h"
#include "engines/cpu/kernel/key_lanes.h"
#include "engines/cpu/kernel/pack.h"
#include "engines/cpu/kernel/ranges.h"

namespace headway::cpu {
namespace {

// Fills the tile's words and spans.
template <class S>
class TilePermission {
 public:
  static constexpr int lanes = S::lanes;

  TilePermission(const RangeRule& ranges, const Modifiers& modifiers, const Tile<S>& tile)
      : ranges_(ranges), modifiers_(modifiers), tile_(tile) {}

  // Whether anything but a range may forbid a pair.
  bool may_forbid() const {
    return modifiers_.mask.data != nullptr || modifiers_.bias.data != nullptr || tile_.wanted != nullptr;
  }

  // Every row sees the whole panel, but for masks.
  void take_all(const Patch& all) const {
    for (int group = 0; group * edge_rows < tile_.place.rows; ++group) {
      tile_.spans[group] = {0, tile_.place.keys};
    }
    for (int r = 0; r < tile_.place.rows; ++r) {
      tile_.allowed[r] = low_bits(tile_.place.keys);
    }
    forbid_by_mask(all);
  }

  // The words, the span and the vectors of a group. Returns whether every row sees the whole panel, but for masks.
  bool cut_group(Patch& patch) const {
    const ChunkPlace& place = tile_.place;
    Range span{place.keys, 0};
    bool full = true;
    for (int r = patch.row_begin; r < patch.row_end; ++r) {
      const std::int64_t row = place.row_begin + r;
      const std::uint64_t word = row_word(ranges_, unspanned_range(ranges_, row), row, place.key_begin, place.keys);
      tile_.allowed[r] = word;
      full &= word == low_bits(place.keys);
      if (word != 0) {
        const Range seen = word_hull(word);
        span = {smaller(span.begin, seen.begin), larger(span.end, seen.end)};
      }
    }
    forbid_by_mask(patch);
    span = span.begin < span.end ? span : Range{0, 0};
    tile_.spans[patch.row_begin / edge_rows] = span;
    patch.vector_begin = static_cast<int>(span.begin) / lanes;
    patch.vector_end = static_cast<int>(span.end + lanes - 1) / lanes;
    return full;
  }

  bool any_forbidden(const Patch& patch) const {
    std::uint64_t common = ~std::uint64_t{0};
    for (int r = patch.row_begin; r < patch.row_end; ++r) {
      common &= tile_.allowed[r];
    }
    return common != low_bits(tile_.place.keys);
  }

 private:
  void forbid_by_mask(const Patch& patch) const {
    for (int r = patch.row_begin; tile_.wanted != nullptr && r < patch.row_end; ++r) {
      tile_.allowed[r] &= tile_.wanted[r];
    }
    const Matrix& mask = modifiers_.mask;
    if (mask.data == nullptr) {
      return;
    }
    const auto* first = static_cast<const std::uint8_t*>(mask.data) + tile_.place.row_begin * mask.row_stride +
                        tile_.place.key_begin * mask.column_stride;
    for (int r = patch.row_begin; r < patch.row_end; ++r) {
      tile_.allowed[r] &= mask_word<S>(first + r * mask.row_stride, mask.column_stride, tile_.place.keys);
    }
  }

  const RangeRule& ranges_;
  const Modifiers& modifiers_;
  const Tile<S>& tile_;
};

}  // namespace
}  // namespace headway::cpu
