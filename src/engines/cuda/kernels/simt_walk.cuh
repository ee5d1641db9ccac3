// A tile of queries that walks over keys, in exact f32 or f64 arithmetic: what mma_walk.cuh is on tensor cores, for
// every type, size and stride.
#pragma once

#include "engines/cuda/kernels/simt_scores.cuh"
#include "engines/cuda/kernels/walk_scores.cuh"
#include "engines/cuda/spans.cuh"

namespace headway::cuda {

template <class T>
class SimtWalk {
 public:
  using Real = RealOf<T>;
  using Shape = SimtShape<Real, 4, 8, 64, sizeof(Real) == 4 ? 128 : 64>;  // 99 KiB of shared memory are enough
  static constexpr int M = Shape::M, N = Shape::N;
  using Scores = Real[M][N];
  static constexpr int threads = Shape::threads, rows = Shape::rows, keys = Shape::keys;
  static constexpr int slots = M * N;  // scores of one thread
  static constexpr int own_rows = M;   // and the rows that they belong to
  static constexpr bool walks_whole_tiles = false;
  static constexpr bool has_registers_left = false;
  static constexpr int scratch_bytes = Shape::keys * Shape::row_stride * static_cast<int>(sizeof(Real));

  // The scratch is last.
  __host__ __device__ static std::size_t walk_bytes(std::int64_t head_dim) {
    return sizeof(Real) * static_cast<std::size_t>(Shape::own_size(head_dim) + Shape::other_size()) + scratch_bytes;
  }

  __device__ SimtWalk(const Arguments& args, unsigned char* shared)
      : args_(args),
        product_{reinterpret_cast<Real*>(shared), reinterpret_cast<Real*>(shared) + Shape::own_size(args.head_dim)},
        scratch_(product_.other + Shape::other_size()) {}

  // Rows [first, first + count) of a head, count up to `rows`.
  __device__ void start(std::int64_t b, std::int64_t h, std::int64_t first, std::int64_t count) {
    b_ = b, h_ = h, first_ = first;
    sequence_ = sequence_of(args_, b);
    range_ = tile_range(args_, sequence_, b, first_, count);
    __syncthreads();  // the tile before has been read
    if (static_cast<int>(threadIdx.x) < Shape::rows) {
      ranges()[threadIdx.x] = row_range(args_, sequence_, b, first_ + threadIdx.x);
    }
    product_.fill_own(queries(), args_.head_dim);
#pragma unroll
    for (int m = 0; m < M; ++m) {
      softmax_[m] = {};
    }
  }

  // visit(key, scores) for every tile of keys that begins in [begin, end), but for those that spans leave nothing of;
  // the stage says biased or weights. All threads may use the scratch after a
  // barrier of the visit's own.
  template <class Visit>
  __device__ void walk(const Stage& stage, std::int64_t begin, std::int64_t end, const Visit& visit) {
#pragma unroll 1
    for (std::int64_t key = next_from(begin, end); key < end; key = next_from(key + Shape::keys, end)) {
      Scores scores;
      make_scores(stage, key, scores);
      visit(key, scores);
    }
  }

  __device__ std::int64_t first_key() const { return range_.begin / Shape::keys * Shape::keys; }

  // The softmax of every row over the keys that it sees, and the sink where it sees one. The stage says biased or
  // weights.
  __device__ void walk_for_softmax(const Stage& stage) {
    walk(stage, first_key(), range_.end, [&](std::int64_t, const Scores& scores) { add_to_softmax(scores); });
    const Real sink = sink_of<Real>(args_, h_);
#pragma unroll
    for (int m = 0; m < M; ++m) {
      end_softmax(softmax_[m], sink);
    }
  }

  // Which of the thread's rows a score belongs to, and where they are in the tile.
  __device__ static int own_row(int slot) { return slot / N; }
  __device__ int row_of(int own) const { return thread_.row_of(own); }
  __device__ int col_of(int slot) const { return thread_.col_of(slot % N); }
  __device__ static Real& at(Scores& scores, int slot) { return scores[slot / N][slot % N]; }

  // Over the threads that share rows.
  __device__ static double sum_over_row(double value) { return Shape::Thread::row_sum(value); }
  __device__ bool leads_rows() const { return thread_.col == 0; }  // one of them

  __device__ void store_tile(const Real (&values)[slots], Real* tile, int stride) const {
#pragma unroll
    for (int slot = 0; slot < slots; slot += 4) {
      store_four(tile + row_of(own_row(slot)) * stride + col_of(slot), values[slot], values[slot + 1], values[slot + 2],
                 values[slot + 3]);
    }
  }

