// Attention backward, keys in lanes: one task is a chunk of keys of one kv head against all queries of the heads that
// share it.
//
// Keys go in groups of 256 (512 in pairs), packed once: K^T and V^T as panels for S and dP, K as rows for dQ. All query
// blocks that reach the group pass by; each gives P and dS (backward_tile.h), then
//   dV^T [Dv][keys] += dO^T P      dK^T [D][keys] += Q^T dS      dQ [queries][D] += dS K
// with the same outer-product tile: P and dS as vectors and dO and Q as broadcasts for the first two, K as vectors and
// dS as broadcasts for the third. dK^T and dV^T stay in the second-level cache until the group is done; per group, Q
// and dO are read once and the dQ partial is read and written once: 4 (3 D + Dv) bytes for 512 (3 D + 2 Dv) operations
// a query, so the FMA units bound it.
//
// Sums start from 0 in each block, are added up over some blocks, and those sums are added up again with what rounding
// loses, so that sums of any length keep their accuracy. A key's bits depend on its own sequence alone: blocks, groups
// and heads come in one order, and skipped ones add nothing.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/backward_args.h"
#include "engines/cpu/kernel/backward_panel.h"
#include "engines/cpu/kernel/backward_state.h"
#include "engines/cpu/kernel/backward_tile.h"
#include "engines/cpu/kernel/operands.h"
#include "engines/cpu/kernel/pack.h"
#include "engines/cpu/kernel/ranges.h"
#include "engines/cpu/kernel/row_blocks.h"
#include "engines/cpu/kernel/store_as.h"
#include "engines/cpu/kernel/strips.h"
#include "engines/cpu/kernel/tile.h"
#include "engines/cpu/kernel/tile_products.h"

namespace headway::cpu {
namespace {

template <class S, class In, int fold = 1>
class Backward : public BackwardState<S, In, fold> {
 protected:
  using Base = BackwardState<S, In, fold>;
  using Base::args_;
  using Base::at_;
  using Base::block_;
  using Base::blocks_summed_;
  using Base::chunk_;
  using Base::group_;
  using Base::has_edge;
  using Base::head_;
  using Base::panel_count;
  using Base::panel_keys;
  using Base::panel_vectors;
  using Base::rows;
  using Base::sums_empty;
  using Base::tile_allowed;
  using Base::tile_gradients;
  using Base::tile_spans;
  using Base::tile_weights;

 public:
  using Base::lanes;
  using Base::width;
  using typename Base::Scalar;
  using typename Base::Vector;

  Backward(const BackwardArgs& args, int chunk, Scalar* scratch) : Base(args, chunk, false, scratch) {}

  HEADWAY_NOINLINE void run() {
    const std::int64_t end = args_.chunks.begin[chunk_ + 1];
    for (std::int64_t k = args_.chunks.begin[chunk_]; k < end; k += group_keys<S, fold>(args_)) {
      group_ = {k, smaller(k + group_keys<S, fold>(args_), end)};
      this->load_group();
      for (std::int64_t h = 0; h < args_.head_count; ++h) {
        this->enter_head(h);
        for (block_ = 0; block_ < block_count(args_); ++block_) {
          visit();
        }
      }
      this->store_group();
    }
  }

 protected:
  using Base::Base;

  // What takes back the raising of P and dS in vocabulary T.
  template <class T>
  static constexpr Scalar lowering = static_cast<Scalar>(1) /
                                     static_cast<Scalar>(std::uint64_t{1} << TileGradients<T>::raised);

  // ---- A block of queries ----

  bool wants_dq() const { return head_->dq.data != nullptr; }
  bool wants_gradients() const { return wants_dq() || args_.dk.data != nullptr || head_->dbias.data != nullptr; }

  void visit() {
    if (!this->reaches(group_)) {
      if (head_->dbias.data != nullptr) {
        clear_bias(group_);
      }
      return;
    }
    if (blocks_summed_ == blocks_in_sum) {
      this->fold_sums();
    }
    ++blocks_summed_;
    seen_far_ = false;
    differentiate();
  }

