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
#include "engines/cpu/kernel/backward.h"
#include "engines/cpu/kernel/store_tile.h"

namespace headway::cpu {
namespace {

constexpr std::int64_t short_sequence = 128;  // the most queries, and the most keys, of one
constexpr std::int64_t most_heads = 32;       // that share its keys: so many sums are added up one by one

template <class S, class In>
class ShortBackward : Backward<S, In> {
  using Base = Backward<S, In>;
  using Base::args_;
  using Base::at_;
  using Base::block_;
  using Base::group_;
  using Base::head_;
  using Base::lanes;
  using Base::panel_count;
  using Base::panel_keys;
  using Base::tile_allowed;
  using Base::tile_spans;
  using Base::width;
  using typename Base::Scalar;
  using typename Base::Vector;

 public:
  // A matter of the sequence's own lengths, so that no gradient's bits depend on what else is asked for.
  static bool suits(const BackwardArgs& args) {
    return args.queries <= short_sequence && args.ranges.keys <= smaller(short_sequence, group_keys<S>(args)) &&
           args.head_count <= most_heads;
  }

  // Scratch of a task, in Scalars.
  static std::int64_t scratch_size(const BackwardArgs& args) {
    return typename Base::Layout(args, true, nullptr).scratch.used;
  }

  ShortBackward(const BackwardArgs& args, Scalar* scratch) : Base(args, 0, true, scratch) {}

  HEADWAY_NOINLINE void run() {
    group_ = {0, args_.ranges.keys};
    this->pack_panels();
    const Rows<Scalar> keys = vector_rows(args_.key, args_.ranges.keys, args_.head_dim, at_.key_rows);
    for (std::int64_t h = 0; h < args_.head_count; ++h) {
      this->enter_head(h);
      is_first_ = h == 0;
      is_last_ = h + 1 == args_.head_count;
      const Rows<Scalar> queries = vector_rows(head_->query, args_.queries, args_.head_dim, at_.query_copy);
      const Rows<Scalar> grad_out = vector_rows(head_->grad_out, args_.queries, args_.value_dim, at_.grad_out_copy);
      compute_tiles(queries, grad_out);
      const Ahead values_after = next_keys(args_.next_value, args_.value, args_.value_dim);
      const Ahead key_gradients = written(args_.dk, args_.ranges.keys);
      add_to_keys({args_.dv, grad_out, args_.value_dim, at_.weights, head_->dropout.kept_scale, at_.dv_panels,
                   values_after, key_gradients});
      const Ahead keys_after = next_keys(args_.next_key, args_.key, args_.head_dim);
      const Ahead query_gradients = written(head_->dq, args_.queries);
      add_to_keys(
          {args_.dk, queries, args_.head_dim, at_.gradients, args_.scale, at_.dk_panels, keys_after, query_gradients});
      if (head_->dq.data != nullptr) {
        store_queries(keys);
      }
    }
  }

 private:
  // Rows whose vectors are all whole: user memory itself where its type and layout allow, else a copy.
  Rows<Scalar> vector_rows(const Matrix& matrix, std::int64_t rows, std::int64_t columns, Scalar* copy) const {
    const std::int64_t ld = padded<S>(columns);
    if (ld == columns && readable_in_place<S, In>(matrix) && Base::compact(matrix, columns)) {
      return readable_rows<S, In>(matrix, 0, rows, columns, copy);
    }
    if (ld != columns) {
      Base::clear_numbers(copy, rows * ld);
    }
    copy_rows<S, In>(matrix, 0, rows, columns, copy, ld);
    return {copy, ld};
  }

  // The next kv head's rows, while the last query head is at work.
  Ahead next_keys(const void* first, const Matrix& like, std::int64_t columns) const {
    return ahead_of<In>(is_last_ ? first : nullptr, like, args_.ranges.keys, columns);
  }

  // Rows of D columns that are about to be written: a store that misses holds up all that follow it.
  Ahead written(const WritableMatrix& matrix, std::int64_t rows) const {
    return ahead_of<In>(matrix.data, {nullptr, matrix.row_stride, matrix.column_stride}, rows, args_.head_dim);
  }

  // ---- P and dS ----

