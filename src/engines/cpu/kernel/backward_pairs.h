// Attention backward through bf16 dot products: the tasks, sums and orders of backward.h with all five products in
// pairs.
//   S, dP   pairs along d: K^T and V^T packed [D / 2][keys] once per group of keys, Q and dO read in place
//   dV, dK  pairs of queries: P and dS as they leave the tile, dO and Q interleaved row by row once per visit
//   dQ      pairs of keys: dS as it leaves the tile, K interleaved once per group
// P and dS are rounded to bf16 there; sums stay in float. The dot products bound it, at half the FMAs' time.
//
// The instruction treats denormals as 0, in and out, and the 0 of a forbidden pair must not be multiplied by NaN or
// infinity. So a pair of a query and a key is computed here only if the numbers of both are of ordinary size
// (backward_ordinary.h) and the row has no reference (backward_large_rows.h). The float kernel then computes the other
// pairs of the block and group of keys, with all finished pairs forbidden. Each pair is decided by its own numbers, so
// keys that a row may not see change none of its bits; numbers that are not ordinary are replaced by 0 where they would
// meet another pair's 0.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/backward.h"
#include "engines/cpu/kernel/backward_ordinary.h"
#include "engines/cpu/kernel/kernels.h"
#include "engines/cpu/kernel/operands.h"
#include "engines/cpu/kernel/tile_pack.h"

namespace headway::cpu {
namespace {

// A group's keys in pairs of vocabulary T.
template <class T, class S>
class PairedKeys {
  using Scalar = typename S::Scalar;
  using Operand = typename Operands<T>::Scalar;
  using Pack = Packing<T, bfloat16>;
  using Task = BackwardTask<S, 2>;
  static constexpr int lanes = S::lanes, width = Task::width;

 public:
  PairedKeys(const Task& task, Scratch<Scalar>& scratch) : task_(task), args_(task.args) {
    const std::int64_t keys = Task::Layout::group_keys(args_);
    key_panels = scratch.template take<Operand>(folded<T>(args_.head_dim) * keys);
    value_panels = scratch.template take<Operand>(folded<T>(args_.value_dim) * keys);
    rows = scratch.template take<Operand>(padded<S>(args_.head_dim) * keys / 2);
  }

  Operand *key_panels, *value_panels;  // K^T and V^T [panel][D / 2][width]
  Operand* rows;                       // K [keys / 2][padded D]
  bool has_odd = false;                // whether not all keys and values are ordinary

  void load() {
    for (int p = 0; p < task_.panel_count(); ++p) {
      for (int v = 0; v < task_.panel_vectors(p); ++v) {
        const std::int64_t key = task_.group.begin + p * width + v * lanes;
        const int count = at_most(task_.group.end - key, lanes);
        Pack::queries(args_.key, key, count, args_.head_dim, 1,
                      key_panels + p * folded<T>(args_.head_dim) * width + v * lanes, width);
        Pack::queries(args_.value, key, count, args_.value_dim, 1,
                      value_panels + p * folded<T>(args_.value_dim) * width + v * lanes, width);
      }
    }
    load_rows();
  }

 private:
  void load_rows() {
    const std::int64_t ld = padded<S>(args_.head_dim);
    const std::int64_t keys = task_.group.end - task_.group.begin;
    for (std::int64_t n = 0; ld != args_.head_dim && n < folded<T>(keys) * ld; n += lanes) {
      Operands<T>::store(rows + n, Operands<T>::zero());  // for what lies behind the last column
    }
    for (std::int64_t n = (keys + 1) / 2 * ld; HasTiles<T> && n < folded<T>(keys) * ld; n += lanes) {
      Operands<T>::store(rows + n, Operands<T>::zero());  // for what lies behind the last key
    }
    typename Operands<T>::Magnitudes seen;
    Pack::values(args_.key, task_.group.begin, keys, args_.head_dim, rows, ld, seen);
    has_odd =
        !ordinary_inputs.holds_all(seen) ||
        !ordinary_inputs.holds_all(Pack::magnitudes(args_.value, task_.group.begin, task_.group.end, args_.value_dim));
    if (has_odd) {
      ordinary_inputs.clear_others<T>(rows, folded<T>(keys) * ld);
    }
  }

  const Task& task_;
  const BackwardArgs& args_;
};

// A block's rows of Q or dO, twice in pairs of vocabulary T: neighbours along d for the tiles, and neighbouring rows
// for the products with them.
template <class T, class S>
class PairedRows {
  using Scalar = typename S::Scalar;
  using Operand = typename Operands<T>::Scalar;
  using Pack = Packing<T, bfloat16>;