  // The block's part of all gradients.
  virtual void differentiate() {
    query_ = block_rows(head_->query, args_.head_dim, at_.query_copy);
    grad_out_ = block_rows(head_->grad_out, args_.value_dim, at_.grad_out_copy);
    bool forbids = false;
    for (int p = 0; p < panel_count(); ++p) {
      look_ahead(p);
      forbids |= visit_panel(p);
    }
    if (wants_dq()) {
      add_queries(forbids);
    }
  }

  static bool compact(const Matrix& matrix, std::int64_t columns) {
    return matrix.row_stride >= 0 && matrix.row_stride <= 2 * columns;
  }

  // Rows as broadcasts want them. Rows that lie far apart are copied: they would share few sets of the cache.
  Rows<Scalar> block_rows(const Matrix& matrix, std::int64_t columns, Scalar* copy) const {
    if (readable_in_place<S, In>(matrix) && compact(matrix, columns)) {
      return readable_rows<S, In>(matrix, rows().begin, rows().count, columns, copy);
    }
    copy_rows<S, In>(matrix, rows().begin, rows().count, columns, copy, columns);
    return {copy, columns};
  }

  // Returns whether the tile has forbidden pairs.
  bool visit_panel(int p) {
    if (is_out_of_reach(p)) {
      skip_panel(p);
      return false;
    }
    const bool forbids = compute_tile(p);
    if (args_.dv.data != nullptr) {
      add_keys(p, has_edge(keys_of(p)), forbids, tile_weights(p), grad_out_, args_.value_dim, at_.dv_panels);
    }
    if (args_.dk.data != nullptr) {
      add_keys(p, has_edge(keys_of(p)), forbids, tile_gradients(p), query_, args_.head_dim, at_.dk_panels);
    }
    this->sums_filled(p);
    return forbids;
  }

  // Whether no row of the block sees a key of the panel, as behind the end of a padded sequence.
  bool is_out_of_reach(int p) const {
    return !this->reaches(keys_of(p)) ||
           forbid_all<S>(head_->modifiers, {rows().begin, rows().count, group_.begin + p * width, panel_keys(p)});
  }

  Range keys_of(int p) const { return {group_.begin + p * width, group_.begin + p * width + panel_keys(p)}; }

  // P and dS of the block and panel p, and the bias's gradient. Returns whether any pair is forbidden.
  bool compute_tile(int p) {
    const ChunkPlace place{rows().begin, rows().count, group_.begin + p * width, panel_keys(p)};
    const Tile<S> tile = tile_at<S>(p, place, {query_.data, query_.ld}, {grad_out_.data, grad_out_.ld}, at_.key_panels,
                                    at_.value_panels);
    TileGradients<S> gradients(args_, *head_, tile);
    const bool forbids = gradients.run(has_edge(keys_of(p)), wants_gradients());
    if (head_->dbias.data != nullptr) {
      wanted_ == nullptr ? store_as(head_->dbias, head_->dbias_storage, place.row_begin, place.rows, place.key_begin,
                                    place.keys, tile.gradients, width)
                         : store_wanted_bias(tile);
    }
    if (head_->modifiers.softcap != 0) {
      gradients.apply_slopes();
    }
    return forbids;
  }

  void store_wanted_bias(const Tile<S>& tile) {
    const ChunkPlace& place = tile.place;
    for (int n = 0; n < place.rows * width; ++n) {
      const int r = n / width, key = n % width;
      if (key < place.keys && (tile.wanted[r] >> key & 1) != 0) {
        store_as(head_->dbias, head_->dbias_storage, place.row_begin + r, 1, place.key_begin + key, 1,
                 tile.gradients + n, 0);
      }
    }
  }

  template <class T>
  using OperandOf = typename Operands<T>::Scalar;