  void compute_tiles(const Rows<Scalar>& queries, const Rows<Scalar>& grad_out) {
    const BackwardHead* next = is_last_ ? nullptr : head_ + 1;
    const void* next_query = next != nullptr ? next->query.data : args_.next_query;
    const void* next_grad_out = next != nullptr ? next->grad_out.data : args_.next_grad_out;
    forbids_ = false;
    for (block_ = 0; block_ < block_count(args_); ++block_) {
      const std::int64_t row = this->rows().begin;
      this->query_ = {queries.data + row * queries.ld, queries.ld};
      this->grad_out_ = {grad_out.data + row * grad_out.ld, grad_out.ld};
      for (int p = 0; p < panel_count(); ++p) {
        this->query_ahead_ = rows_ahead(next_query, head_->query, args_.head_dim, p);
        this->grad_out_ahead_ = rows_ahead(next_grad_out, head_->grad_out, args_.value_dim, p);
        this->look_ahead_at_pairs(p);
        if (this->is_out_of_reach(p)) {
          this->skip_panel(p);
        } else {
          forbids_ |= this->compute_tile(p);
        }
      }
    }
  }

  // The same rows of the next head, once for all panels.
  Ahead rows_ahead(const void* first, const Matrix& like, std::int64_t columns, int p) const {
    if (first == nullptr || p > 0) {
      return {};
    }
    const std::int64_t bytes = this->rows().begin * like.row_stride * static_cast<std::int64_t>(sizeof(In));
    return ahead_of<In>(static_cast<const char*>(first) + bytes, like, this->rows().count, columns);
  }

  const Scalar* tile(const Scalar* tiles, std::int64_t block, int p) const {
    return tiles + (block * panel_count() + p) * this->tile_rows_ * width;
  }

  // ---- dV and dK ----

  // target [keys][columns] = factor * sum over query heads of pairs^T [keys][queries] * rows [queries][columns]
  struct KeyProduct {
    const WritableMatrix& target;
    Rows<Scalar> rows;
    std::int64_t columns;
    const Scalar* tiles;  // of the pairs
    double factor;
    Scalar* sums;                       // [keys][padded columns], where several query heads share the keys
    const Ahead &ahead, &written_next;  // rows to fetch, a row a key
  };

  void add_to_keys(const KeyProduct& product) {
    if (product.target.data == nullptr) {
      return;
    }
    if (forbids_ && !rows_are_finite<S>(product.rows, 0, args_.queries, product.columns)) {
      add_to_keys_carefully(product);
      return;
    }
    const std::int64_t vectors = padded<S>(product.columns) / lanes;
    for (std::int64_t v = 0; v < vectors; v += S::panel_vectors) {
      switch (vectors - v) {
        case 1: add_columns<1>(product, v * lanes); break;
        case 2: add_columns<2>(product, v * lanes); break;
        case 3: add_columns<3>(product, v * lanes); break;
        default: add_columns<S::panel_vectors>(product, v * lanes); break;
      }
    }
  }

  // Keys that go together, each with the rows that reach any of them.
  static constexpr int key_step = lanes >= S::tile_scalars ? lanes : width;

