// Attention backward for short sequences: P and dS of all queries and keys of a head are in the second-level cache
// before anything is summed over them, so every gradient is computed once, in registers, and leaves at once:
//   dV [keys][Dv] = P^T dO      dK [keys][D] = dS^T Q      dQ [queries][D] = dS K
// Rows of dO, Q and K are the vectors and P and dS the broadcasts: nothing is transposed, and there are no partial sums
// in memory but those of dK and dV over the query heads that share a kv head. P and dS come from the tiles of
// backward_tile.h, keys in lanes, with K^T and V^T packed once. Q, K, V, O and dO are read once and three gradients are
// written: 32 S D bytes for 10 S^2 D operations, so at S = 16 memory bounds it and at S = 128 the FMA units do. The
// next head's rows are prefetched meanwhile, a few at a time: memory serves a limited number of requests at once, and a
// burst of them would delay the following products.
#pragma once

#include <cstdint>

#include "engines/cpu/kernel/ahead.h"
#include "engines/cpu/kernel/backward_ahead.h"
#include "engines/cpu/kernel/backward_block_tiles.h"
#include "engines/cpu/kernel/backward_floats.h"
#include "engines/cpu/kernel/backward_query_gradients.h"
#include "engines/cpu/kernel/backward_sums.h"
#include "engines/cpu/kernel/backward_task.h"
#include "engines/cpu/kernel/pack.h"
#include "engines/cpu/kernel/score_factor.h"
#include "engines/cpu/kernel/store_tile.h"
#include "engines/cpu/kernel/strips.h"

namespace headway::cpu {
namespace {

constexpr std::int64_t short_sequence = 128;  // the most queries, and the most keys, of one
constexpr std::int64_t most_heads = 32;       // that share its keys: so many sums are added up one by one

// One number of a gradient, times its factor.
template <class S, class In>
void store_number(const WritableMatrix& target, std::int64_t row, std::int64_t column, typename S::Scalar sum,
                  double factor) {
  const auto split = split_factor<typename S::Scalar>(factor);
  const typename S::Scalar result = (0 + sum) * split.first * split.second;
  store_rows<S, In>(padded_row<S::lanes>(&result, 1).elements, S::lanes, target, row, 1, column, 1);
}

// target [keys][columns] = factor * sum over query heads of pairs^T [keys][queries] * rows [queries][columns]
template <class S>
struct ShortProduct {
  using Scalar = typename S::Scalar;
  const WritableMatrix& target;
  Rows<Scalar> rows;
  std::int64_t columns;
  const Scalar* tiles;  // of the pairs
  double factor;
  Scalar* sums;                       // [keys][padded columns], where several query heads share the keys
  const Ahead &ahead, &written_next;  // rows to fetch, a row a key
};

// dK and dV.
template <class S, class In>
class ShortKeyGradients {
  using Scalar = typename S::Scalar;
  using Task = BackwardTask<S>;
  using Product = ShortProduct<S>;
  static constexpr int lanes = S::lanes, width = Task::width;

 public:
  explicit ShortKeyGradients(Task& task) : task_(task), args_(task.args) {}

  bool is_first = false, is_last = false;  // of the query heads, the one at hand

  // `forbids`: whether the head has forbidden pairs.
  void add(const Product& product, bool forbids) {
    if (product.target.data == nullptr) {
      return;
    }
    if (forbids && !rows_are_finite<S>(product.rows, 0, args_.queries, product.columns)) {
      add_pair_by_pair(product);
      return;
    }
    in_panels<S>(padded<S>(product.columns) / lanes,
                 [&](auto strip, std::int64_t v) HEADWAY_LAMBDA { add_columns<strip.size>(product, v * lanes); });
  }

 private:
  // Keys that go together, each with the rows that reach any of them.
  static constexpr int key_step = lanes >= S::tile_scalars ? lanes : width;

  const Scalar* tile(const Scalar* tiles, std::int64_t block, int p) const {
    return tiles + (block * task_.panel_count() + p) * task_.at.tile_rows * width;
  }