  template <class T>
  Tile<T> tile_at(int p, const ChunkPlace& place, const OperandRows<T>& query, const OperandRows<T>& grad_out,
                  const OperandOf<T>* key_panels, const OperandOf<T>* value_panels) {
    return {place,
            query,
            grad_out,
            Operands<T>::fold > 1 ? nullptr : references_of<S>(*head_, rows().begin, rows().count),
            static_cast<const Scalar*>(head_->prepared_lse) + rows().begin,
            static_cast<const Scalar*>(head_->delta) + rows().begin,
            key_panels + p * folded<T>(args_.head_dim) * width,
            value_panels + p * folded<T>(args_.value_dim) * width,
            tile_weights(p),
            tile_gradients(p),
            at_.slopes,
            tile_allowed(p),
            at_.kept,
            tile_spans(p),
            wanted_ == nullptr ? nullptr : wanted_ + p * query_block,
            &query_ahead_,
            &grad_out_ahead_,
            &mask_ahead_,
            &bias_ahead_,
            &seen_far_};
  }

  // The next block's rows are fetched during the last panel.
  void look_ahead(int p) {
    look_ahead_at_pairs(p);
    const bool last = p + 1 == panel_count();
    query_ahead_ = last ? rows_ahead(head_->query, args_.head_dim) : Ahead{};
    grad_out_ahead_ = last ? rows_ahead(head_->grad_out, args_.value_dim) : Ahead{};
  }

  Ahead rows_ahead(const Matrix& matrix, std::int64_t columns) const {
    const std::int64_t row = rows().begin + query_block;
    const std::int64_t bytes = row * matrix.row_stride * static_cast<std::int64_t>(sizeof(In));
    return ahead_of<In>(row < args_.queries ? static_cast<const char*>(matrix.data) + bytes : nullptr, matrix,
                        smaller(query_block, args_.queries - row), columns);
  }

  void look_ahead_at_pairs(int p) {
    if (head_->modifiers.any) {
      mask_ahead_ = pairs_ahead(head_->modifiers.mask, 1, p);
      bias_ahead_ = pairs_ahead(head_->modifiers.bias, storage_size(head_->modifiers.bias_storage), p);
    }
  }

  // The rows of a mask or bias that the next tile wants: the next panel's, or the first panel's of the next block.
  Ahead pairs_ahead(const Matrix& matrix, std::int64_t size, int p) const {
    const bool same_rows = p + 1 < panel_count();
    const std::int64_t row = rows().begin + (same_rows ? 0 : query_block);
    const std::int64_t key = group_.begin + (same_rows ? (p + 1) * width : 0);
    if (matrix.data == nullptr || matrix.column_stride != 1 || row >= args_.queries) {
      return {};
    }
    return {static_cast<const char*>(matrix.data) + (row * matrix.row_stride + key) * size, matrix.row_stride * size,
            smaller(width, group_.end - key) * size, smaller(query_block, args_.queries - row)};
  }

  void skip_panel(int p) {
    for (int group = 0; group * edge_rows < rows().count; ++group) {
      tile_spans(p)[group] = {0, 0};
    }
    for (int r = 0; r < rows().count; ++r) {
      tile_allowed(p)[r] = 0;
    }
    if (head_->dbias.data != nullptr) {
      clear_bias(keys_of(p));
    }
  }

  void clear_bias(const Range& keys) {
    const Scalar zeros[width] = {};
    for (std::int64_t key = keys.begin; key < keys.end; key += width) {
      store_as(head_->dbias, head_->dbias_storage, rows().begin, rows().count, key, smaller(keys.end - key, width),
               zeros, 0);
    }
  }

  // ---- dK and dV ----

  void add_keys(int p, bool edge, bool forbids, const Scalar* pairs, const Rows<Scalar>& rows_of, std::int64_t columns,
                Scalar* targets) {
    if (forbids && !rows_are_finite<S>(rows_of, 0, rows().count, columns)) {
      add_keys_carefully(p, pairs, rows_of, columns, targets + p * columns * width);
      return;
    }
    add_key_products<S>(p, edge, pairs, {rows_of.data, rows_of.ld}, columns, targets);
  }

