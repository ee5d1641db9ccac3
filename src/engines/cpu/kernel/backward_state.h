// The state of a backward task: its scratch layout, and the current group of keys with its sums.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/backward_args.h"
#include "engines/cpu/kernel/backward_tile.h"
#include "engines/cpu/kernel/compensated.h"
#include "engines/cpu/kernel/pack.h"
#include "engines/cpu/kernel/ranges.h"
#include "engines/cpu/kernel/row_blocks.h"
#include "engines/cpu/kernel/scratch.h"

namespace headway::cpu {
namespace {

constexpr int blocks_in_sum = 32;  // query blocks whose parts of dK and dV are added up before they go to the totals

// fold: the number of values that are packed together for the products.
template <class S, class In, int fold>
class BackwardState {
 public:
  using Scalar = typename S::Scalar;
  using Vector = typename S::Vector;
  static constexpr int lanes = S::lanes;
  static constexpr int width = S::lanes * S::panel_vectors;

  // Scratch of a task, in Scalars.
  static std::int64_t scratch_size(const BackwardArgs& args) { return Layout(args, false, nullptr).scratch.used; }

 protected:
  // whole: a group of all keys, of which the tiles of all blocks of queries are kept, dS and P, as dense as the
  // sequence allows; else a group of any keys with dS of one block and P of one tile.
  BackwardState(const BackwardArgs& args, int chunk, bool whole, Scalar* scratch)
      : args_(args), chunk_(chunk), whole_(whole), tile_rows_(rows_of_tile(args, whole)), at_(args, whole, scratch) {}

  static std::int64_t rows_of_tile(const BackwardArgs& args, bool whole) {
    return whole ? smaller(args.queries, query_block) : query_block;
  }

  struct Layout {
    Scratch<Scalar> scratch;
    Scalar *key_panels, *value_panels, *dk_panels, *dv_panels, *dk_totals, *dv_totals, *key_rows;
    Scalar *weights, *gradients, *slopes, *query_copy, *grad_out_copy;
    std::uint64_t *allowed, *kept;
    Range* spans;
    RowBlock* blocks;           // of each plane of spans
    std::uint64_t* panel_bits;  // of each block: its BlockPanels; and as much as one for the search

    Layout(const BackwardArgs& args, bool whole, Scalar* base) : scratch{base} {
      const std::int64_t panels = whole ? (args.ranges.keys + width - 1) / width : group_panels<S, fold>(args);
      const std::int64_t keys = panels * width;
      const std::int64_t tile_rows = rows_of_tile(args, whole);
      const std::int64_t rows = (whole ? block_count(args) : 1) * tile_rows;
      const std::int64_t tiles = (whole ? block_count(args) : 1) * panels;
      const std::int64_t total_keys = block_count(args) * args.head_count > blocks_in_sum ? keys : 0;
      key_panels = scratch.template take<Scalar>(args.head_dim * keys);
      value_panels = scratch.template take<Scalar>(args.value_dim * keys);
      dk_panels = scratch.template take<Scalar>(padded<S>(args.head_dim) * keys);
      dv_panels = scratch.template take<Scalar>(padded<S>(args.value_dim) * keys);
      dk_totals = scratch.template take<Scalar>(args.head_dim * total_keys);
      dv_totals = scratch.template take<Scalar>(args.value_dim * total_keys);
      key_rows = scratch.template take<Scalar>(padded<S>(args.head_dim) * keys);
      weights = scratch.template take<Scalar>((whole ? tiles : 1) * tile_rows * width);
      gradients = scratch.template take<Scalar>(tiles * tile_rows * width);
      slopes = scratch.template take<Scalar>(tile_rows * width);
      query_copy = scratch.template take<Scalar>(rows * padded<S>(args.head_dim));
      grad_out_copy = scratch.template take<Scalar>(rows * padded<S>(args.value_dim));
      allowed = scratch.template take<std::uint64_t>(tiles * query_block);
      kept = scratch.template take<std::uint64_t>(query_block);
      spans = scratch.template take<Range>(tiles * (query_block / edge_rows));
      const std::int64_t planes = larger(args.span_planes, 1);
      blocks = scratch.template take<RowBlock>(planes * block_count(args));
      panel_bits = scratch.template take<std::uint64_t>(
          args.span_planes == 0 ? 0 : (2 * planes * block_count(args) + 1) * BlockPanels::words(args.ranges, width));
    }
  };

