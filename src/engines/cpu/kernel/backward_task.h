// The state of a backward task: its arguments and scratch, and the group of keys, the query head and the block of
// queries at hand, with what the block's rows may see.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/backward_args.h"
#include "engines/cpu/kernel/backward_layout.h"
#include "engines/cpu/kernel/pack.h"
#include "engines/cpu/kernel/ranges.h"
#include "engines/cpu/kernel/row_blocks.h"

namespace headway::cpu {
namespace {

template <class S, int fold = 1>
struct BackwardTask {
  using Scalar = typename S::Scalar;
  using Layout = BackwardLayout<S, fold>;
  static constexpr int lanes = S::lanes, width = Layout::width;

  BackwardTask(const BackwardArgs& arguments, int chunk_of_keys, KeptTiles kept_tiles, Scalar* scratch)
      : args(arguments), chunk(chunk_of_keys), at(arguments, kept_tiles, scratch) {}

  const BackwardArgs& args;
  const int chunk;
  const Layout at;
  Range group{};                       // of keys
  const BackwardHead* head = nullptr;  // whose queries they meet
  std::int64_t block = 0;              // of those

  // ---- The group of keys ----

  int panel_count() const { return static_cast<int>((group.end - group.begin + width - 1) / width); }
  int panel_keys(int p) const { return at_most(group.end - group.begin - p * width, width); }
  int panel_vectors(int p) const { return (panel_keys(p) + lanes - 1) / lanes; }
  Range keys_of(int p) const { return {group.begin + p * width, group.begin + p * width + panel_keys(p)}; }

  // ---- The query head and the block of queries ----

  bool wants_dq() const { return head->dq.data != nullptr; }
  bool wants_gradients() const { return wants_dq() || args.dk.data != nullptr || head->dbias.data != nullptr; }

  // What the head's rows see is found once.
  void enter_head(std::int64_t h) {
    head = args.heads + h;
    plane_ = args.span_planes > 1 ? h : 0;
    for (; planes_found_ <= plane_; ++planes_found_) {
      find_blocks(planes_found_);
    }
  }

  const RowBlock& rows() const { return at.blocks[plane_ * block_count(args) + block]; }
  ChunkPlace place_of(int p) const { return {rows().begin, rows().count, group.begin + p * width, panel_keys(p)}; }

  // Whether some row of the block sees one of these keys, which begin at a panel's first and end at one's last.
  bool reaches(const Range& keys) const {
    if (args.span_planes == 0) {
      return overlap(rows().hull, keys);
    }
    return any_bit(panels_of(plane_, block).reached, keys.begin / width, (keys.end + width - 1) / width);
  }

  // Whether some rows of the block do not see all of a panel's keys.
  bool has_edge(int p) const {
    const Range keys = keys_of(p);
    if (args.span_planes == 0) {
      return rows().core.begin > keys.begin || rows().core.end < keys.end;
    }
    return !any_bit(panels_of(plane_, block).whole, keys.begin / width, keys.begin / width + 1);
  }

  // ---- The tiles of the block and a panel ----

  Scalar* weights_of(int p) const { return at.weights + (keeps_all() ? tile(p) : 0) * at.tile_rows * width; }
  Scalar* gradients_of(int p) const { return at.gradients + tile(p) * at.tile_rows * width; }
  std::uint64_t* allowed_of(int p) const { return at.allowed + tile(p) * query_block; }
  Range* spans_of(int p) const { return at.spans + tile(p) * (query_block / edge_rows); }

  // The rows of the block between the first and the last group that reaches some of the panel's keys.
  Range rows_reaching(int p, const Range& keys) const {
    Range reach{0, 0};
    for (int group_of_rows = 0; group_of_rows * edge_rows < rows().count; ++group_of_rows) {
      if (overlap(spans_of(p)[group_of_rows], keys)) {
        reach.begin = reach.begin == reach.end ? group_of_rows * edge_rows : reach.begin;
        reach.end = smaller((group_of_rows + 1) * edge_rows, rows().count);
      }
    }
    return reach;
  }

 private:
  bool keeps_all() const { return at.kept_tiles == KeptTiles::all; }
  std::int64_t tile(int p) const { return keeps_all() ? block * panel_count() + p : p; }

  BlockPanels panels_of(std::int64_t plane, std::int64_t of_block) const {
    if (args.span_planes == 0) {
      return {};
    }
    const std::int64_t words = BlockPanels::words(args.ranges, width);
    std::uint64_t* first = at.panel_bits + 2 * (plane * block_count(args) + of_block) * words;
    return {first, first + words};
  }

  void find_blocks(std::int64_t plane) {
    const std::int64_t blocks = block_count(args);
    for (std::int64_t n = 0; n < blocks; ++n) {
      RowBlock& found = at.blocks[plane * blocks + n];
      find_row_block(args, args.heads[plane].ranges, n, found);
      if (args.span_planes != 0) {
        std::uint64_t* spare = panels_of(larger(args.span_planes, 1), 0).reached;
        find_block_panels(args.heads[plane].ranges, found, width, panels_of(plane, n), spare);
      }
    }
  }

  std::int64_t plane_ = 0;         // of the head's spans
  std::int64_t planes_found_ = 0;  // whose blocks are known
};

}  // namespace
}  // namespace headway::cpu
