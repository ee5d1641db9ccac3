// dK and dV of a group of keys:
//   dV^T [Dv][keys] += dO^T P      dK^T [D][keys] += Q^T dS
// with P and dS as vectors and the rows of dO and Q as broadcasts. Sums start from 0 in each block of queries, are
// added up over some blocks, and those sums are added up again with what rounding loses, so that sums of any length
// keep their accuracy.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/backward_sums.h"
#include "engines/cpu/kernel/backward_task.h"
#include "engines/cpu/kernel/compensated.h"
#include "engines/cpu/kernel/operands.h"
#include "engines/cpu/kernel/pack.h"
#include "engines/cpu/kernel/score_factor.h"
#include "engines/cpu/kernel/strips.h"
#include "engines/cpu/kernel/tile.h"
#include "engines/cpu/kernel/tile_products.h"

namespace headway::cpu {
namespace {

// What a panel's gradient gets from a block of queries, in the operands of vocabulary T: pairs^T [keys][queries] * rows
// [queries][columns].
template <class T>
struct KeyTerms {
  const typename Operands<T>::Scalar* pairs;
  OperandRows<T> rows;  // for tiles transposed
};

template <class S, int fold>
class KeyGradients {
  using Scalar = typename S::Scalar;
  using Vector = typename S::Vector;
  using Task = BackwardTask<S, fold>;
  static constexpr int lanes = S::lanes, width = Task::width;

 public:
  explicit KeyGradients(const Task& task) : task_(task), args_(task.args) {}

  // Panels that are empty hold anything: what comes first is stored, not added.
  void start_group() {
    for (int p = 0; p < task_.panel_count(); ++p) {
      panels_[p] = {};
    }
    blocks_summed_ = 0;
  }

  void start_block() {
    if (blocks_summed_ == blocks_in_sum) {
      for (int p = 0; p < task_.panel_count(); ++p) {
        fold_panel(p);
      }
      blocks_summed_ = 0;
    }
    ++blocks_summed_;
  }

  // What a tile without rows that its pairs must not meet adds to panel p.
  template <class T>
  void add(int p, const KeyTerms<T>& to_dv, const KeyTerms<T>& to_dk) {
    if (args_.dv.data != nullptr) {
      add_products<T>(p, to_dv, args_.value_dim, task_.at.dv_panels);
    }
    if (args_.dk.data != nullptr) {
      add_products<T>(p, to_dk, args_.head_dim, task_.at.dk_panels);
    }
    panels_[p].empty = false;
  }

  // The same where some of its pairs are forbidden, and rows may hold NaN or infinity.
  void add_allowed(int p, const KeyTerms<S>& to_dv, const KeyTerms<S>& to_dk) {
    if (args_.dv.data != nullptr) {
      add_allowed_products(p, to_dv, args_.value_dim, task_.at.dv_panels);
    }
    if (args_.dk.data != nullptr) {
      add_allowed_products(p, to_dk, args_.head_dim, task_.at.dk_panels);
    }
    panels_[p].empty = false;
  }

  // Stores the group's gradients, of type In.
  template <class In>
  void store() {
    for (int p = 0; p < task_.panel_count(); ++p) {
      const bool folded = panels_[p].has_totals;
      if (folded) {
        fold_panel(p);
      } else if (panels_[p].empty) {
        clear_numbers<S>(task_.at.dk_panels + p * args_.head_dim * width, args_.head_dim * width);
        clear_numbers<S>(task_.at.dv_panels + p * args_.value_dim * width, args_.value_dim * width);
      }
      for (int v = 0; v < task_.panel_vectors(p); ++v) {
        store_keys<In>(args_.dk, p, v, folded ? task_.at.dk_totals : task_.at.dk_panels, args_.head_dim, args_.scale);
        store_keys<In>(args_.dv, p, v, folded ? task_.at.dv_totals : task_.at.dv_panels, args_.value_dim,
                       args_.heads[0].dropout.kept_scale);
      }
    }
  }

 private:
  template <class T>
  using OperandOf = typename Operands<T>::Scalar;

  // ---- Products ----

  // `targets` [panel][columns][width] gets the terms of panel p.
  template <class T>
  void add_products(int p, const KeyTerms<T>& terms, std::int64_t columns, Scalar* targets) {
    Scalar* target = targets + p * columns * width;
    const bool empty = panels_[p].empty;
    if (task_.has_edge(p)) {
      for (int v = 0; v < task_.panel_vectors(p); ++v) {
        const Range reach = task_.rows_reaching(p, {v * lanes, (v + 1) * lanes});
        add_vectors<T, 1>({terms.pairs + v * lanes, terms.rows}, reach, columns, target + v * lanes, empty);
      }
      return;
    }
    with_vectors<S::panel_vectors>(task_.panel_vectors(p), [&](auto strip) HEADWAY_LAMBDA {
      add_vectors<T, strip.size>(terms, {0, task_.rows().count}, columns, target, empty);
    });
  }