  template <int NV>
  HEADWAY_NOINLINE void add_columns(const KeyProduct& product, std::int64_t d) {
    for (int p = 0; p < panel_count(); ++p) {
      for (int key = 0; key < panel_keys(p); key += key_step) {
        Range reach[short_sequence / query_block];
        for (block_ = 0; block_ < block_count(args_); ++block_) {
          reach[block_] = this->rows_reaching(p, {key, key + key_step});
        }
        const int count = at_most(panel_keys(p) - key, key_step);
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
  HEADWAY_INLINE void finish_keys(const KeyProduct& product, Accumulators<S, NV, NB>& acc, std::int64_t key,
                                  std::int64_t d) {
    const std::int64_t ld = padded<S>(product.columns);
    Scalar* sums = product.sums + key * ld + d;
    if (!is_first_) {
      HEADWAY_UNROLL
      for (int c = 0; c < NB; ++c) {
        HEADWAY_UNROLL
        for (int v = 0; v < NV; ++v) {
          acc[c][v] = S::load(sums + c * ld + v * lanes) + acc[c][v];
        }
      }
    }
    if (is_last_) {
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
  HEADWAY_NOINLINE void add_to_keys_carefully(const KeyProduct& product) {
    for (int p = 0; p < panel_count(); ++p) {
      for (int key = 0; key < panel_keys(p); ++key) {
        for (std::int64_t d = 0; d < product.columns; ++d) {
          Scalar sum = 0;
          for (block_ = 0; block_ < block_count(args_); ++block_) {
            const Scalar* pairs = tile(product.tiles, block_, p);
            for (int r = 0; r < this->rows().count; ++r) {
              if ((tile_allowed(p)[r] >> key & 1) != 0) {
                sum = S::fma_scalar(pairs[r * width + key],
                                    product.rows.data[(block_ * query_block + r) * product.rows.ld + d], sum);
              }
            }
          }
          finish_key(product, sum, p * width + key, d);
        }
      }
    }
  }

  void finish_key(const KeyProduct& product, Scalar sum, std::int64_t key, std::int64_t d) {
    Scalar& total = product.sums[key * padded<S>(product.columns) + d];
    total = is_first_ ? sum : total + sum;
    if (is_last_) {
      const Scalar result = scaled(total, product.factor);
      store_rows<S, In>(padded_row<lanes>(&result, 1).elements, lanes, product.target, key, 1, d, 1);
    }
  }

  static Scalar scaled(Scalar sum, double factor) {
    const auto split = split_factor<Scalar>(factor);
    return (0 + sum) * split.first * split.second;
  }

  // ---- dQ ----

  void store_queries(const Rows<Scalar>& keys) {
    if (forbids_ && !rows_are_finite<S>(keys, 0, args_.ranges.keys, args_.head_dim)) {
      store_queries_carefully(keys);
      return;
    }
    const std::int64_t vectors = padded<S>(args_.head_dim) / lanes;
    for (std::int64_t v = 0; v < vectors; v += S::panel_vectors) {
      switch (vectors - v) {
        case 1: store_query_columns<1>(keys, v * lanes); break;
        case 2: store_query_columns<2>(keys, v * lanes); break;
        case 3: store_query_columns<3>(keys, v * lanes); break;
        default: store_query_columns<S::panel_vectors>(keys, v * lanes); break;
      }
    }
  }

  template <int NV>
  HEADWAY_NOINLINE void store_query_columns(const Rows<Scalar>& keys, std::int64_t d) {
    const void* next_out = is_last_ ? args_.next_out : head_[1].out.data;
    const Ahead ahead = ahead_of<In>(d == 0 ? next_out : nullptr, head_->out, args_.queries, args_.value_dim);
    for (block_ = 0; block_ < block_count(args_); ++block_) {
      for (int row = 0; row < this->rows().count; row += edge_rows) {
        const int count = at_most(this->rows().count - row, edge_rows);
        in_strips<broadcasts<S, NV>()>(count, [&](auto strip, std::int64_t r) HEADWAY_LAMBDA {
          constexpr int NB = strip.size;
          const std::int64_t first = this->rows().begin + row + r;
          Accumulators<S, NV, NB> acc;
          clear<S, NV, NB>(acc);
          for (int p = 0; p < panel_count(); ++p) {
            const Range& span = tile_spans(p)[row / edge_rows];
            accumulate_fetching<S, NV, NB, Scalars::across>(
                acc, keys.data + (p * width + span.begin) * keys.ld + d, keys.ld,
                this->tile_gradients(p) + (row + r) * width + span.begin, width, span.end - span.begin,
                [&](int c, int some) HEADWAY_LAMBDA {
                  if (p == 0) {
                    ahead.template fetch<fetched_locality<NB>()>(first + c, some);
                  }
                });
          }
          scale_tile<S, NV, NB>(acc, args_.scale);
          store_tile<S, In, NV, NB>(acc, head_->dq, first, d, args_.head_dim);
        });
      }
    }
  }

  HEADWAY_NOINLINE void store_queries_carefully(const Rows<Scalar>& keys) {
    for (block_ = 0; block_ < block_count(args_); ++block_) {
      for (int r = 0; r < this->rows().count; ++r) {
        for (std::int64_t d = 0; d < args_.head_dim; ++d) {
          const Scalar result = scaled(this->careful_query_sum(keys, r, d, {0, args_.ranges.keys}), args_.scale);
          store_rows<S, In>(padded_row<lanes>(&result, 1).elements, lanes, head_->dq, this->rows().begin + r, 1, d, 1);
        }
      }
    }
  }

  bool is_first_ = false, is_last_ = false;  // of the query heads
  bool forbids_ = false;                     // whether the head has forbidden pairs
};

}  // namespace
}  // namespace headway::cpu
