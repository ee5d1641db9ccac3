// Forward in exact f32 or f64 arithmetic, for every option, size and stride.
//
// A block owns a tile of queries (128 in f32) of one head and one span of value features, and walks over the keys of
// its rows' ranges, 64 at a time, with an online softmax. Q is read once; K and V once for each query tile, mostly from
// L2. A tile costs 2 rows keys (D + Dv) multiply-adds against (D + Dv) keys loads: the multiply-add units bound it,
// next the reads of shared memory (4 loads of 16 bytes for 64 multiply-adds).
//
// A forbidden pair has weight 0, and 0 * NaN would be NaN. The first walk does not care; only where its result holds a
// NaN are the keys walked again, leaving out forbidden pairs one by one. Rows that attend to no NaN get the same bits
// both times.
//
// One running sum over a million equal terms drifts by a hundredth. Sums::compensated adds 32 keys at a time to sums
// that carry what rounding took from them, and products of features in short chains; its registers allow half the rows,
// which few queries don't fill anyway.
#pragma once

#include "engines/cuda/kernels/launch.cuh"
#include "engines/cuda/kernels/plain_again.cuh"
#include "engines/cuda/kernels/simt_pages.cuh"
#include "engines/cuda/kernels/simt_scores.cuh"
#include "engines/cuda/kernels/softmax.cuh"
#include "engines/cuda/spans.cuh"

namespace headway::cuda {

enum class Sums : std::uint8_t { running, compensated };

// Where keys and values lie: in one tensor, or in pages of T or of 8-bit elements.
template <class T>
struct InTensor {
  using Stored = T;
  __device__ static RowSource<T> rows(const Arguments& args, const Rows& view, const PageScales&,
                                      const Sequence& sequence, std::int64_t b, std::int64_t g, std::int64_t first) {
    return {view, b, g, sequence.key_begin, first, sequence.key_count};
  }
};

template <class Element>
struct InPages {
  using Stored = Element;
  __device__ static PagedSource<Element> rows(const Arguments& args, const Rows& view, const PageScales& scales,
                                              const Sequence& sequence, std::int64_t b, std::int64_t g,
                                              std::int64_t first) {
    return {args.pages, scales, view, b, g, first, sequence.key_count};
  }
};

// Width: value features of a block.
template <class T, int Width, class Tile, Sums Kind, class Keys = InTensor<T>>
class SimtForward {
 public:
  using Real = RealOf<T>;
  using Shape = Tile;
  static constexpr int M = Shape::M, N = Shape::N, W = Width * 16 / Shape::threads;
  static constexpr int value_stride = Width + simt_pad;
  static constexpr int chain = Kind == Sums::running && sizeof(Real) == sizeof(float) ? 0 : short_chain<Real>;

  __host__ static std::size_t shared_bytes(std::int64_t head_dim) {
    return sizeof(Real) * static_cast<std::size_t>(Shape::own_size(head_dim) + Shape::other_size() +
                                                   Shape::keys * (Shape::row_stride + value_stride));
  }

  __device__ SimtForward(const ForwardArguments& arguments, Real* shared)
      : args_(arguments),
        product_{shared, shared + Shape::own_size(arguments.head_dim)},
        weights_(product_.other + Shape::other_size()),
        values_(weights_ + Shape::keys * Shape::row_stride) {}

  // The tile-th block of rows of head h of item b, value features from `feature` on.
  __device__ void run(std::int64_t b, std::int64_t h, std::int64_t tile, std::int64_t feature) {
    b_ = b, h_ = h, g_ = h / args_.group, first_ = tile * Shape::rows, feature_ = feature;
    __syncthreads();  // the tile before has been read
    if (threadIdx.x == 0) {
      here().sequence = sequence_of(args_, b);
      here().range = tile_range(args_, here().sequence, b, first_, Shape::rows);
    }
    __syncthreads();
    if (first_ >= here().sequence.query_count) {
      return;
    }
    if (static_cast<int>(threadIdx.x) < Shape::rows) {
      here().rows[threadIdx.x] = row_keys(args_, here().sequence, b, h, first_ + threadIdx.x);
    }
    product_.fill_own(queries(), args_.head_dim);
#pragma unroll 1  // one copy of the code for both walks
    for (int careful = 0; careful < 2; ++careful) {
      walk(careful != 0);
      if (!__syncthreads_or(holds_nan(out_))) {
        break;
      }
    }
    store();
    do_again();
  }

