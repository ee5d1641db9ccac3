// Which rows of a forward panel may see which keys, if spans leave gaps.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/forward_task.h"
#include "engines/cpu/kernel/key_lanes.h"
#include "engines/cpu/kernel/modifiers.h"
#include "engines/cpu/kernel/ranges.h"

namespace headway::cpu {
namespace {

// What rows of a panel with holes see of one tile of keys.
template <class S>
struct TileBits {
  std::int64_t panel = -1, key_begin = -1;
  std::uint64_t reach[S::panel_vectors];  // what some row of each vector sees, a bit a key
  std::uint64_t common;                   // what every row of the panel sees
  std::uint64_t rows[chunk_keys];         // of each key, a bit a row
};

template <class S>
class ForwardPermission {
  static constexpr int lanes = S::lanes, width = ForwardSizes<S>::width;

 public:
  explicit ForwardPermission(const ForwardTask<S>& task) : task_(task), args_(task.args) {}

  // Of the tile that `key` lies in.
  const TileBits<S>& tile(std::int64_t p, std::int64_t key) {
    const std::int64_t begin = key / chunk_keys * chunk_keys;
    if (found_.panel != p || found_.key_begin != begin) {
      load(p, begin);
    }
    return found_;
  }

 private:
  HEADWAY_NOINLINE void load(std::int64_t p, std::int64_t key) {
    found_.panel = p;
    found_.key_begin = key;
    const std::int64_t keys = smaller(args_.ranges.keys - key, chunk_keys);
    found_.common = ~std::uint64_t{0};
    for (int v = 0; v < S::panel_vectors; ++v) {
      found_.reach[v] = 0;
    }
    for (int r = 0; r < chunk_keys; ++r) {
      const bool exists = r < task_.panel_rows(p);
      found_.rows[r] = exists
                           ? row_word(args_.ranges, task_.at.ranges[p * width + r], task_.panel_row(p) + r, key, keys)
                           : std::uint64_t{0};
      if (exists) {
        found_.reach[r / lanes] |= found_.rows[r];
        found_.common &= found_.rows[r];
      }
    }
    transpose_bits<S>(found_.rows);
  }

  const ForwardTask<S>& task_;
  const ForwardArgs& args_;
  TileBits<S> found_;
};

}  // namespace
}  // namespace headway::cpu