  template <int NV>
  HEADWAY_NOINLINE void add_columns(const Product& product, std::int64_t d) {
    for (int p = 0; p < task_.panel_count(); ++p) {
      for (int key = 0; key < task_.panel_keys(p); key += key_step) {
        Range reach[short_sequence / query_block];
        for (task_.block = 0; task_.block < block_count(args_); ++task_.block) {
          reach[task_.block] = task_.rows_reaching(p, {key, key + key_step});
        }
        const int count = at_most(task_.panel_keys(p) - key, key_step);
        in_strips<broadcasts<S, NV>()>(count, [&](auto strip, std::int64_t k) HEADWAY_LAMBDA {
          constexpr int NB = strip.size;
          const std::int64_t first = p * width + key + k;
          Accumulators<S, NV, NB> acc;
          clear<S, NV, NB>(acc);
          for (std::int64_t block = 0; block < block_count(args_); ++block) {
            const Range rows = reach[block];
            accumulate_fetching<S, NV, NB, Scalars::along>(
                acc, product.rows.data + (block * query_block + rows.begin) * product.rows.ld + d, product.rows.ld,
                tile(product.tiles, block, p) + rows.begin * width + key + k, width, rows.end - rows.begin,
                [&](int c, int some) HEADWAY_LAMBDA {
                  if (d == 0 && block == 0) {
                    product.ahead.template fetch<fetched_locality<NB>()>(first + c, some);
                    product.written_next.template fetch<fetched_locality<NB>()>(first + c, some);
                  }
                });
          }
          finish_keys<NV, NB>(product, acc, first, d);
        });
      }
    }
  }

  // Adds up the query heads; the last one's sums are what is stored.
  template <int NV, int NB>
  HEADWAY_INLINE void finish_keys(const Product& product, Accumulators<S, NV, NB>& acc, std::int64_t key,
                                  std::int64_t d) {
    const std::int64_t ld = padded<S>(product.columns);
    Scalar* sums = product.sums + key * ld + d;
    if (!is_first) {
      HEADWAY_UNROLL
      for (int c = 0; c < NB; ++c) {
        HEADWAY_UNROLL
        for (int v = 0; v < NV; ++v) {
          acc[c][v] = S::load(sums + c * ld + v * lanes) + acc[c][v];
        }
      }
    }
    if (is_last) {
      scale_tile<S, NV, NB>(acc, product.factor);
      store_tile<S, In, NV, NB>(acc, product.target, key, d, product.columns);
      return;
    }
    HEADWAY_UNROLL
    for (int c = 0; c < NB; ++c) {
      HEADWAY_UNROLL
      for (int v = 0; v < NV; ++v) {
        S::store(sums + c * ld + v * lanes, acc[c][v]);
      }
    }
  }

  // Where a row holds NaN or infinity, keys that it may not attend to must not multiply it by their 0. Same sums in the
  // same order, pair by pair.
  HEADWAY_NOINLINE void add_pair_by_pair(const Product& product) {
    for (int p = 0; p < task_.panel_count(); ++p) {
      for (int key = 0; key < task_.panel_keys(p); ++key) {
        for (std::int64_t d = 0; d < product.columns; ++d) {
          finish_key(product, allowed_key_sum(product, p, key, d), p * width + key, d);
        }
      }
    }
  }

  Scalar allowed_key_sum(const Product& product, int p, int key, std::int64_t d) {
    Scalar sum = 0;
    for (task_.block = 0; task_.block < block_count(args_); ++task_.block) {
      const Scalar* pairs = tile(product.tiles, task_.block, p);
      for (int r = 0; r < task_.rows().count; ++r) {
        if ((task_.allowed_of(p)[r] >> key & 1) != 0) {
          sum = S::fma_scalar(pairs[r * width + key],
                              product.rows.data[(task_.block * query_block + r) * product.rows.ld + d], sum);
        }
      }
    }
    return sum;
  }

  void finish_key(const Product& product, Scalar sum, std::int64_t key, std::int64_t d) const {
    Scalar& total = product.sums[key * padded<S>(product.columns) + d];
    total = is_first ? sum : total + sum;
    if (is_last) {
      store_number<S, In>(product.target, key, d, total, product.factor);
    }
  }

  Task& task_;
  const BackwardArgs& args_;
};

// dQ of the head at hand.
template <class S, class In>
class ShortQueryGradients {
  using Scalar = typename S::Scalar;
  using Task = BackwardTask<S>;
  static constexpr int lanes = S::lanes, width = Task::width;

