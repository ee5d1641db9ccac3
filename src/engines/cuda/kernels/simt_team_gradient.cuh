// Gradients of f32 in exact arithmetic, for head dims up to Width, every option and stride: those of query, or of key
// and value in one walk. The formulas and the rules for NaN are those of simt_gradient.cuh.
//
// A block owns 128 rows (64 with 128 features), queries or keys, and walks over the rows of the other side, 64 at a
// time, in one fixed order. With own rows A, B (q, grad_out; or k, v) and the other side's A', B' a step is
//   S = A A'^T | dP = B B'^T     p = exp(S - lse), ds = p (dP - delta)     dk += ds A' | dv += p B', or dq += ds A'
// where | parts what the two teams of 128 threads do at the same time; of p and ds each does half of the rows, and of
// dq half of the keys of each step. So every thread has the sums of one gradient, in blocks of 8 x 8. 64 rows of A' and
// B' are copied a step ahead where shared memory holds them twice, and each is read for two products: 3 or 4 products
// of rows x 64 x D for 2 x 64 x D loads. The multiply-add units bound it, next the reads of shared memory: 3 of 16
// bytes for 32 multiply-adds in S and dP, 4 for 64 in the sums. About a fifth of the time goes into what lies between.
#pragma once

#include "engines/cuda/kernels/plain_rows.cuh"
#include "engines/cuda/kernels/simt_scores.cuh"
#include "engines/cuda/kernels/simt_team_tile.cuh"
#include "engines/cuda/ptx/shared_size.cuh"
#include "engines/cuda/spans.cuh"

namespace headway::cuda {

template <bool KeysAreRows, int Width>
class SimtTeamGradient {
 public:
  static constexpr int columns = Width / 8;
  using Thread = TeamThread<columns>;
  static constexpr int rows = 2 * Thread::span, cols = 64;
  static constexpr int M = 8, N = cols / columns, W = 8, half = M / 2;

  __host__ __device__ static std::size_t shared_bytes(const Arguments& args, int stages) {
    return sizeof(Here) + sizeof(float) * static_cast<std::size_t>(2 * own_size + 2 * stages * others_size +
                                                                   (args.softcap != 0 ? 3 : 2) * pairs_size);
  }

  __device__ SimtTeamGradient(const GradientArguments& args, unsigned char* shared)
      : args_(args),
        here_(*reinterpret_cast<Here*>(shared)),
        own_(reinterpret_cast<float*>(shared + sizeof(Here))),
        pairs_(own_ + 2 * own_size),
        slopes_(args.softcap != 0 ? pairs_ + 2 * pairs_size : nullptr),
        others_(pairs_ + (args.softcap != 0 ? 3 : 2) * pairs_size),
        stages_(ptx::dynamic_shared_bytes() < shared_bytes(args, 2) ? 1 : 2),
        depth_(padded(width(thread_.team))) {}

  // `head` counts kv heads when the rows are keys.
  __device__ void run(std::int64_t b, std::int64_t head, std::int64_t tile) {
    b_ = b, head_ = head, first_ = tile * rows;
    __syncthreads();  // the tile before has been read
    if (threadIdx.x == 0) {
      here_.sequence = sequence_of(args_, b);
    }
    __syncthreads();
    const std::int64_t count = KeysAreRows ? here_.sequence.key_count : here_.sequence.query_count;
    if (first_ >= count) {
      return;
    }
    fill_own();
#pragma unroll 1  // one copy of the code for both walks
    for (int careful = 0; careful < 2; ++careful) {
      walk(careful != 0);
      if (!__syncthreads_or(holds_not_finite(sums_) || odd_)) {
        break;
      }
    }
    const float scale = bounded<float>(args_.scale);
    if constexpr (KeysAreRows) {
      thread_.team == 0 ? store(args_.gradient, args_.head_dim, count, scale)
                        : store(args_.value_gradient, args_.value_dim, count, 1.0f);
    } else {
      join_sums();
      if (thread_.team == 0) {
        store(args_.gradient, args_.head_dim, count, scale);
      }
    }
  }