 private:
  // What all threads know about the tile, in shared memory to save registers.
  struct Here {
    Sequence sequence;
    TileRange range;
    KeyRange rows[Shape::rows];
    bool again[Shape::rows];
    std::uint64_t words[span_words<Shape::rows, Shape::keys>];
  };
  __device__ static Here& here() {
    __shared__ Here here;
    return here;
  }

  __device__ RowSource<T> queries() const {
    return {args_.query, b_, h_, here().sequence.query_begin, first_, here().sequence.query_count};
  }

  __device__ void walk(bool careful) {
#pragma unroll
    for (int m = 0; m < M; ++m) {
      rows_[m] = {};
      lost_total_[m] = 0;
#pragma unroll
      for (int w = 0; w < W; ++w) {
        out_[m][w] = lost_[m][w] = 0;
      }
    }
    const Modifiers<Real> modifiers(args_, here().sequence, b_, h_);
    const auto next_from = [&](std::int64_t key) {
      return next_key_tile(args_, here().sequence, b_, h_, first_, Shape::rows, key, here().range.end, Shape::keys);
    };
    const std::int64_t begin = next_from(here().range.begin / Shape::keys * Shape::keys);
    const bool ahead = Shape::copies_ahead(args_.head_dim);
    const auto keys_at = [&](std::int64_t key) {
      return Keys::rows(args_, args_.key, args_.pages.key_scales, here().sequence, b_, g_, key);
    };
    if (ahead && begin < here().range.end) {
      product_.start_others(keys_at(begin), args_.head_dim);
    }
#pragma unroll 1
    for (std::int64_t key = begin; key < here().range.end; key = next_from(key + Shape::keys)) {
      ptx::commit_copies();  // of K
      __syncthreads();       // weights and values of the step before have been read
      const auto values = Keys::rows(args_, args_.value, args_.pages.value_scales, here().sequence, b_, g_, key);
      start_rows<Shape::threads, Shape::keys, Width>(values, feature_, args_.value_dim, values_, value_stride);
      ptx::commit_copies();  // of V, under way while the scores are computed
      Real scores[M][N];     // S = Q K^T  [rows, keys]
      if (ahead) {
        ptx::wait_for_copies<1>();
        __syncthreads();
        product_.run_filled(thread_, args_.head_dim, scores);
      } else {
        product_.run(thread_, queries(), keys_at(key), args_.head_dim, scores);
      }
      const auto where = [&](int r, int c) {
        const KeyRange range = here().rows[r];
        return Pair{first_ + r, key + c, key + c >= range.begin && key + c < range.end};
      };
      // A careful walk tells allowed pairs from forbidden ones by their scores (modifiers.cuh).
      const bool plain = !careful && is_plain(here().range, key, Shape::keys, modifiers.only_scale());
      modify_tile(thread_, modifiers, plain, where, weights_, static_cast<Real*>(nullptr), scores);
      if (!plain) {
        __syncthreads();  // every thread has its scores out of what becomes weights_
      }
      if (has_holes(args_, here().sequence, b_, h_, first_, Shape::rows, key, Shape::keys)) {
        fill_span_words<Shape::rows, Shape::keys>(args_, here().sequence, b_, h_, first_, key, here().words);
        __syncthreads();
        forbid_by_words<false, Shape::keys>(thread_, here().words, scores);
      }
      weigh(key, careful, scores);
      ptx::wait_for_copies<0>();
      __syncthreads();
      if (const std::int64_t next = ahead ? next_from(key + Shape::keys) : here().range.end; next < here().range.end) {
        product_.start_others(keys_at(next), args_.head_dim);  // under way while P V is computed
      }
      // O += P V  [rows, features]
      if (careful) {
        add_products<true>();
      } else {
        add_products<false>();
      }
    }
#pragma unroll
    for (int m = 0; m < M; ++m) {
      rows_[m].total = thread_.row_sum(rows_[m].total);
    }
  }