  // target^T [columns][keys] += rows^T [columns][queries] * pairs [queries][keys], in the operands of vocabulary T
  template <class T>
  void add_key_products(int p, bool edge, const OperandOf<T>* pairs, const OperandRows<T>& rows_of,
                        std::int64_t columns, Scalar* targets) {
    Scalar* target = targets + p * columns * width;
    if (edge) {
      for (int v = 0; v < panel_vectors(p); ++v) {
        const Range reach = rows_reaching(p, {v * lanes, (v + 1) * lanes});
        add_keys_of<T, 1>(pairs + v * lanes, rows_of, reach, columns, target + v * lanes, sums_empty(p));
      }
      return;
    }
    const Range all{0, rows().count};
    switch (panel_vectors(p)) {
      case 1: add_keys_of<T, 1>(pairs, rows_of, all, columns, target, sums_empty(p)); break;
      case 2: add_keys_of<T, 2>(pairs, rows_of, all, columns, target, sums_empty(p)); break;
      case 3: add_keys_of<T, 3>(pairs, rows_of, all, columns, target, sums_empty(p)); break;
      default: add_keys_of<T, S::panel_vectors>(pairs, rows_of, all, columns, target, sums_empty(p)); break;
    }
  }

  // The rows of the block between the first and the last group that reaches some of the panel's keys.
  Range rows_reaching(int p, const Range& keys) const {
    Range reach{0, 0};
    for (int group = 0; group * edge_rows < rows().count; ++group) {
      if (overlap(tile_spans(p)[group], keys)) {
        reach.begin = reach.begin == reach.end ? group * edge_rows : reach.begin;
        reach.end = smaller((group + 1) * edge_rows, rows().count);
      }
    }
    return reach;
  }

  template <class T, int NV>
  HEADWAY_NOINLINE void add_keys_of(const OperandOf<T>* pairs, const OperandRows<T>& rows_of, const Range& reach,
                                    std::int64_t columns, Scalar* target, bool empty) {
    if constexpr (HasTiles<T>) {
      if (reach.begin < reach.end) {
        for (std::int64_t d = 0; d < columns; d += 2 * tile_side) {
          columns - d > tile_side ? add_keys_by_tiles<T, NV, 2>(pairs, rows_of, reach, columns, d, target, empty)
                                  : add_keys_by_tiles<T, NV, 1>(pairs, rows_of, reach, columns, d, target, empty);
        }
        return;
      }
    }
    const std::int64_t first = reach.begin / Operands<T>::fold;
    in_strips<broadcasts<T, NV>()>(columns, [&](auto strip, std::int64_t d) HEADWAY_LAMBDA {
      constexpr int NB = strip.size;
      Accumulators<T, NV, NB> acc;
      clear<T, NV, NB>(acc);
      accumulate<T, NV, NB, Scalars::along>(acc, pairs + first * width, width, rows_of.data + first * rows_of.ld + d,
                                            rows_of.ld, folded<T>(reach.end) - first);
      add_to<T, NV, NB>(acc, target + d * width, width, empty);
    });
  }