  // ---- The group of keys ----

  int panel_count() const { return static_cast<int>((group_.end - group_.begin + width - 1) / width); }
  int panel_keys(int p) const { return at_most(group_.end - group_.begin - p * width, width); }
  int panel_vectors(int p) const { return (panel_keys(p) + lanes - 1) / lanes; }
  std::int64_t tile(int p) const { return whole_ ? block_ * panel_count() + p : p; }
  Scalar* tile_weights(int p) const { return at_.weights + (whole_ ? tile(p) : 0) * tile_rows_ * width; }
  Scalar* tile_gradients(int p) const { return at_.gradients + tile(p) * tile_rows_ * width; }
  std::uint64_t* tile_allowed(int p) const { return at_.allowed + tile(p) * query_block; }
  Range* tile_spans(int p) const { return at_.spans + tile(p) * (query_block / edge_rows); }

  // ---- The block of queries ----

  const RowBlock& rows() const { return at_.blocks[plane_ * block_count(args_) + block_]; }

  BlockPanels panels_of(std::int64_t plane, std::int64_t block) const {
    if (args_.span_planes == 0) {
      return {};
    }
    const std::int64_t words = BlockPanels::words(args_.ranges, width);
    std::uint64_t* first = at_.panel_bits + 2 * (plane * block_count(args_) + block) * words;
    return {first, first + words};
  }

  // Makes head h the one at hand. What its rows see is found once.
  void enter_head(std::int64_t h) {
    head_ = args_.heads + h;
    plane_ = args_.span_planes > 1 ? h : 0;
    for (; planes_found_ <= plane_; ++planes_found_) {
      find_blocks(planes_found_);
    }
  }

  void find_blocks(std::int64_t plane) {
    const std::int64_t blocks = block_count(args_);
    for (std::int64_t block = 0; block < blocks; ++block) {
      RowBlock& found = at_.blocks[plane * blocks + block];
      find_row_block(args_, args_.heads[plane].ranges, block, found);
      if (args_.span_planes != 0) {
        std::uint64_t* spare = panels_of(larger(args_.span_planes, 1), 0).reached;
        find_block_panels(args_.heads[plane].ranges, found, width, panels_of(plane, block), spare);
      }
    }
  }

  // Whether some row of the block sees one of these keys, which begin at a panel's first and end at one's last.
  bool reaches(const Range& keys) const {
    if (args_.span_planes == 0) {
      return overlap(rows().hull, keys);
    }
    return any_bit(panels_of(plane_, block_).reached, keys.begin / width, (keys.end + width - 1) / width);
  }

  // Whether some rows of the block do not see all of a panel's keys.
  bool has_edge(const Range& keys) const {
    if (args_.span_planes == 0) {
      return rows().core.begin > keys.begin || rows().core.end < keys.end;
    }
    return !any_bit(panels_of(plane_, block_).whole, keys.begin / width, keys.begin / width + 1);
  }

  virtual void load_group() {
    start_sums();
    pack_group();
  }

  void pack_panels() {
    const Scalar packed = TileGradients<S>::factor_of(args_.scale, args_.heads[0].modifiers).packed;
    for (int p = 0; p < panel_count(); ++p) {
      for (int v = 0; v < panel_vectors(p); ++v) {
        const std::int64_t key = group_.begin + p * width + v * lanes;
        const int rows = at_most(group_.end - key, lanes);
        pack_scaled<S, In>(args_.key, key, rows, args_.head_dim, packed,
                           at_.key_panels + p * args_.head_dim * width + v * lanes, width);
        pack_transposed<S, In>(args_.value, key, rows, args_.value_dim, 1,
                               at_.value_panels + p * args_.value_dim * width + v * lanes, width);
      }
    }
  }