 public:
  PairedRows(std::int64_t columns, Scratch<Scalar>& scratch)
      : columns_(columns),
        pairs_(scratch.template take<Operand>(pairs_size(columns))),
        copy_(scratch.template take<Operand>(query_block * folded<T>(columns))) {}

  OperandRows<T> along;  // [rows][D / 2]
  OperandRows<T> rows;   // [rows / 2][D], or for tiles transposed

  // Returns whether all numbers are ordinary.
  bool load(const Matrix& matrix, const RowBlock& block, const Ordinary& ordinary) {
    typename Operands<T>::Magnitudes seen;
    if constexpr (HasTiles<T>) {
      transpose_values<T, bfloat16>(matrix, block.begin, block.count, columns_, pairs_, transposed_rows_ld, seen);
      rows = {pairs_, transposed_rows_ld};
    } else {
      rows = Pack::values(matrix, block.begin, block.count, columns_, pairs_, columns_, seen);
    }
    // Rows that lie far apart share few sets of the cache.
    along = is_compact(matrix, columns_) ? Pack::keys(matrix, block.begin, block.count, columns_, copy_)
                                         : Pack::copied_keys(matrix, block.begin, block.count, columns_, copy_);
    return ordinary.holds_all(seen);
  }
  // 0 in the place of others in `rows`, which would meet the 0 of another pair.
  void clear_odd(const Ordinary& ordinary) { ordinary.clear_others<T>(pairs_, pairs_size(columns_)); }

 private:
  static constexpr std::int64_t transposed_rows_ld = transposed_ld(query_block);
  static std::int64_t pairs_size(std::int64_t columns) {
    return HasTiles<T> ? in_whole_tiles(columns) * transposed_rows_ld : query_block / 2 * columns;
  }

  std::int64_t columns_;
  Operand *pairs_, *copy_;
};

// T multiplies pairs, S scalars.
template <class T, class S>
class PairBlocks {
 public:
  using Vocabulary = S;
  using Stored = bfloat16;
  using Task = BackwardTask<S, 2>;
  using Keys = KeyGradients<S, 2>;

 private:
  using Scalar = typename S::Scalar;
  using Operand = typename Operands<T>::Scalar;
  static constexpr int lanes = S::lanes, width = Task::width;

 public:
  // Beside the task's own scratch, in Scalars.
  static std::int64_t scratch_size(const BackwardArgs& args) {
    const Task sizes(args, 0, KeptTiles::one_block, nullptr);
    return Layout(sizes, nullptr).scratch.used;
  }

  PairBlocks(const Task& task, Keys& key_gradients, Scalar* scratch)
      : task_(task),
        args_(task.args),
        at_(task, scratch),
        keys_(key_gradients),
        floats_(task, key_gradients, nullptr) {}

  void load_group() {
    floats_loaded_ = false;
    at_.keys.load();
    at_.odd_pairs.find_keys(at_.keys.has_odd);
  }

  void add_block() {
    if (!has_ordinary_scale() || bias_may_be_summed()) {
      add_floats(nullptr, false);
      return;
    }
    const bool ordinary_queries = at_.query.load(task_.head->query, task_.rows(), ordinary_inputs);
    const bool ordinary_grad_outs = at_.grad_out.load(task_.head->grad_out, task_.rows(), ordinary_gradients);
    const bool odd_rows = !ordinary_queries || !ordinary_grad_outs;
    const bool has_references =
        row_numbers<S>(*task_.head, task_.rows().begin, task_.rows().count).references != nullptr;
    const bool sees_odd = (odd_rows || has_references || at_.keys.has_odd) && at_.odd_pairs.find_pairs();
    if (odd_rows) {
      at_.query.clear_odd(ordinary_inputs);
      at_.grad_out.clear_odd(ordinary_gradients);
    }
    tiles_.start_block(sees_odd ? at_.odd_pairs.ordinary : nullptr);
    for (int p = 0; p < task_.panel_count(); ++p) {
      tiles_.ahead = find_ahead<bfloat16>(task_, p);
      add_panel(p);
    }
    if (task_.wants_dq()) {
      queries_.template add<T>(at_.gradient_rows, at_.keys.rows, false);
    }
    if (sees_odd) {
      add_floats(at_.odd_pairs.odd, true);
    }
  }

  void skip_block() const { floats_.skip_block(); }

 private:
  struct Layout {
    Scratch<Scalar> scratch;
    PairedKeys<T, S> keys;
    PairedRows<T, S> query, grad_out;
    OddPairs<S> odd_pairs;
    Operand *weights, *gradients;  // of a tile, in pairs of queries: [query_block / 2][width]
    Operand* gradient_rows;        // in pairs of keys: [panel][query_block][width / 2]
    Scalar* bias_gradients;        // of a tile