 public:
  explicit ShortQueryGradients(Task& task) : task_(task), args_(task.args) {}

  // `keys`: K; `next_out`: rows to fetch, a row a query.
  void store(const Rows<Scalar>& keys, const Ahead& next_out, bool forbids) {
    if (forbids && !rows_are_finite<S>(keys, 0, args_.ranges.keys, args_.head_dim)) {
      store_pair_by_pair(keys);
      return;
    }
    in_panels<S>(padded<S>(args_.head_dim) / lanes, [&](auto strip, std::int64_t v) HEADWAY_LAMBDA {
      store_columns<strip.size>(keys, v * lanes, v == 0 ? next_out : Ahead{});
    });
  }

 private:
  template <int NV>
  HEADWAY_NOINLINE void store_columns(const Rows<Scalar>& keys, std::int64_t d, const Ahead& ahead) {
    for (task_.block = 0; task_.block < block_count(args_); ++task_.block) {
      for (int row = 0; row < task_.rows().count; row += edge_rows) {
        const int count = at_most(task_.rows().count - row, edge_rows);
        in_strips<broadcasts<S, NV>()>(count, [&](auto strip, std::int64_t r) HEADWAY_LAMBDA {
          constexpr int NB = strip.size;
          const std::int64_t first = task_.rows().begin + row + r;
          Accumulators<S, NV, NB> acc;
          clear<S, NV, NB>(acc);
          for (int p = 0; p < task_.panel_count(); ++p) {
            const Range& span = task_.spans_of(p)[row / edge_rows];
            accumulate_fetching<S, NV, NB, Scalars::across>(
                acc, keys.data + (p * width + span.begin) * keys.ld + d, keys.ld,
                task_.gradients_of(p) + (row + r) * width + span.begin, width, span.end - span.begin,
                [&](int c, int some) HEADWAY_LAMBDA {
                  if (p == 0) {
                    ahead.template fetch<fetched_locality<NB>()>(first + c, some);
                  }
                });
          }
          scale_tile<S, NV, NB>(acc, args_.scale);
          store_tile<S, In, NV, NB>(acc, task_.head->dq, first, d, args_.head_dim);
        });
      }
    }
  }

  HEADWAY_NOINLINE void store_pair_by_pair(const Rows<Scalar>& keys) {
    for (task_.block = 0; task_.block < block_count(args_); ++task_.block) {
      for (int r = 0; r < task_.rows().count; ++r) {
        for (std::int64_t d = 0; d < args_.head_dim; ++d) {
          const Scalar sum = allowed_query_sum(task_, keys, r, d, {0, args_.ranges.keys});
          store_number<S, In>(task_.head->dq, task_.rows().begin + r, d, sum, args_.scale);
        }
      }
    }
  }

  Task& task_;
  const BackwardArgs& args_;
};

template <class S, class In>
class ShortBackward {
  using Scalar = typename S::Scalar;
  using Task = BackwardTask<S>;

 public:
  // A matter of the sequence's own lengths, so that no gradient's bits depend on what else is asked for.
  static bool suits(const BackwardArgs& args) {
    return args.queries <= short_sequence && args.ranges.keys <= smaller(short_sequence, group_keys<S>(args)) &&
           args.head_count <= most_heads;
  }

  // Scratch of a task, in Scalars.
  static std::int64_t scratch_size(const BackwardArgs& args) {
    return typename Task::Layout(args, KeptTiles::all, nullptr).size;
  }

  ShortBackward(const BackwardArgs& args, Scalar* scratch) : args_(args), task_(args, 0, KeptTiles::all, scratch) {}