  // Scores become weights relative to the row's highest score, in shared memory as [keys][rows]. A careful walk marks
  // forbidden pairs by the sign of their 0.
  __device__ void weigh(std::int64_t key, bool careful, Real (&scores)[M][N]) {
    std::uint64_t forbidden = 0;
    if (careful) {
#pragma unroll
      for (int slot = 0; slot < M * N; ++slot) {
        forbidden |= std::uint64_t{scores[slot / N][slot % N] == -infinity<Real>()} << slot;
      }
    }
#pragma unroll
    for (int m = 0; m < M; ++m) {
      Real highest = -infinity<Real>();
#pragma unroll
      for (int n = 0; n < N; ++n) {
        highest = fmax(highest, scores[m][n]);  // a NaN makes its row NaN in the sum
      }
      const Real factor = rows_[m].raise(thread_.row_maximum(highest));
      const Real base = reference(rows_[m].highest);
      Real sum = 0;
#pragma unroll
      for (int n = 0; n < N; ++n) {
        scores[m][n] = exponential(scores[m][n] - base);
        sum += scores[m][n];
      }
      lost_total_[m] *= factor;
      add(sum, rows_[m].total, lost_total_[m]);  // of this thread's columns, until the end
#pragma unroll
      for (int w = 0; w < W; ++w) {
        out_[m][w] *= factor;
        lost_[m][w] *= factor;
      }
    }
    if (args_.dropout.active) {
      const std::uint64_t kept = kept_bits<M, N>(thread_, args_.dropout, b_, h_, first_, key);
#pragma unroll
      for (int slot = 0; slot < M * N; ++slot) {
        scores[slot / N][slot % N] = (kept >> slot & 1) != 0 ? scores[slot / N][slot % N] : Real(0);
      }
    }
    if (careful) {
#pragma unroll
      for (int slot = 0; slot < M * N; ++slot) {
        scores[slot / N][slot % N] = (forbidden >> slot & 1) != 0 ? -Real(0) : scores[slot / N][slot % N];
      }
    }
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int m = 0; m < M; m += 4) {
        store_four(weights_ + thread_.col_of(n) * Shape::row_stride + thread_.row_of(m), scores[m][n], scores[m + 1][n],
                   scores[m + 2][n], scores[m + 3][n]);
      }
    }
  }

  template <bool Skip>
  __device__ void add_products() {
    if constexpr (Kind == Sums::running) {
      multiply<Skip>(thread_, weights_, Shape::row_stride, values_, value_stride, Shape::keys, out_);
      return;
    }
    constexpr int together = 32;
#pragma unroll 1
    for (int k = 0; k < Shape::keys; k += together) {
      Real part[M][W] = {};
      multiply<Skip>(thread_, weights_ + k * Shape::row_stride, Shape::row_stride, values_ + k * value_stride,
                     value_stride, together, part);
#pragma unroll
      for (int m = 0; m < M; ++m) {
#pragma unroll
        for (int w = 0; w < W; ++w) {
          add(part[m][w], out_[m][w], lost_[m][w]);
        }
      }
    }
  }

  __device__ static void add(Real term, Real& sum, Real& lost) {
    CompensatedSum<Real> compensated{sum, Kind == Sums::compensated ? lost : Real(0)};
    compensated.add(term);
    sum = Kind == Sums::compensated ? compensated.value : sum + term;
    lost = compensated.lost;
  }

  __device__ void store() {
    const Real sink = sink_of<Real>(args_, h_);
    const Real kept_scale = static_cast<Real>(args_.dropout.kept_scale);
#pragma unroll
    for (int m = 0; m < M; ++m) {
      const std::int64_t i = first_ + thread_.row_of(m);
      if (i >= here().sequence.query_count) {
        continue;
      }
      const RowEnd<Real> end = close_row(rows_[m], sink, i >= here().sequence.real_queries);
      const std::int64_t row = here().sequence.query_begin + i;
      T* out = head_of<T>(args_.out, b_, h_) + row * args_.out.row;
#pragma unroll
      for (int w = 0; w < W; ++w) {
        const std::int64_t d = feature_ + thread_.col_of(w);
        if (d < args_.value_dim) {
          out[d * args_.out.feature] = element<T>(rows_[m].empty() ? Real(0) : out_[m][w] * end.factor * kept_scale);
        }
      }
      if (args_.lse.data != nullptr && feature_ == 0 && thread_.col == 0) {
        head_of<Real>(args_.lse, b_, h_)[row * args_.lse.row] = end.lse;
      }
    }
  }

  // Rows that the walk could not do, a warp for each.
  __device__ void do_again() {
    bool any = false;
#pragma unroll
    for (int m = 0; m < M; ++m) {
      const int r = thread_.row_of(m);
      const bool again = needs_plain_row(args_, rows_[m], here().rows[r]);
      here().again[r] = again;
      any |= again;
    }
    if (__syncthreads_or(any) == 0) {
      return;
    }
    for (int r = static_cast<int>(threadIdx.x) / 32; r < Shape::rows; r += Shape::threads / 32) {
      if (here().again[r]) {
        attend_plainly<T, typename Keys::Stored>(args_, b_, h_, first_ + r, feature_,
                                                 smaller(feature_ + Width, args_.value_dim));
      }
    }
  }

  const ForwardArguments& args_;
  SimtProduct<T, Shape, chain> product_;
  Real* weights_;  // [keys][rows]
  Real* values_;   // [keys][Width]
  typename Shape::Thread thread_;
  std::int64_t b_, h_, g_, first_, feature_;
  RowSoftmax<Real> rows_[M];
  Real out_[M][W];
  Real lost_[M][W], lost_total_[M];  // what rounding added to them; unused by running sums
};

