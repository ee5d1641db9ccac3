// The gradient of every pair of a tile, in exact f32 or f64 arithmetic:
//   p = factor exp(s - base)   dp = dropout_factor <grad_out(i), v(j)>   ds = p (dp - delta(i))
// where base is lse and factor 1 but for coarse rows, whose scores have the bits of plain_rows.cuh here.
// A tile's rows may be queries and its columns keys, or the other way round: what differs is only which is which.
#pragma once

#include "engines/cuda/kernels/plain_rows.cuh"
#include "engines/cuda/kernels/simt_scores.cuh"

namespace headway::cuda {

// What a pass over a tile needs of its queries.
template <class Real>
struct QueryStats {
  KeyRange range;
  Real base, factor, delta;
};

template <class T, bool KeysAreRows, class Shape>
class SimtPairs {
 public:
  using Real = RealOf<T>;
  static constexpr int M = Shape::M, N = Shape::N;
  static constexpr int queries = KeysAreRows ? Shape::keys : Shape::rows;
  static constexpr int keys = KeysAreRows ? Shape::rows : Shape::keys;

  // Numbers of shared memory.
  __host__ __device__ static int size(const Arguments& args) {
    return Shape::own_size(args.head_dim) + Shape::own_size(args.value_dim) + Shape::other_size() +
           (args.softcap != 0 ? 2 : 1) * Shape::keys * Shape::row_stride;
  }

  // Without `coarse` such rows' lse is +inf.
  __device__ SimtPairs(const Arguments& args, const Rows& grad_out, const Rows& lse, const Rows& delta,
                       const CoarseRows* coarse, Real* shared)
      : args_(args), grad_out_(grad_out), lse_(lse), delta_(delta), coarse_(coarse) {
    Real* other = shared + Shape::own_size(args.head_dim) + Shape::own_size(args.value_dim);
    scores_ = {shared, other};
    grads_ = {shared + Shape::own_size(args.head_dim), other};
    weights = other + Shape::other_size();
    slopes_ = weights + Shape::keys * Shape::row_stride;
  }

  Real* weights;  // [keys][rows] numbers of shared memory, free between calls

  __device__ void set_head(std::int64_t b, std::int64_t h, const Sequence& sequence) {
    b_ = b, h_ = h, g_ = h / args_.group, sequence_ = sequence;
  }

  // The tile's own rows, which stay for many tiles of the others.
  __device__ void fill_rows_of_tile(std::int64_t first) {
    first_row_ = first;
    scores_.fill_own(KeysAreRows ? rows_of_keys(args_.key, first) : rows_of_queries(args_.query, first),
                     args_.head_dim);
    grads_.fill_own(KeysAreRows ? rows_of_keys(args_.value, first) : rows_of_queries(grad_out_, first),
                    args_.value_dim);
  }

  __device__ void fill_stats(std::int64_t first_query) {
    if (static_cast<int>(threadIdx.x) < queries) {
      const std::int64_t i = first_query + threadIdx.x, row = sequence_.query_begin + i;
      QueryStats<Real> one{{0, 0}, 0, 0, 0};
      if (i < sequence_.real_queries) {
        one.range = row_keys(args_, sequence_, b_, h_, i);
        const Real lse = head_of<Real>(lse_, b_, h_)[row * lse_.row];
        const WeightBase<Real> weight =
            coarse_ != nullptr ? weight_base<Summing::in_order>(*coarse_, b_, h_, row, lse) : WeightBase<Real>{lse, 1};
        one.base = weight.base;
        one.factor = weight.factor;
        one.delta = head_of<Real>(delta_, b_, h_)[row * delta_.row];
      }
      stats()[threadIdx.x] = one;
    }
  }