 private:
  static constexpr int queries = KeysAreRows ? cols : rows, stats_stages = KeysAreRows ? 2 : 1;
  static constexpr int keys = KeysAreRows ? rows : cols;
  static_assert(queries * sizeof(KeyRange) <= cols * rows * sizeof(float));
  static_assert(span_words<queries, keys> * sizeof(std::uint64_t) <= cols * rows * sizeof(float));
  static constexpr int own_size = Width * rows, others_size = cols * Width, pairs_size = cols * rows;
  using Others = Swizzled<Width>;
  using Pairs = Swizzled<rows>;  // [cols][rows]

  // What all threads know about the tile and the step, in shared memory to save registers.
  struct alignas(16) Here {
    Sequence sequence;
    float stats[2][stats_stages][queries];  // lse, delta
    bool plain[2], holes[2];                // of each stage's step
  };
  // A step's rows of the other side: of query head h, from `first` on.
  struct Place {
    std::int64_t h, first;
  };

  // Whose rows are in the same order for both teams.
  __device__ const SimtThread<columns, 128 / columns>& sums_thread() const { return thread_; }

  __device__ float* own(int team) const { return own_ + team * own_size; }
  __device__ float* others(int team, int stage) const { return others_ + (team * stages_ + stage) * others_size; }
  __device__ float* pairs(int which) const { return pairs_ + which * pairs_size; }
  __device__ float* stats(int which, int stage) const { return here_.stats[which][KeysAreRows ? stage : 0]; }
  __device__ std::int64_t width(int team) const { return team == 0 ? args_.head_dim : args_.value_dim; }
  __device__ static int padded(std::int64_t width) {
    return static_cast<int>((width + team_step - 1) / team_step * team_step);
  }

  __device__ RowSource<float> queries_from(int team, std::int64_t h, std::int64_t first) const {
    return {team == 0 ? args_.query : args_.grad_out,
            b_,
            h,
            here_.sequence.query_begin,
            first,
            here_.sequence.real_queries};
  }
  __device__ RowSource<float> keys_from(int team, std::int64_t g, std::int64_t first) const {
    return {team == 0 ? args_.key : args_.value, b_, g, here_.sequence.key_begin, first, here_.sequence.key_count};
  }

  // As columns [features][rows]; where they are queries also what the pairs need of them.
  __device__ void fill_own() {
#pragma unroll 1
    for (int team = 0; team < 2; ++team) {
      fill_columns<Thread::threads, rows>(
          KeysAreRows ? keys_from(team, head_, first_) : queries_from(team, head_, first_), 0, padded(width(team)),
          width(team), own(team), rows);
    }
    if constexpr (!KeysAreRows) {
      start_stats(head_, first_, 0);
      ptx::commit_copies();
    }
  }

  // One team copies lse and the other delta.
  __device__ void start_stats(std::int64_t h, std::int64_t first_query, int stage) {
    if (thread_.index < queries) {
      const Rows& view = thread_.team == 0 ? args_.lse : args_.delta;
      const std::int64_t i = first_query + thread_.index;
      const bool any = i < here_.sequence.real_queries;
      const float* from = head_of<float>(view, b_, h) + (any ? (here_.sequence.query_begin + i) * view.row : 0);
      ptx::copy_element<4>(ptx::shared_address(stats(thread_.team, stage) + thread_.index), from, any);
    }
  }

  // Each team copies its own rows of the other side, and one thread finds out what the step will need.
  __device__ void start_others(const Place& place, int stage) {
    const int team = thread_.team;
    float* to = others(team, stage);
    start_rows<Thread::team_threads, cols, Width>(
        KeysAreRows ? queries_from(team, place.h, place.first) : keys_from(team, head_ / args_.group, place.first), 0,
        width(team), thread_.index, [&](int r, int k) { return to + Others::at(r, k); });
    if constexpr (KeysAreRows) {
      start_stats(place.h, place.first, stage);
    }
    ptx::commit_copies();
    if (threadIdx.x == 0) {
      here_.plain[stage] = is_plain_at(place);
      here_.holes[stage] = has_holes(args_, here_.sequence, b_, place.h, KeysAreRows ? place.first : first_, queries,
                                     KeysAreRows ? first_ : place.first, keys);
    }
  }