    Layout(const Task& task, Scalar* base)
        : scratch{base},
          keys(task, scratch),
          query(task.args.head_dim, scratch),
          grad_out(task.args.value_dim, scratch),
          odd_pairs(task, scratch) {
      constexpr std::int64_t block_pairs = query_block / 2;
      weights = scratch.template take<Operand>(block_pairs * width);
      gradients = scratch.template take<Operand>(block_pairs * width);
      gradient_rows = scratch.template take<Operand>(block_pairs * Task::Layout::group_keys(task.args));
      bias_gradients = scratch.template take<Scalar>(query_block * width);
    }
  };

  bool has_ordinary_scale() const {
    return args_.scale < highest_ordinary_scale && args_.scale > -highest_ordinary_scale &&
           tile_factor<T>(args_.scale, task_.head->modifiers).power == 1;
  }

  // Of a sequence with one query or one key a bias with one row or column is that of each pair; in a pack with longer
  // sequences it is summed over, from the tiles of the float kernel.
  bool bias_may_be_summed() const {
    return task_.head->modifiers.bias.data != nullptr && (args_.queries == 1 || args_.ranges.keys == 1);
  }

  void add_floats(const std::uint64_t* wanted, bool again) {
    if (!floats_loaded_) {
      floats_.load_group();
      floats_loaded_ = true;
    }
    floats_.add_pairs(wanted, again);
  }

  void add_panel(int p) {
    if (tiles_.is_out_of_reach(p)) {
      tiles_.skip(p);
      return;
    }
    Tile<T> tile =
        tiles_.template tile<T>(p, at_.query.along, at_.grad_out.along, at_.keys.key_panels, at_.keys.value_panels);
    tile.pairs = {at_.weights, at_.gradients, at_.gradient_rows + p * query_block * (width / 2)};
    TileGradients<T> gradients(args_, *task_.head, tile);
    gradients.run(task_.has_edge(p), task_.wants_gradients());
    if (task_.head->dbias.data != nullptr) {
      store_bias(tile);
    }
    if (task_.head->modifiers.softcap != 0) {
      gradients.apply_slopes();
    }
    gradients.make_pairs();
    const int rows = tile.place.rows;
    for (std::int64_t n = (rows + 1) / 2 * width; HasTiles<T> && n < folded<T>(rows) * width; n += lanes) {
      Operands<T>::store(at_.weights + n, Operands<T>::zero());  // for what lies behind the last row
      Operands<T>::store(at_.gradients + n, Operands<T>::zero());
    }
    keys_.template add<T>(p, {at_.weights, at_.grad_out.rows}, {at_.gradients, at_.query.rows});
  }

  void store_bias(const Tile<T>& tile) const {
    const auto lower = S::set(lowering<T>);
    for (int n = 0; n < tile.place.rows * width; n += lanes) {
      S::store(at_.bias_gradients + n, S::load(tile.gradients + n) * lower);
    }
    tiles_.store_bias(tile.place, at_.bias_gradients);
  }

  const Task& task_;
  const BackwardArgs& args_;
  Layout at_;                            // the block's rows and the group's keys in pairs
  BlockTiles<S, 2> tiles_{task_};        // P and dS
  Keys& keys_;                           // dK and dV
  QueryGradients<S, 2> queries_{task_};  // dQ
  FloatBlocks<S, bfloat16, 2> floats_;   // what the other pairs add
  bool floats_loaded_ = false;           // whether its panels are those of the group
};

template <class T, class S>
void run_gradients_pairs(const BackwardArgs& args, int chunk, void* scratch) {
  Backward<PairBlocks<T, S>>(args, chunk, static_cast<typename S::Scalar*>(scratch)).run();
}

template <class T, class S>
std::int64_t gradients_scratch_pairs(const BackwardArgs& args) {
  return Backward<PairBlocks<T, S>>::scratch_size(args) * static_cast<std::int64_t>(sizeof(typename S::Scalar));
}

// The float kernel but for `gradients`.
template <class T, class S>
constexpr BackwardKernel backward_pairs_kernel() {
  BackwardKernel kernel = backward_kernel<S, bfloat16>();
  kernel.is_short = [](const BackwardArgs&) { return false; };
  kernel.gradients = run_gradients_pairs<T, S>;
  kernel.scratch_bytes = gradients_scratch_pairs<T, S>;
  return kernel;
}

}  // namespace
}  // namespace headway::cpu