  HEADWAY_NOINLINE void pack_group() {
    pack_panels();
    const std::int64_t keys = group_.end - group_.begin;
    const std::int64_t ld = padded<S>(args_.head_dim);
    if (ld != args_.head_dim) {
      clear_numbers(at_.key_rows, keys * ld);  // for what lies behind the last column
    }
    copy_rows<S, In>(args_.key, group_.begin, keys, args_.head_dim, at_.key_rows, ld);
  }

  // Sums of a panel that are empty hold anything: what comes first is stored, not added.
  bool sums_empty(int p) const { return sums_[p].empty; }
  void sums_filled(int p) { sums_[p].empty = false; }

  void start_sums() {
    for (int p = 0; p < panel_count(); ++p) {
      sums_[p] = {};
    }
    blocks_summed_ = 0;
  }

  // Moves the sums of the last blocks to the totals. What rounding the totals loses stays in the sums, so that any
  // number of blocks adds up.
  HEADWAY_NOINLINE void fold_sums() {
    for (int p = 0; p < panel_count(); ++p) {
      fold_panel(p);
    }
    blocks_summed_ = 0;
  }
  void fold_panel(int p) {
    if (sums_[p].empty) {
      return;
    }
    if (args_.dk.data != nullptr) {
      move_sums(at_.dk_panels, at_.dk_totals, p, args_.head_dim);
    }
    if (args_.dv.data != nullptr) {
      move_sums(at_.dv_panels, at_.dv_totals, p, args_.value_dim);
    }
    sums_[p] = {false, true};
  }
  void move_sums(Scalar* sums, Scalar* totals, int p, std::int64_t columns) {
    for (std::int64_t n = p * columns * width; n < (p + 1) * columns * width; n += lanes) {
      const Vector sum = S::load(sums + n);
      const Vector before = sums_[p].has_totals ? S::load(totals + n) : S::zero();
      const Compensated<S> total(before, sum);
      S::store(totals + n, total.sum);
      S::store(sums + n, total.lost);
    }
  }

  static void clear_numbers(Scalar* numbers, std::int64_t count) {
    for (std::int64_t n = 0; n < count; n += lanes) {
      S::store(numbers + n, S::zero());
    }
  }

  void store_group() {
    for (int p = 0; p < panel_count(); ++p) {
      if (sums_[p].has_totals) {
        fold_panel(p);
      } else if (sums_[p].empty) {
        clear_numbers(at_.dk_panels + p * args_.head_dim * width, args_.head_dim * width);
        clear_numbers(at_.dv_panels + p * args_.value_dim * width, args_.value_dim * width);
      }
      const bool folded = sums_[p].has_totals;
      for (int v = 0; v < panel_vectors(p); ++v) {
        store_keys(args_.dk, p, v, folded ? at_.dk_totals : at_.dk_panels, args_.head_dim, args_.scale);
        store_keys(args_.dv, p, v, folded ? at_.dv_totals : at_.dv_panels, args_.value_dim,
                   args_.heads[0].dropout.kept_scale);
      }
    }
  }

  void store_keys(const WritableMatrix& target, int p, int v, Scalar* numbers, std::int64_t columns, double factor) {
    if (target.data == nullptr) {
      return;
    }
    const std::int64_t key = group_.begin + p * width + v * lanes;
    Scalar* panel = numbers + p * columns * width + v * lanes;
    const auto split = split_factor<Scalar>(factor);
    for (std::int64_t c = 0; split.second != 1 && c < columns; ++c) {
      S::store(panel + c * width, S::load(panel + c * width) * S::set(split.second));
    }
    unpack_transposed<S, In>(panel, width, S::set(split.first), target, key, at_most(group_.end - key, lanes), columns);
  }

  const BackwardArgs& args_;
  int chunk_;
  bool whole_;
  std::int64_t tile_rows_;  // from one tile of pairs to the next
  Layout at_;
  Range group_{};
  struct PanelSums {
    bool empty = true, has_totals = false;
  };
  PanelSums sums_[most_panels<S, fold>];  // dK's and dV's
  int blocks_summed_ = 0;                 // since the last fold
  const BackwardHead* head_ = nullptr;
  std::int64_t plane_ = 0;         // of the head's spans
  std::int64_t planes_found_ = 0;  // whose blocks are known
  std::int64_t block_ = 0;
};

}  // namespace
}  // namespace headway::cpu