  __device__ void walk(bool careful) {
    clear(sums_);
    odd_ = false;
    std::int64_t begin, end;
    if constexpr (KeysAreRows) {
      const QueryRange range = query_range(args_, here_.sequence, b_, first_, rows);
      begin = range.begin / cols * cols, end = range.end;
    } else {
      const TileRange range = tile_range(args_, here_.sequence, b_, first_, rows);
      begin = range.begin / cols * cols, end = range.end;
    }
    const std::int64_t first_head = KeysAreRows ? head_ * args_.group : head_;
    const std::int64_t h_end = begin >= end ? first_head : KeysAreRows ? first_head + args_.group : first_head + 1;
    // The first place from this one on of which spans leave something.
    const auto next_from = [&](Place place) {
      while (place.h < h_end) {
        place.first = KeysAreRows
                          ? next_query_tile(args_, here_.sequence, b_, place.h, first_, rows, place.first, end, cols)
                          : next_key_tile(args_, here_.sequence, b_, place.h, first_, rows, place.first, end, cols);
        if (place.first < end) {
          break;
        }
        place = {place.h + 1, begin};
      }
      return place;
    };
    Place place = next_from({first_head, begin});
    if (place.h < h_end) {
      start_others(place, 0);
    }
    int stage = 0;
#pragma unroll 1
    while (place.h < h_end) {
      ptx::wait_for_copies<0>();
      __syncthreads();  // everybody's copies have come, and the step before has been read
      const Place next = next_from({place.h, place.first + cols});
      if (stages_ == 2 && next.h < h_end) {
        start_others(next, stage ^ 1);
      }
      step(place, stage, careful);
      if (stages_ == 1 && next.h < h_end) {
        __syncthreads();
        start_others(next, 0);
      }
      place = next;
      stage ^= stages_ - 1;
    }
    ptx::wait_for_copies<0>();
  }

  __device__ bool is_plain_at(const Place& place) const {
    const Modifiers<float> modifiers(args_, here_.sequence, b_, place.h);
    const TileRange range = tile_range(args_, here_.sequence, b_, KeysAreRows ? place.first : first_, queries);
    return is_plain(range, KeysAreRows ? first_ : place.first, KeysAreRows ? rows : cols, modifiers.only_scale());
  }

  __device__ void step(const Place& place, int stage, bool careful) {
    const bool plain = here_.plain[stage] && !careful;
    {
      float product[M][N];  // S or dP
      clear(product);
      const float *a = own(thread_.team), *b = others(thread_.team, stage);
      multiply_rows<Width, 0>(thread_, a, rows, b, depth_, product);
      if constexpr (N == 8) {
        multiply_rows<Width, 4>(thread_, a, rows, b, depth_, product);
      }
      make_pairs(place, stage, plain, careful, product);
    }
    __syncthreads();
    if (careful) {
      add_products<true>(stage);
    } else {
      add_products<false>(stage);
    }
  }

  // Products become the coefficients p (with dropout) and ds in pairs(0) and pairs(1), -0 where forbidden.
  __device__ void make_pairs(const Place& place, int stage, bool plain, bool careful, const float (&product)[M][N]) {
    float scores[half][N], grads[half][N];
    exchange(product, scores, grads);
    const std::int64_t first_query = KeysAreRows ? place.first : first_;
    const std::int64_t first_key = KeysAreRows ? first_ : place.first;
    KeyRange* ranges = reinterpret_cast<KeyRange*>(pairs(1));  // of the tile's queries, where a step is not plain
    const auto where = [&](int r, int c) {
      const int query = KeysAreRows ? c : r, key = KeysAreRows ? r : c;
      const KeyRange range = ranges[query];
      const std::int64_t j = first_key + key;
      return Pair{first_query + query, j, j >= range.begin && j < range.end};
    };
    const Modifiers<float> modifiers(args_, here_.sequence, b_, place.h);
    if (!plain) {
      __syncthreads();  // what was exchanged has been read
      if (static_cast<int>(threadIdx.x) < queries) {
        ranges[threadIdx.x] = row_range(args_, here_.sequence, b_, first_query + threadIdx.x);  // words have the spans
      }
      __syncthreads();
    }
    modify_tile(thread_, modifiers, plain, where, pairs(0), slopes_, scores);
    if (!plain) {
      __syncthreads();
    }
    if (here_.holes[stage]) {
      std::uint64_t* words = reinterpret_cast<std::uint64_t*>(pairs(1));
      __syncthreads();  // what was exchanged has been read
      fill_span_words<queries, keys>(args_, here_.sequence, b_, place.h, first_query, first_key, words);
      __syncthreads();
      forbid_by_words<KeysAreRows, keys>(thread_, words, scores);
      __syncthreads();
    }
    if (careful) {
      settle(place.h, first_query, first_key, stage, scores);
    }
    std::uint64_t kept = 0;
    if (args_.dropout.active) {
      kept = KeysAreRows ? kept_bits_transposed<half, N>(thread_, args_.dropout, b_, place.h, first_key, first_query)
                         : kept_bits<half, N>(thread_, args_.dropout, b_, place.h, first_query, first_key);
    }
    if (plain) {  // every pair is allowed
#pragma unroll
      for (int slot = 0; slot < half * N; ++slot) {
        odd_ |= scores[slot / N][slot % N] == -infinity<float>();
      }
    }
    weigh(stage, kept, scores, grads);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const int at = Pairs::at(thread_.col_of(n), thread_.row_of(0));
      if constexpr (KeysAreRows) {
        store_four(pairs(0) + at, scores[0][n], scores[1][n], scores[2][n], scores[3][n]);
      }
      store_four(pairs(1) + at, grads[0][n], grads[1][n], grads[2][n], grads[3][n]);
    }
  }