  HEADWAY_NOINLINE void run() {
    task_.group = {0, args_.ranges.keys};
    pack_panels<In>(task_);
    const auto& at = task_.at;
    const Rows<Scalar> keys = vector_rows(args_.key, args_.ranges.keys, args_.head_dim, at.key_rows);
    for (std::int64_t h = 0; h < args_.head_count; ++h) {
      task_.enter_head(h);
      keys_.is_first = h == 0;
      keys_.is_last = h + 1 == args_.head_count;
      const BackwardHead& head = *task_.head;
      const Rows<Scalar> queries = vector_rows(head.query, args_.queries, args_.head_dim, at.query_copy);
      const Rows<Scalar> grad_out = vector_rows(head.grad_out, args_.queries, args_.value_dim, at.grad_out_copy);
      const bool forbids = compute_tiles(queries, grad_out);
      const Ahead values_after = next_keys(args_.next_value, args_.value, args_.value_dim);
      const Ahead key_gradients = written(args_.dk, args_.ranges.keys);
      keys_.add({args_.dv, grad_out, args_.value_dim, at.weights, head.dropout.kept_scale, at.dv_panels, values_after,
                 key_gradients},
                forbids);
      const Ahead keys_after = next_keys(args_.next_key, args_.key, args_.head_dim);
      const Ahead query_gradients = written(head.dq, args_.queries);
      keys_.add(
          {args_.dk, queries, args_.head_dim, at.gradients, args_.scale, at.dk_panels, keys_after, query_gradients},
          forbids);
      if (task_.wants_dq()) {
        const void* next_out = keys_.is_last ? args_.next_out : (&head)[1].out.data;
        queries_.store(keys, ahead_of<In>(next_out, head.out, args_.queries, args_.value_dim), forbids);
      }
    }
  }

 private:
  // Rows whose vectors are all whole: user memory itself where its type and layout allow, else a copy.
  Rows<Scalar> vector_rows(const Matrix& matrix, std::int64_t rows, std::int64_t columns, Scalar* copy) const {
    const std::int64_t ld = padded<S>(columns);
    if (ld == columns && readable_in_place<S, In>(matrix) && is_compact(matrix, columns)) {
      return readable_rows<S, In>(matrix, 0, rows, columns, copy);
    }
    if (ld != columns) {
      clear_numbers<S>(copy, rows * ld);
    }
    copy_rows<S, In>(matrix, 0, rows, columns, copy, ld);
    return {copy, ld};
  }

  // The next kv head's rows, while the last query head is at work.
  Ahead next_keys(const void* first, const Matrix& like, std::int64_t columns) const {
    return ahead_of<In>(keys_.is_last ? first : nullptr, like, args_.ranges.keys, columns);
  }

  // Rows of D columns that are about to be written: a store that misses holds up all that follow it.
  Ahead written(const WritableMatrix& matrix, std::int64_t rows) const {
    return ahead_of<In>(matrix.data, {nullptr, matrix.row_stride, matrix.column_stride}, rows, args_.head_dim);
  }

  // P and dS of all pairs. Returns whether any is forbidden.
  bool compute_tiles(const Rows<Scalar>& queries, const Rows<Scalar>& grad_out) {
    const BackwardHead& head = *task_.head;
    const BackwardHead* next = keys_.is_last ? nullptr : &head + 1;
    const void* next_query = next != nullptr ? next->query.data : args_.next_query;
    const void* next_grad_out = next != nullptr ? next->grad_out.data : args_.next_grad_out;
    bool forbids = false;
    for (task_.block = 0; task_.block < block_count(args_); ++task_.block) {
      const std::int64_t row = task_.rows().begin;
      tiles_.start_block(nullptr);
      // The same rows of the next head, once for all panels.
      tiles_.ahead.query = block_ahead<In>(next_query, head.query, row, args_.queries, args_.head_dim);
      tiles_.ahead.grad_out = block_ahead<In>(next_grad_out, head.grad_out, row, args_.queries, args_.value_dim);
      for (int p = 0; p < task_.panel_count(); ++p) {
        find_pairs_ahead(task_, p, tiles_.ahead);
        if (tiles_.is_out_of_reach(p)) {
          tiles_.skip(p);
        } else {
          forbids |= tiles_.compute(p, {queries.data + row * queries.ld, queries.ld},
                                    {grad_out.data + row * grad_out.ld, grad_out.ld});
        }
        tiles_.ahead.query = tiles_.ahead.grad_out = {};
      }
    }
    return forbids;
  }

  const BackwardArgs& args_;
  Task task_;                                  // what is asked for; the queries at hand
  BlockTiles<S> tiles_{task_};                 // P and dS
  ShortKeyGradients<S, In> keys_{task_};       // dK and dV
  ShortQueryGradients<S, In> queries_{task_};  // dQ
};

}  // namespace
}  // namespace headway::cpu
