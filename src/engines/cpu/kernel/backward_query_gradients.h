// dQ of a block of queries from a group of keys: a partial of the chunk of keys in memory, which
//   dQ [queries][D] += dS [queries][keys] * K [keys][D]
// reads and writes once a group, with rows of K as vectors and dS as broadcasts.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/backward_sums.h"
#include "engines/cpu/kernel/backward_task.h"
#include "engines/cpu/kernel/compensated.h"
#include "engines/cpu/kernel/operands.h"
#include "engines/cpu/kernel/pack.h"
#include "engines/cpu/kernel/strips.h"
#include "engines/cpu/kernel/tile.h"
#include "engines/cpu/kernel/tile_products.h"

namespace headway::cpu {
namespace {

// Column d of dS K for the block's row r over the group's `keys`, where a row of K holds NaN or infinity: pairs that
// are forbidden must not multiply it by their 0. The sum that the products have, pair by pair.
template <class S, int fold>
typename S::Scalar allowed_query_sum(const BackwardTask<S, fold>& task, const Rows<typename S::Scalar>& rows_of_keys,
                                     int r, std::int64_t d, const Range& keys) {
  constexpr int width = BackwardTask<S, fold>::width;
  typename S::Scalar sum = 0;
  for (std::int64_t key = keys.begin; key < keys.end; ++key) {
    const auto p = static_cast<int>(key / width);
    if ((task.allowed_of(p)[r] >> (key % width) & 1) != 0) {
      sum = S::fma_scalar(task.gradients_of(p)[r * width + key % width], rows_of_keys.data[key * rows_of_keys.ld + d],
                          sum);
    }
  }
  return sum;
}

template <class S, int fold>
class QueryGradients {
  using Scalar = typename S::Scalar;
  using Vector = typename S::Vector;
  using Task = BackwardTask<S, fold>;
  static constexpr int lanes = S::lanes, width = Task::width;

 public:
  explicit QueryGradients(const Task& task) : task_(task), ld_(padded<S>(task.args.head_dim)) {}

  // From dS, [panel][query_block][width], and K, [keys][padded D], in the operands of vocabulary T. The first group of
  // the chunk that the block reaches sets the partial, later ones add; `again`: the group has added something already.
  template <class T>
  void add(const typename Operands<T>::Scalar* gradients, const typename Operands<T>::Scalar* key_rows, bool again) {
    enter_block(again);
    const int column_vectors = static_cast<int>(ld_ / lanes);
    if constexpr (HasTiles<T>) {
      for (int row = 0; row < task_.rows().count; row += 2 * tile_side) {
        for (int v = 0; v < column_vectors; v += 2) {
          const bool both_rows = task_.rows().count - row > tile_side, both_columns = column_vectors - v > 1;
          both_rows ? (both_columns ? add_by_tiles<T, 2, 2>(row, v, gradients, key_rows)
                                    : add_by_tiles<T, 2, 1>(row, v, gradients, key_rows))
                    : (both_columns ? add_by_tiles<T, 1, 2>(row, v, gradients, key_rows)
                                    : add_by_tiles<T, 1, 1>(row, v, gradients, key_rows));
        }
      }
    } else {
      in_panels<S>(column_vectors, [&](auto strip, std::int64_t v)
                                       HEADWAY_LAMBDA { add_columns<T, strip.size>(v, gradients, key_rows); });
    }
  }

  // The same from the task's own dS and K where some pairs are forbidden, and K may hold NaN or infinity.
  void add_allowed(bool again) {
    const Rows<Scalar> keys{task_.at.key_rows, ld_};
    if (rows_are_finite<S>(keys, 0, task_.group.end - task_.group.begin, task_.args.head_dim)) {
      add<S>(task_.at.gradients, task_.at.key_rows, again);
    } else {
      enter_block(again);
      add_pair_by_pair(keys);
    }
  }

 private:
  template <class T>
  using OperandOf = typename Operands<T>::Scalar;

  // Panels whose products are summed up before they go to the partial: 128 keys, so that equal terms don't drift; those
  // of pairs are rounded to halves in the end.
  template <class T>
  static constexpr int chain_panels = Operands<T>::fold > 1 ? most_panels<S, fold> : (128 + width - 1) / width;

  void enter_block(bool again) {
    const BackwardArgs& args = task_.args;
    const std::int64_t first = (task_.chunk * args.queries + task_.rows().begin) * ld_;
    partial_ = static_cast<Scalar*>(task_.head->dq_partials) + first;
    lost_ = task_.head->dq_lost == nullptr ? nullptr : static_cast<Scalar*>(task_.head->dq_lost) + first;
    empty_ = !again && !task_.reaches({args.chunks.begin[task_.chunk], task_.group.begin});
  }