 protected:
  __device__ static KeyRange* ranges() {
    __shared__ KeyRange ranges[Shape::rows];
    return ranges;
  }
  __device__ static std::uint64_t* words() {
    __shared__ std::uint64_t words[span_words<Shape::rows, Shape::keys>];
    return words;
  }
  // The first tile from `key` on of which spans leave something.
  __device__ std::int64_t next_from(std::int64_t key, std::int64_t end) const {
    return next_key_tile(args_, sequence_, b_, h_, first_, Shape::rows, key, end, Shape::keys);
  }
  __device__ RowSource<T> queries() const {
    return {args_.query, b_, h_, sequence_.query_begin, first_, sequence_.query_count};
  }

  // S = Q K^T  [rows, keys], modified as far as the stage says
  __device__ void make_scores(const Stage& stage, std::int64_t key, Scores& scores) {
    const RowSource<T> keys_of_tile(args_.key, b_, h_ / args_.group, sequence_.key_begin, key, sequence_.key_count);
    product_.run(thread_, queries(), keys_of_tile, args_.head_dim, scores);
    __syncthreads();  // without features there was no barrier
    const Modifiers<Real> modifiers(args_, sequence_, b_, h_);
    if (stage == Stage::scaled || stage == Stage::capped) {
#pragma unroll
      for (int m = 0; m < M; ++m) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
          scores[m][n] = modifiers.scaled(scores[m][n]);
        }
      }
      settle(stage, key, scores);
#pragma unroll
      for (int m = 0; m < M; ++m) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
          scores[m][n] = stage == Stage::capped ? modifiers.capped(scores[m][n]) : scores[m][n];
        }
      }
      return;
    }
    const auto where = [&](int r, int c) {
      const KeyRange range = ranges()[r];
      return Pair{first_ + r, key + c, key + c >= range.begin && key + c < range.end};
    };
    const bool plain = is_plain(range_, key, Shape::keys, modifiers.only_scale());
    modify_tile(thread_, modifiers, plain, where, scratch_, static_cast<Real*>(nullptr), scores);
    if (plain) {
      each_slot(scores, [](Real& score, int) { score = Modifiers<Real>::of_allowed(score); });
    }
    if (has_holes(args_, sequence_, b_, h_, first_, Shape::rows, key, Shape::keys)) {
      fill_span_words<Shape::rows, Shape::keys>(args_, sequence_, b_, h_, first_, key, words());
      __syncthreads();
      forbid_by_words<false, Shape::keys>(thread_, words(), scores);
    }
    settle(stage, key, scores);
  }

  template <class Visit>
  __device__ static void each_slot(Scores& scores, const Visit& visit) {
#pragma unroll
    for (int slot = 0; slot < slots; ++slot) {
      visit(at(scores, slot), slot);
    }
  }

  // Finds scores again that say too little.
  __device__ void settle(const Stage& stage, std::int64_t key, Scores& scores) {
    bool any = false;
    each_slot(scores, [&](Real& score, int) { any |= is_unsettled(stage, score); });
    if (!any) [[likely]] {
      return;
    }
    visit_in_loop(scores, [&](Real& score, int slot) {
      const std::int64_t i = first_ + row_of(own_row(slot)), j = key + col_of(slot);
      if (is_unsettled(stage, score) && i < sequence_.query_count && j < sequence_.key_count) {
        score = settled<T>(args_, stage, b_, h_, i, j);
      }
    });
  }

  __device__ void add_to_softmax(const Scores& scores) {
#pragma unroll
    for (int m = 0; m < M; ++m) {
      Real highest = -infinity<Real>();
#pragma unroll
      for (int n = 0; n < N; ++n) {
        highest = higher(highest, scores[m][n]);
      }
      softmax_[m].raise(thread_.row_maximum(highest));
      Real sum = 0;
#pragma unroll
      for (int n = 0; n < N; ++n) {
        sum += exponential(scores[m][n] - reference(softmax_[m].highest));
      }
      softmax_[m].total += thread_.row_sum(sum);
    }
  }

  const Arguments& args_;
  SimtProduct<T, Shape, short_chain<Real>> product_;
  Real* scratch_;
  typename Shape::Thread thread_;
  std::int64_t b_ = 0, h_ = 0, first_ = 0;
  Sequence sequence_;
  TileRange range_;
  RowSoftmax<Real> softmax_[M];
};

}  // namespace headway::cuda