  // Scores that say too little are found again, and rows that are left out are forbidden whatever their scores are.
  __device__ void settle(std::int64_t h, std::int64_t first_query, std::int64_t first_key, int stage,
                         float (&scores)[half][N]) const {
    visit_in_loop(scores, [&](float& score, int slot) {
      const int row = thread_.row_of(slot / N), col = thread_.col_of(slot % N);
      const int query = KeysAreRows ? col : row, key = KeysAreRows ? row : col;
      if (stats(0, stage)[query] == infinity<float>()) {
        score = -infinity<float>();
      } else if (is_odd_score(score)) {
        float slope;
        score = settled_score<float>(args_, b_, h, first_query + query, first_key + key, slope);
        if (slopes_ != nullptr) {
          slopes_[slot * Thread::threads + threadIdx.x] = slope;
        }
      }
    });
  }

  // Scores become p, with dropout, and dP becomes ds. One loop for each thing that a call may lack, so that a plain one
  // has no branches between its exponentials.
  __device__ void weigh(int stage, std::uint64_t kept, float (&scores)[half][N], float (&grads)[half][N]) {
    const float kept_scale = static_cast<float>(args_.dropout.kept_scale);
    const auto each = [](const auto& call) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int m = 0; m < half; ++m) {
          call(m, n, m * N + n);
        }
      }
    };
    // Of each column's or each row's query.
    constexpr int count = KeysAreRows ? N : half;
    float lse[count], delta[count];