  // 16 rows at a time, each with the keys that they reach.
  template <class T, int NV>
  HEADWAY_NOINLINE void add_columns(std::int64_t v, const OperandOf<T>* gradients, const OperandOf<T>* key_rows) const {
    constexpr int keys_at_once = Operands<T>::fold;
    constexpr int row_operands = width / keys_at_once;
    for (int row = 0; row < task_.rows().count; row += edge_rows) {
      const int count = at_most(task_.rows().count - row, edge_rows);
      in_strips<broadcasts<T, NV>()>(count, [&](auto strip, std::int64_t r) HEADWAY_LAMBDA {
        constexpr int NB = strip.size;
        for (int chain = 0; chain < task_.panel_count(); chain += chain_panels<T>) {
          Accumulators<T, NV, NB> acc;
          clear<T, NV, NB>(acc);
          for (int p = chain; p < at_most(task_.panel_count(), chain + chain_panels<T>); ++p) {
            const Range& span = task_.spans_of(p)[row / edge_rows];
            const std::int64_t first = span.begin / keys_at_once;
            accumulate<T, NV, NB, Scalars::across>(acc, key_rows + (p * row_operands + first) * ld_ + v * lanes, ld_,
                                                   gradients + (p * query_block + row + r) * row_operands + first,
                                                   row_operands, folded<T>(span.end) - first);
          }
          const std::int64_t at = (row + r) * ld_ + v * lanes;
          lost_ == nullptr ? add_tile<T, NV, NB>(acc, partial_ + at, ld_, empty_ && chain == 0)
                           : add_keeping_lost<T, NV, NB>(acc, at, empty_ && chain == 0);
        }
      });
    }
  }

  // The same for the partial's numbers from `at` on, with what they lose.
  template <class T, int NV, int NB>
  HEADWAY_INLINE void add_keeping_lost(const Accumulators<T, NV, NB>& acc, std::int64_t at, bool empty) const {
    HEADWAY_UNROLL
    for (int c = 0; c < NB; ++c) {
      HEADWAY_UNROLL
      for (int v = 0; v < NV; ++v) {
        add_term(at + c * ld_ + v * lanes, lanes, acc[c][v] * S::set(lowering<T>), empty);
      }
    }
  }
  HEADWAY_INLINE void add_term(std::int64_t at, int count, Vector term, bool empty) const {
    const Compensated<S> sum(empty ? S::zero() : S::load_first(partial_ + at, count),
                             empty ? term : term + S::load_first(lost_ + at, count));
    S::store_first(partial_ + at, count, sum.sum);
    S::store_first(lost_ + at, count, sum.lost);
  }

  // dS of pairs out of reach is 0, but not where a whole tile was out of reach.
  template <class T, int RT, int CT>
  HEADWAY_NOINLINE void add_by_tiles(int row, int v, const OperandOf<T>* gradients,
                                     const OperandOf<T>* key_rows) const {
    static_assert(edge_rows == tile_side);
    constexpr int row_operands = width / 2;
    each_product<T, RT, CT>(
        [&](auto tiles) HEADWAY_LAMBDA {
          for (int p = 0; p < task_.panel_count(); ++p) {
            bool reaches = false;
            for (int group = row / edge_rows; group < row / edge_rows + RT; ++group) {
              reaches |= task_.spans_of(p)[group].begin < task_.spans_of(p)[group].end;
            }
            if (reaches) {
              tiles.template multiply<OperandOf<T>>(
                  {gradients + (p * query_block + row) * row_operands, row_operands, tile_side * row_operands},
                  {key_rows + p * row_operands * ld_ + v * lanes, ld_, lanes},
                  (task_.panel_keys(p) + tile_steps - 1) / tile_steps);
            }
          }
        },
        [&](int r, int c, Vector sum) HEADWAY_LAMBDA {
          if (row + r >= task_.rows().count) {
            return;
          }
          const std::int64_t at = (row + r) * ld_ + v * lanes + c;
          const Vector term = sum * S::set(lowering<T>);
          lost_ == nullptr ? add_vector<S>(partial_ + at, term, empty_) : add_term(at, lanes, term, empty_);
        });
  }

  HEADWAY_NOINLINE void add_pair_by_pair(const Rows<Scalar>& keys) const {
    constexpr int chain_keys = chain_panels<S> * width;
    const std::int64_t count = task_.group.end - task_.group.begin;
    for (int r = 0; r < task_.rows().count; ++r) {
      for (std::int64_t d = 0; d < task_.args.head_dim; ++d) {
        const std::int64_t at = r * ld_ + d;
        for (std::int64_t key = 0; key < count; key += chain_keys) {
          const Scalar sum = allowed_query_sum(task_, keys, r, d, {key, smaller(key + chain_keys, count)});
          const bool empty = empty_ && key == 0;
          if (lost_ != nullptr) {
            add_term(at, 1, S::set(sum), empty);
          } else {
            partial_[at] = (empty ? 0 : partial_[at]) + sum;
          }
        }
      }
    }
  }

  const Task& task_;
  const std::int64_t ld_;      // of the partial and of K
  Scalar* partial_ = nullptr;  // of the block at hand
  Scalar* lost_ = nullptr;     // what rounding it loses; null: not kept
  bool empty_ = false;         // whether it holds nothing yet
};

}  // namespace
}  // namespace headway::cpu