  // RT tiles of columns from d on; `rows_of` is transposed, and pairs of rows out of reach are 0.
  template <class T, int NV, int RT>
  HEADWAY_INLINE void add_keys_by_tiles(const OperandOf<T>* pairs, const OperandRows<T>& rows_of, const Range& reach,
                                        std::int64_t columns, std::int64_t d, Scalar* target, bool empty) {
    const std::int64_t first = reach.begin / tile_steps * tile_pairs;
    const std::int64_t steps = (reach.end + tile_steps - 1) / tile_steps - reach.begin / tile_steps;
    const Vector lower = S::set(lowering<T>);
    const auto block = [&]<int CT>(int n) HEADWAY_LAMBDA {
      each_product<T, RT, CT>(
          [&](auto tiles) HEADWAY_LAMBDA {
            tiles.template multiply<OperandOf<T>>(
                {rows_of.data + d * rows_of.ld + first, rows_of.ld, tile_side * rows_of.ld},
                {pairs + first * width + n * lanes, width, lanes}, steps);
          },
          [&](int r, int c, Vector sum) HEADWAY_LAMBDA {
            Scalar* at = target + (d + r) * width + n * lanes + c;
            if (d + r < columns) {
              S::store(at, (empty ? S::zero() : S::load(at)) + sum * lower);
            }
          });
    };
    HEADWAY_UNROLL
    for (int n = 0; n + 2 <= NV; n += 2) {
      block.template operator()<2>(n);
    }
    if constexpr (NV % 2 == 1) {
      block.template operator()<1>(NV - 1);
    }
  }

  // target += acc, or target = acc where it holds nothing yet.
  template <class T, int NV, int NB>
  HEADWAY_INLINE static void add_to(const Accumulators<T, NV, NB>& acc, Scalar* target, std::int64_t ld, bool empty) {
    const Vector lower = S::set(lowering<T>);
    const auto each = [&](const auto& sum) HEADWAY_LAMBDA {
      HEADWAY_UNROLL
      for (int c = 0; c < NB; ++c) {
        HEADWAY_UNROLL
        for (int v = 0; v < NV; ++v) {
          S::store(target + c * ld + v * lanes, sum(target + c * ld + v * lanes, acc[c][v]));
        }
      }
    };
    // Never -0, which would become 0 where nothing but zeros comes later.
    if (empty) {
      each([&](const Scalar*, Vector sum) HEADWAY_LAMBDA { return S::zero() + sum * lower; });
    } else {
      each([&](const Scalar* at, Vector sum) HEADWAY_LAMBDA { return S::load(at) + sum * lower; });
    }
  }

  // Where a row holds NaN or infinity, keys that it may not attend to must not multiply it by their 0. Same sums in the
  // same order, pair by pair.
  HEADWAY_NOINLINE void add_keys_carefully(int p, const Scalar* pairs, const Rows<Scalar>& rows_of,
                                           std::int64_t columns, Scalar* target) {
    for (int key = 0; key < panel_keys(p); ++key) {
      for (std::int64_t d = 0; d < columns; ++d) {
        Scalar sum = 0;
        for (int r = 0; r < rows().count; ++r) {
          if ((tile_allowed(p)[r] >> key & 1) != 0) {
            sum = S::fma_scalar(rows_of.data[r * rows_of.ld + d], pairs[r * width + key], sum);
          }
        }
        target[d * width + key] = (sums_empty(p) ? 0 : target[d * width + key]) + sum;
      }
    }
  }

  // ---- dQ ----

  // The block's partial; the first group of the chunk that the block reaches sets it, later ones add.
  Scalar* partial() const {
    const std::int64_t ld = padded<S>(args_.head_dim);
    return static_cast<Scalar*>(head_->dq_partials) + (chunk_ * args_.queries + rows().begin) * ld;
  }
  bool is_first() const { return !adds_to_sums_ && !this->reaches({args_.chunks.begin[chunk_], group_.begin}); }

  // Panels whose products are summed up before they go to the partial: 128 keys, so that equal terms don't drift; those
  // of pairs are rounded to halves in the end.
  template <class T>
  static constexpr int chain_panels = Operands<T>::fold > 1 ? most_panels<S, fold> : (128 + width - 1) / width;

  // dQ [queries][D] += dS [queries][keys] * K [keys][D], 16 rows at a time, each with the keys that they reach.
  void add_queries(bool forbids) {
    const Rows<Scalar> keys{at_.key_rows, padded<S>(args_.head_dim)};
    if (forbids && !rows_are_finite<S>(keys, 0, group_.end - group_.begin, args_.head_dim)) {
      add_queries_carefully(keys);
      return;
    }
    add_query_products<S>(at_.gradients, at_.key_rows);
  }