  template <class T, int NV>
  HEADWAY_NOINLINE void add_vectors(const KeyTerms<T>& terms, const Range& reach, std::int64_t columns, Scalar* target,
                                    bool empty) const {
    if constexpr (HasTiles<T>) {
      if (reach.begin < reach.end) {
        for (std::int64_t d = 0; d < columns; d += 2 * tile_side) {
          columns - d > tile_side ? add_by_tiles<T, NV, 2>(terms, reach, columns, d, target, empty)
                                  : add_by_tiles<T, NV, 1>(terms, reach, columns, d, target, empty);
        }
        return;
      }
    }
    const std::int64_t first = reach.begin / Operands<T>::fold;
    const OperandRows<T>& rows = terms.rows;
    in_strips<broadcasts<T, NV>()>(columns, [&](auto strip, std::int64_t d) HEADWAY_LAMBDA {
      constexpr int NB = strip.size;
      Accumulators<T, NV, NB> acc;
      clear<T, NV, NB>(acc);
      accumulate<T, NV, NB, Scalars::along>(acc, terms.pairs + first * width, width, rows.data + first * rows.ld + d,
                                            rows.ld, folded<T>(reach.end) - first);
      add_tile<T, NV, NB>(acc, target + d * width, width, empty);
    });
  }

  // RT tiles of columns from d on; pairs of rows out of reach are 0.
  template <class T, int NV, int RT>
  HEADWAY_INLINE void add_by_tiles(const KeyTerms<T>& terms, const Range& reach, std::int64_t columns, std::int64_t d,
                                   Scalar* target, bool empty) const {
    const std::int64_t first = reach.begin / tile_steps * tile_pairs;
    const std::int64_t steps = (reach.end + tile_steps - 1) / tile_steps - reach.begin / tile_steps;
    const OperandRows<T>& rows = terms.rows;
    const Vector lower = S::set(lowering<T>);
    const auto block = [&]<int CT>(int n) HEADWAY_LAMBDA {
      each_product<T, RT, CT>(
          [&](auto tiles) HEADWAY_LAMBDA {
            tiles.template multiply<OperandOf<T>>({rows.data + d * rows.ld + first, rows.ld, tile_side * rows.ld},
                                                  {terms.pairs + first * width + n * lanes, width, lanes}, steps);
          },
          [&](int r, int c, Vector sum) HEADWAY_LAMBDA {
            if (d + r < columns) {
              add_vector<S>(target + (d + r) * width + n * lanes + c, sum * lower, empty);
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

  // Where a row holds NaN or infinity, keys that it may not attend to must not multiply it by their 0. Same sums in the
  // same order, pair by pair.
  void add_allowed_products(int p, const KeyTerms<S>& terms, std::int64_t columns, Scalar* targets) {
    const Rows<Scalar> rows{terms.rows.data, terms.rows.ld};
    if (rows_are_finite<S>(rows, 0, task_.rows().count, columns)) {
      add_products<S>(p, terms, columns, targets);
    } else {
      add_pair_by_pair(p, terms, columns, targets + p * columns * width);
    }
  }
  HEADWAY_NOINLINE void add_pair_by_pair(int p, const KeyTerms<S>& terms, std::int64_t columns, Scalar* target) const {
    for (int key = 0; key < task_.panel_keys(p); ++key) {
      for (std::int64_t d = 0; d < columns; ++d) {
        Scalar sum = 0;
        for (int r = 0; r < task_.rows().count; ++r) {
          if ((task_.allowed_of(p)[r] >> key & 1) != 0) {
            sum = S::fma_scalar(terms.rows.data[r * terms.rows.ld + d], terms.pairs[r * width + key], sum);
          }
        }
        target[d * width + key] = (panels_[p].empty ? 0 : target[d * width + key]) + sum;
      }
    }
  }

  // ---- Sums over many blocks ----

  // Moves the sums of the last blocks to the totals. What rounding the totals loses stays in the sums, so that any
  // number of blocks adds up.
  HEADWAY_NOINLINE void fold_panel(int p) {
    if (panels_[p].empty) {
      return;
    }
    if (args_.dk.data != nullptr) {
      move_sums(task_.at.dk_panels, task_.at.dk_totals, p, args_.head_dim);
    }
    if (args_.dv.data != nullptr) {
      move_sums(task_.at.dv_panels, task_.at.dv_totals, p, args_.value_dim);
    }
    panels_[p] = {false, true};
  }
  void move_sums(Scalar* sums, Scalar* totals, int p, std::int64_t columns) const {
    for (std::int64_t n = p * columns * width; n < (p + 1) * columns * width; n += lanes) {
      const Vector sum = S::load(sums + n);
      const Vector before = panels_[p].has_totals ? S::load(totals + n) : S::zero();
      const Compensated<S> total(before, sum);
      S::store(totals + n, total.sum);
      S::store(sums + n, total.lost);
    }
  }

  template <class In>
  void store_keys(const WritableMatrix& target, int p, int v, Scalar* numbers, std::int64_t columns, double factor) {
    if (target.data == nullptr) {
      return;
    }
    const std::int64_t key = task_.group.begin + p * width + v * lanes;
    Scalar* panel = numbers + p * columns * width + v * lanes;
    const auto split = split_factor<Scalar>(factor);
    for (std::int64_t c = 0; split.second != 1 && c < columns; ++c) {
      S::store(panel + c * width, S::load(panel + c * width) * S::set(split.second));
    }
    unpack_transposed<S, In>(panel, width, S::set(split.first), target, key, at_most(task_.group.end - key, lanes),
                             columns);
  }

  struct PanelSums {
    bool empty = true, has_totals = false;
  };
  const Task& task_;
  const BackwardArgs& args_;
  PanelSums panels_[most_panels<S, fold>];
  int blocks_summed_ = 0;  // since the last fold
};

}  // namespace
}  // namespace headway::cpu