  // p [rows, cols] with dropout, or ds; 0 where forbidden, which sets that pair's bit in `forbidden`. ds is also
  // multiplied by softcap's slope when `to_scores` is set. `settles`: scores that say too little are found again, and
  // rows that are left out are forbidden whatever their scores are. The stats of the tile's queries must be in place.
  __device__ void run(const Modifiers<Real>& modifiers, std::int64_t first_col, bool plain, bool only_weights,
                      bool to_scores, bool settles, Real (&result)[M][N], std::uint64_t& forbidden) {
    const std::int64_t first_query = KeysAreRows ? first_col : first_row_;
    const std::int64_t first_key = KeysAreRows ? first_row_ : first_col;
    scores_.run(thread, KeysAreRows ? rows_of_keys(args_.key, first_row_) : rows_of_queries(args_.query, first_row_),
                KeysAreRows ? rows_of_queries(args_.query, first_col) : rows_of_keys(args_.key, first_col),
                args_.head_dim, result);
    __syncthreads();  // without features there was no barrier
    const auto where = [&](int r, int c) {
      const int query = KeysAreRows ? c : r, key = KeysAreRows ? r : c;
      const KeyRange range = stats()[query].range;
      const std::int64_t j = first_key + key;
      return Pair{first_query + query, j, j >= range.begin && j < range.end};
    };
    const bool capped = args_.softcap != 0 && to_scores;
    modify_tile(thread, modifiers, plain, where, weights, capped ? slopes_ : nullptr, result);
    if (has_holes(args_, sequence_, b_, h_, first_query, queries, first_key, keys)) {
      fill_span_words<queries, keys>(args_, sequence_, b_, h_, first_query, first_key, words());
      __syncthreads();
      forbid_by_words<KeysAreRows, keys>(thread, words(), result);
    }
    if (settles) {
      settle(first_query, first_key, capped && !plain ? slopes_ : nullptr, result);
    }
    Real* own = weights + threadIdx.x;
    forbidden = 0;
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const bool none = result[m][n] == -infinity<Real>();
        forbidden |= std::uint64_t{none} << (m * N + n);
        const QueryStats<Real> query = stats_of(m, n);
        result[m][n] = none ? Real(0) : exponential(result[m][n] - query.base) * query.factor;
        own[(m * N + n) * Shape::threads] = result[m][n];
      }
    }
    const std::uint64_t kept = !args_.dropout.active ? ~std::uint64_t{0}
                               : KeysAreRows
                                   ? kept_bits_transposed<M, N>(thread, args_.dropout, b_, h_, first_key, first_query)
                                   : kept_bits<M, N>(thread, args_.dropout, b_, h_, first_query, first_key);
    const Real kept_scale = static_cast<Real>(args_.dropout.kept_scale);
    if (only_weights) {
#pragma unroll
      for (int m = 0; m < M; ++m) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
          result[m][n] = (kept >> (m * N + n) & 1) != 0 ? result[m][n] * kept_scale : Real(0);
        }
      }
      return;
    }
    grads_.run(thread, KeysAreRows ? rows_of_keys(args_.value, first_row_) : rows_of_queries(grad_out_, first_row_),
               KeysAreRows ? rows_of_queries(grad_out_, first_col) : rows_of_keys(args_.value, first_col),
               args_.value_dim, result);
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const int at = m * N + n;
        const Real dp = (kept >> at & 1) != 0 ? result[m][n] * kept_scale : result[m][n] * Real(0);
        Real ds = own[at * Shape::threads] * (dp - stats_of(m, n).delta);
        if (capped) {
          ds *= plain ? Real(1) : slopes_[at * Shape::threads + threadIdx.x];
        }
        result[m][n] = (forbidden >> at & 1) != 0 ? Real(0) : ds;
      }
    }
  }

  typename Shape::Thread thread;

 private:
  __device__ void settle(std::int64_t first_query, std::int64_t first_key, Real* slopes, Real (&scores)[M][N]) const {
    visit_in_loop(scores, [&](Real& score, int slot) {
      const int row = thread.row_of(slot / N), col = thread.col_of(slot % N);
      if (coarse_ == nullptr && stats_of(slot / N, slot % N).base == infinity<Real>()) {
        score = -infinity<Real>();
      } else if (is_odd_score(score)) {
        Real slope;
        score = settled_score<T, Summing::in_order>(args_, b_, h_, first_query + (KeysAreRows ? col : row),
                                                    first_key + (KeysAreRows ? row : col), slope);
        if (slopes != nullptr) {
          slopes[slot * Shape::threads + threadIdx.x] = slope;
        }
      }
    });
  }

  __device__ static QueryStats<Real>* stats() {
    __shared__ QueryStats<Real> stats[queries];
    return stats;
  }
  __device__ static std::uint64_t* words() {
    __shared__ std::uint64_t words[span_words<queries, keys>];
    return words;
  }
  __device__ QueryStats<Real> stats_of(int m, int n) const {
    return stats()[KeysAreRows ? thread.col_of(n) : thread.row_of(m)];
  }
  __device__ RowSource<T> rows_of_queries(const Rows& view, std::int64_t first) const {
    return {view, b_, h_, sequence_.query_begin, first, sequence_.real_queries};
  }
  __device__ RowSource<T> rows_of_keys(const Rows& view, std::int64_t first) const {
    return {view, b_, g_, sequence_.key_begin, first, sequence_.key_count};
  }

  const Arguments& args_;
  const Rows &grad_out_, &lse_, &delta_;
  const CoarseRows* coarse_;
  SimtProduct<T, Shape> scores_, grads_;
  Real* slopes_;  // where there is a softcap
  std::int64_t b_ = 0, h_ = 0, g_ = 0, first_row_ = 0;
  Sequence sequence_;
};

}  // namespace headway::cuda