  // From dS, [panel][query_block][width], and K, [keys][padded D], in the operands of vocabulary T.
  template <class T>
  void add_query_products(const OperandOf<T>* gradients, const OperandOf<T>* key_rows) {
    const int column_vectors = static_cast<int>(padded<S>(args_.head_dim) / lanes);
    if constexpr (HasTiles<T>) {
      for (int row = 0; row < rows().count; row += 2 * tile_side) {
        for (int v = 0; v < column_vectors; v += 2) {
          const bool both_rows = rows().count - row > tile_side, both_columns = column_vectors - v > 1;
          both_rows ? (both_columns ? add_queries_by_tiles<T, 2, 2>(row, v, gradients, key_rows)
                                    : add_queries_by_tiles<T, 2, 1>(row, v, gradients, key_rows))
                    : (both_columns ? add_queries_by_tiles<T, 1, 2>(row, v, gradients, key_rows)
                                    : add_queries_by_tiles<T, 1, 1>(row, v, gradients, key_rows));
        }
      }
      return;
    }
    for (int v = 0; v < column_vectors; v += S::panel_vectors) {
      switch (column_vectors - v) {
        case 1: add_queries_of<T, 1>(v, gradients, key_rows); break;
        case 2: add_queries_of<T, 2>(v, gradients, key_rows); break;
        case 3: add_queries_of<T, 3>(v, gradients, key_rows); break;
        default: add_queries_of<T, S::panel_vectors>(v, gradients, key_rows); break;
      }
    }
  }

  // dS of pairs out of reach is 0, but not where a whole tile was out of reach.
  template <class T, int RT, int CT>
  HEADWAY_NOINLINE void add_queries_by_tiles(int row, int v, const OperandOf<T>* gradients,
                                             const OperandOf<T>* key_rows) {
    static_assert(edge_rows == tile_side);
    constexpr int row_operands = width / 2;
    const std::int64_t ld = padded<S>(args_.head_dim);
    const bool empty = is_first();
    each_product<T, RT, CT>(
        [&](auto tiles) HEADWAY_LAMBDA {
          for (int p = 0; p < panel_count(); ++p) {
            bool reaches = false;
            for (int group = row / edge_rows; group < row / edge_rows + RT; ++group) {
              reaches |= tile_spans(p)[group].begin < tile_spans(p)[group].end;
            }
            if (reaches) {
              tiles.template multiply<OperandOf<T>>(
                  {gradients + (p * query_block + row) * row_operands, row_operands, tile_side * row_operands},
                  {key_rows + p * row_operands * ld + v * lanes, ld, lanes},
                  (panel_keys(p) + tile_steps - 1) / tile_steps);
            }
          }
        },
        [&](int r, int c, Vector sum) HEADWAY_LAMBDA {
          if (row + r >= rows().count) {
            return;
          }
          const std::int64_t at = (row + r) * ld + v * lanes + c;
          const Vector term = sum * S::set(lowering<T>);
          if (head_->dq_lost != nullptr) {
            add_term(at, lanes, term, empty);
          } else {
            S::store(partial() + at, (empty ? S::zero() : S::load(partial() + at)) + term);
          }
        });
  }