template <class T, int Width, class Shape, Sums Kind, class Keys>
__global__ void __launch_bounds__(Shape::threads, 256 / Shape::threads)
    simt_forward(const __grid_constant__ ForwardArguments arguments, std::int64_t row_tiles, std::int64_t spans) {
  extern __shared__ __align__(16) unsigned char shared[];
  using Forward = SimtForward<T, Width, Shape, Kind, Keys>;
  Forward forward(arguments, reinterpret_cast<typename Forward::Real*>(shared));
  const std::int64_t tasks = arguments.batch * arguments.heads * row_tiles * spans;
  for (std::int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const std::int64_t span = task % spans, tile = task / spans % row_tiles, head = task / spans / row_tiles;
    // Late rows see the most keys when causal: they start first.
    forward.run(head / arguments.heads, head % arguments.heads, row_tiles - 1 - tile, span * Width);
  }
}

template <class T, int Width, class Shape, Sums Kind, class Keys>
Launch simt_forward_launch_of(const char* name, const ForwardArguments& arguments) {
  using Forward = SimtForward<T, Width, Shape, Kind, Keys>;
  Launch launch;
  launch.name = name;
  launch.kernel = reinterpret_cast<const void*>(simt_forward<T, Width, Shape, Kind, Keys>);
  launch.threads = Shape::threads;
  launch.shared_bytes = Forward::shared_bytes(arguments.head_dim);
  launch.query_block = Shape::rows;
  launch.key_block = Shape::keys;
  launch.row_tiles = blocks(arguments.query_len, Shape::rows);
  launch.spans = arguments.value_dim <= Width ? 1 : blocks(arguments.value_dim, Width);
  launch.tasks = arguments.batch * arguments.heads * launch.row_tiles * launch.spans;
  return launch;
}

}  // namespace headway::cuda