#pragma unroll
    for (int x = 0; x < count; ++x) {
      const int query = KeysAreRows ? thread_.col_of(x) : thread_.row_of(x);
      lse[x] = stats(0, stage)[query], delta[x] = stats(1, stage)[query];
    }
    each([&](int m, int n, int) {
      const float weight = exponential(scores[m][n] - lse[KeysAreRows ? n : m]);
      scores[m][n] = scores[m][n] == -infinity<float>() ? -0.0f : weight;
    });
    if (args_.dropout.active) {
      each([&](int m, int n, int slot) { grads[m][n] *= (kept >> slot & 1) != 0 ? kept_scale : 0.0f; });
    }
    each([&](int m, int n, int) { grads[m][n] = scores[m][n] * (grads[m][n] - delta[KeysAreRows ? n : m]); });
    if (slopes_ != nullptr) {
      each([&](int m, int n, int slot) { grads[m][n] *= slopes_[slot * Thread::threads + threadIdx.x]; });
    }
    each([&](int m, int n, int) { grads[m][n] = is_marked(scores[m][n]) ? -0.0f : grads[m][n] + 0.0f; });
    if (KeysAreRows && args_.dropout.active) {
      each([&](int m, int n, int slot) {
        const float kept_weight = (kept >> slot & 1) != 0 ? scores[m][n] * kept_scale : 0.0f;
        scores[m][n] = is_marked(scores[m][n]) ? -0.0f : kept_weight;
      });
    }
  }

  // Each team hands over its product of the rows whose pairs the other one has, and gets that of its own rows.
  __device__ void exchange(const float (&product)[M][N], float (&scores)[half][N], float (&grads)[half][N]) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      store_four(pairs(thread_.team) + Pairs::at(thread_.col_of(n), thread_.row_of(half)), product[half][n],
                 product[half + 1][n], product[half + 2][n], product[half + 3][n]);
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < N; ++n) {
      float got[half];
      load_four(pairs(thread_.team ^ 1) + Pairs::at(thread_.col_of(n), thread_.row_of(0)), got);
#pragma unroll
      for (int m = 0; m < half; ++m) {
        scores[m][n] = thread_.team == 0 ? product[m][n] : got[m];
        grads[m][n] = thread_.team == 0 ? got[m] : product[m][n];
      }
    }
  }

  template <bool Skip>
  __device__ void add_products(int stage) {
    constexpr int depth = KeysAreRows ? cols : cols / 2;
    const int team = thread_.team, from = KeysAreRows ? 0 : team * depth;  // a multiple of 32, as Swizzled repeats
    const float* coefficients = pairs(KeysAreRows ? team ^ 1 : 1) + from * rows;
    const float* values = others(KeysAreRows ? team : 0, stage) + from * Width;
    const int row = thread_.row * 4, col = thread_.col * 4;
    multiply<Skip>(
        sums_thread(), [&](int first, int x, int r) { return coefficients + Pairs::at(first, x, row, r - row); },
        [&](int first, int x, int c) { return values + Others::at(first, x, col, c - col); }, depth, sums_);
  }

  // The second team's sums of dq are added to the first one's.
  __device__ void join_sums() {
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int w = 0; w < W; ++w) {
        if (thread_.team == 1) {
          pairs_[(m * W + w) * Thread::team_threads + thread_.index] = sums_[m][w];
        }
      }
    }
    __syncthreads();
#pragma unroll
    for (int m = 0; m < M; ++m) {
#pragma unroll
      for (int w = 0; w < W; ++w) {
        if (thread_.team == 0) {
          sums_[m][w] += pairs_[(m * W + w) * Thread::team_threads + thread_.index];
        }
      }
    }
  }

  __device__ void store(const Rows& gradient, std::int64_t width, std::int64_t count, float scale) {
    if (gradient.data == nullptr) {
      return;
    }
    const std::int64_t begin = KeysAreRows ? here_.sequence.key_begin : here_.sequence.query_begin;
#pragma unroll
    for (int m = 0; m < M; ++m) {
      const std::int64_t r = first_ + sums_thread().row_of(m);
      if (r >= count) {
        continue;
      }
      float* target = head_of<float>(gradient, b_, head_) + (begin + r) * gradient.row;
#pragma unroll
      for (int w = 0; w < W; ++w) {
        const std::int64_t d = thread_.col_of(w);
        if (d < width) {
          target[d * gradient.feature] = (sums_[m][w] + 0.0f) * scale;
        }
      }
    }
  }

  const GradientArguments& args_;
  Here& here_;
  float *own_, *pairs_, *slopes_, *others_;
  int stages_;
  Thread thread_;
  int depth_;  // of this team's first product
  std::int64_t b_ = 0, head_ = 0, first_ = 0;
  bool odd_ = false;  // a score says too little
  float sums_[M][W];
};

// Takes the parameters of every gradient kernel; the last one, spans of features, is always 1.
template <bool KeysAreRows, int Width>
__global__ void __launch_bounds__(SimtTeamGradient<KeysAreRows, Width>::Thread::threads, 1)
    simt_team_gradient(const __grid_constant__ GradientArguments arguments, std::int64_t row_tiles, std::int64_t) {
  extern __shared__ __align__(16) unsigned char shared[];
  SimtTeamGradient<KeysAreRows, Width> gradient(arguments, shared);
  const std::int64_t heads = KeysAreRows ? arguments.kv_heads : arguments.heads, all = arguments.batch * heads;
  for (std::int64_t task = blockIdx.x; task < all * row_tiles; task += gridDim.x) {
    const std::int64_t tile = task / all, head = task % all;
    // When causal, late queries see the most keys and early keys are seen by the most queries: they start first.
    gradient.run(head / heads, head % heads, KeysAreRows ? tile : row_tiles - 1 - tile);
  }
}

}  // namespace headway::cuda