  template <class T, int NV>
  HEADWAY_NOINLINE void add_queries_of(int v, const OperandOf<T>* gradients, const OperandOf<T>* key_rows) {
    constexpr int keys_at_once = Operands<T>::fold;
    constexpr int row_operands = width / keys_at_once;
    const std::int64_t ld = padded<S>(args_.head_dim);
    for (int row = 0; row < rows().count; row += edge_rows) {
      const int count = at_most(rows().count - row, edge_rows);
      in_strips<broadcasts<T, NV>()>(count, [&](auto strip, std::int64_t r) HEADWAY_LAMBDA {
        constexpr int NB = strip.size;
        for (int chain = 0; chain < panel_count(); chain += chain_panels<T>) {
          Accumulators<T, NV, NB> acc;
          clear<T, NV, NB>(acc);
          for (int p = chain; p < at_most(panel_count(), chain + chain_panels<T>); ++p) {
            const Range& span = tile_spans(p)[row / edge_rows];
            const std::int64_t first = span.begin / keys_at_once;
            accumulate<T, NV, NB, Scalars::across>(acc, key_rows + (p * row_operands + first) * ld + v * lanes, ld,
                                                   gradients + (p * query_block + row + r) * row_operands + first,
                                                   row_operands, folded<T>(span.end) - first);
          }
          const std::int64_t at = (row + r) * ld + v * lanes;
          head_->dq_lost == nullptr ? add_to<T, NV, NB>(acc, partial() + at, ld, is_first() && chain == 0)
                                    : add_keeping_lost<T, NV, NB>(acc, at, ld, is_first() && chain == 0);
        }
      });
    }
  }

  // The same for the partial's numbers from `at` on, with what they lose.
  template <class T, int NV, int NB>
  HEADWAY_INLINE void add_keeping_lost(const Accumulators<T, NV, NB>& acc, std::int64_t at, std::int64_t ld,
                                       bool empty) {
    HEADWAY_UNROLL
    for (int c = 0; c < NB; ++c) {
      HEADWAY_UNROLL
      for (int v = 0; v < NV; ++v) {
        add_term(at + c * ld + v * lanes, lanes, acc[c][v] * S::set(lowering<T>), empty);
      }
    }
  }
  HEADWAY_INLINE void add_term(std::int64_t at, int count, Vector term, bool empty) {
    Scalar* total = partial() + at;
    Scalar* lost = static_cast<Scalar*>(head_->dq_lost) + (total - static_cast<Scalar*>(head_->dq_partials));
    const Compensated<S> sum(empty ? S::zero() : S::load_first(total, count),
                             empty ? term : term + S::load_first(lost, count));
    S::store_first(total, count, sum.sum);
    S::store_first(lost, count, sum.lost);
  }

  HEADWAY_NOINLINE void add_queries_carefully(const Rows<Scalar>& keys) {
    for (int r = 0; r < rows().count; ++r) {
      for (std::int64_t d = 0; d < args_.head_dim; ++d) {
        Scalar& total = partial()[r * keys.ld + d];
        for (int chain = 0; chain < panel_count(); chain += chain_panels<S>) {
          const Range chained{chain * width, smaller((chain + chain_panels<S>)*width, group_.end - group_.begin)};
          const Scalar sum = careful_query_sum(keys, r, d, chained);
          const bool empty = is_first() && chain == 0;
          if (head_->dq_lost != nullptr) {
            add_term(r * keys.ld + d, 1, S::set(sum), empty);
          } else {
            total = (empty ? 0 : total) + sum;
          }
        }
      }
    }
  }

  Scalar careful_query_sum(const Rows<Scalar>& keys, int r, std::int64_t d, const Range& chained) const {
    Scalar sum = 0;
    for (std::int64_t key = chained.begin; key < chained.end; ++key) {
      const auto p = static_cast<int>(key / width);
      if ((tile_allowed(p)[r] >> (key % width) & 1) != 0) {
        sum = S::fma_scalar(tile_gradients(p)[r * width + key % width], keys.data[key * keys.ld + d], sum);
      }
    }
    return sum;
  }

  Rows<Scalar> query_{}, grad_out_{};
  Ahead query_ahead_, grad_out_ahead_, mask_ahead_, bias_ahead_;  // for the tile at hand to fetch
  bool seen_far_ = false;                                         // see Tile
  const std::uint64_t* wanted_ = nullptr;                         // [panel][query_block], see Tile
  bool adds_to_sums_ = false;                                     // whether the block's dQ holds something already
};

}  // namespace
}  // namespace headway::cpu
