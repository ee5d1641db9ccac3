// Gradients of query, key or value for bf16 and f16 on tensor cores, for every option and stride and head dims up to
// Depth. The formulas and the order of the sums are those of simt_gradient.cuh.
//
// A block owns 64 rows of the gradient, queries or keys, and walks over tiles of 64 rows of the other side, whose
// copies run one step ahead. With own rows A, B (q, grad_out; or k, v) and the other side's A', B' half a step is
//   S = A A'^T   dP = B B'^T   ds = p (dP - delta)   dq or dk += ds A'   dv += p B'
// so each copy feeds two products: 3 or 4 products of 64 x 64 x D for 2 x 64 x D loads. The products and the
// exponentials bound it. With 256 features the sums of dk and dv do not fit into registers together: there they take
// one walk each. What leaves a step in registers (ds, p) is rounded to the inputs' type; sums are f32.
#pragma once

#include "engines/cuda/kernels/mma_scores.cuh"
#include "engines/cuda/kernels/plain_rows.cuh"

namespace headway::cuda {

template <class T, int Depth, bool KeysAreRows, int Stages>
class MmaGradient {
 public:
  static constexpr int tile_bytes = mma_rows * Depth * 2;
  static constexpr int stages = Stages;
  static constexpr int part = 32;  // columns of the scores in registers at a time
  static constexpr int tiles = part / 8, slots = part / 2;
  static constexpr bool both = KeysAreRows && Depth <= 128;  // dk and dv in one walk

  __host__ static std::size_t shared_bytes(const Arguments& args) {
    const int scratches = args.softcap != 0 ? 2 : 1;
    return (2 + 2 * stages) * tile_bytes + static_cast<std::size_t>(scratches) * slots * mma_threads * 4;
  }

  __device__ MmaGradient(const GradientArguments& args, unsigned char* shared)
      : args_(args),
        own_(shared),
        others_(shared + 2 * tile_bytes),
        scratch_(reinterpret_cast<float*>(others_ + 2 * stages * tile_bytes)),
        slopes_(args.softcap != 0 ? scratch_ + slots * mma_threads : nullptr) {}

  // `head` counts kv heads when the rows are keys.
  __device__ void run(std::int64_t b, std::int64_t head, std::int64_t tile) {
    b_ = b, head_ = head, first_ = tile * mma_rows;
    sequence_ = sequence_of(args_, b);
    const std::int64_t rows = KeysAreRows ? sequence_.key_count : sequence_.query_count;
    if (first_ >= rows) {
      return;
    }
    __syncthreads();  // the tile before has been read
    fill_own();
    ptx::commit_copies();
#pragma unroll 1  // one copy of the code for both walks
    for (int careful = 0; careful < 2; ++careful) {
      walk(careful != 0);
      if (!__syncthreads_or(holds_not_finite(sums_) || holds_not_finite(value_sums_) || odd_)) {
        break;
      }
    }
    if constexpr (both) {
      store(args_.gradient, rows, args_.head_dim, bounded<float>(args_.scale), sums_);
      store(args_.value_gradient, rows, args_.value_dim, 1.0f, value_sums_);
    } else if (of_value()) {
      store(args_.value_gradient, rows, args_.value_dim, 1.0f, sums_);
    } else {
      store(args_.gradient, rows, args_.head_dim, bounded<float>(args_.scale), sums_);
    }
  }

 private:
  struct Stats {
    float lse, delta;
  };
  __device__ static Stats* stats() {
    __shared__ Stats stats[mma_rows];
    return stats;
  }
  __device__ static KeyRange* ranges() {
    __shared__ KeyRange ranges[mma_rows];
    return ranges;
  }
  __device__ static std::uint64_t* words() {
    __shared__ std::uint64_t words[mma_rows];
    return words;
  }

  // Whether this walk is for dv alone.
  __device__ bool of_value() const { return KeysAreRows && !both && args_.of == GradientOf::value; }

  __device__ HalfRows<T> queries(const Rows& view, std::int64_t h, std::int64_t width) const {
    return {view, b_, h, sequence_.query_begin, sequence_.real_queries, width};
  }
  __device__ HalfRows<T> keys(const Rows& view, std::int64_t g, std::int64_t width) const {
    return {view, b_, g, sequence_.key_begin, sequence_.key_count, width};
  }

  __device__ void fill_own() {
    if constexpr (KeysAreRows) {
      fill_tile<Depth>(keys(args_.key, head_, args_.head_dim), first_, own_);
      fill_tile<Depth>(keys(args_.value, head_, args_.value_dim), first_, own_ + tile_bytes);
    } else {
      fill_tile<Depth>(queries(args_.query, head_, args_.head_dim), first_, own_);
      fill_tile<Depth>(queries(args_.grad_out, head_, args_.value_dim), first_, own_ + tile_bytes);
    }
  }

  __device__ void walk(bool careful) {
    clear(sums_);
    clear(value_sums_);
    odd_ = false;
    if constexpr (KeysAreRows) {
      const QueryRange range = query_range(args_, sequence_, b_, first_, mma_rows);
#pragma unroll 1
      for (std::int64_t h = head_ * args_.group; h < (head_ + 1) * args_.group; ++h) {
        walk_head(h, range.begin / mma_rows * mma_rows, range.end, queries(args_.query, h, args_.head_dim),
                  queries(args_.grad_out, h, args_.value_dim), careful);
      }
    } else {
      const TileRange range = tile_range(args_, sequence_, b_, first_, mma_rows);
      const std::int64_t g = head_ / args_.group;
      walk_head(head_, range.begin / mma_rows * mma_rows, range.end, keys(args_.key, g, args_.head_dim),
                keys(args_.value, g, args_.value_dim), careful);
    }
  }

  template <int Tiles>
  __device__ static void clear(float (&sums)[Tiles][4]) {
#pragma unroll
    for (int t = 0; t < Tiles; ++t) {
      sums[t][0] = sums[t][1] = sums[t][2] = sums[t][3] = 0;
    }
  }

  // The other side's rows [begin, end) of query head h: `a` is k or q, `b` is v or grad_out.
  __device__ void walk_head(std::int64_t h, std::int64_t begin, std::int64_t end, const HalfRows<T>& a,
                            const HalfRows<T>& b, bool careful) {
    const Modifiers<float> modifiers(args_, sequence_, b_, h);
    const auto fetch = [&](std::int64_t first, int stage) {
      if (first < end) {
        fill_tile<Depth>(a, first, others_ + 2 * stage * tile_bytes);
        fill_tile<Depth>(b, first, others_ + (2 * stage + 1) * tile_bytes);
      }
      ptx::commit_copies();
    };
    // The first tile from `at` on of which spans leave something.
    const auto next_from = [&](std::int64_t at) {
      return KeysAreRows ? next_query_tile(args_, sequence_, b_, h, first_, mma_rows, at, end, mma_rows)
                         : next_key_tile(args_, sequence_, b_, h, first_, mma_rows, at, end, mma_rows);
    };
    int stage = 0;
    std::int64_t first = next_from(begin), next;
    if (stages > 1) {
      fetch(first, stage);
    }
    if (!KeysAreRows) {
      fill_stats(h, first_);
    }
#pragma unroll 1
    for (; first < end; first = next) {
      next = next_from(first + mma_rows);
      fetch(stages > 1 ? next : first, stage ^ (stages - 1));
      ptx::wait_for_copies<stages - 1>();
      if (KeysAreRows) {
        fill_stats(h, first);
      }
      const std::int64_t first_query = KeysAreRows ? first : first_, first_key = KeysAreRows ? first_ : first;
      const TileRange range = tile_range(args_, sequence_, b_, first_query, mma_rows);
      const bool plain =
          !careful && modifiers.only_scale() && first_key >= range.full_begin && first_key + mma_rows <= range.full_end;
      const bool holes = has_holes(args_, sequence_, b_, h, first_query, mma_rows, first_key, mma_rows);
      if (holes) {
        fill_span_words<mma_rows, mma_rows>(args_, sequence_, b_, h, first_query, first_key, words());
      }
      __syncthreads();
#pragma unroll 1
      for (int col = 0; col < mma_rows; col += part) {
        add_part(modifiers, h, first, col, plain, holes, careful, others_ + 2 * stage * tile_bytes + col * Depth * 2, a,
                 b);
      }
      __syncthreads();  // the stage may be filled again
      stage ^= stages - 1;
    }
    ptx::wait_for_copies<0>();
    __syncthreads();
  }

  __device__ void fill_stats(std::int64_t h, std::int64_t first_query) {
    if (static_cast<int>(threadIdx.x) < mma_rows) {
      const std::int64_t i = first_query + threadIdx.x, row = sequence_.query_begin + i;
      Stats one{0, 0};
      KeyRange range{0, 0};
      if (i < sequence_.real_queries) {
        range = row_range(args_, sequence_, b_, i);
        one.lse = head_of<float>(args_.lse, b_, h)[row * args_.lse.row];
        one.delta = head_of<float>(args_.delta, b_, h)[row * args_.delta.row];
      }
      stats()[threadIdx.x] = one;
      ranges()[threadIdx.x] = range;
    }
  }

  // Rows first + col to first + col + 31 of the other side, which lie at `tile_a` and one tile further.
  __device__ void add_part(const Modifiers<float>& modifiers, std::int64_t h, std::int64_t first, int col, bool plain,
                           bool holes, bool careful, unsigned char* tile_a, const HalfRows<T>& a,
                           const HalfRows<T>& b) {
    unsigned char* tile_b = tile_a + tile_bytes;
    float p[tiles][4], ds[tiles][4];
    multiply_rows<Depth, T>(thread_, own_, tile_a, p);
    const std::uint32_t forbidden = make_weights(modifiers, h, first, col, plain, holes, careful, p);
    odd_ |= plain && forbidden != 0;  // every pair of a plain tile is allowed
    const std::int64_t first_query = KeysAreRows ? first + col : first_;
    const std::int64_t first_key = KeysAreRows ? first_ : first + col;
    const std::uint32_t kept = !args_.dropout.active ? ~0u
                               : KeysAreRows
                                   ? kept_slots_transposed<tiles>(thread_, args_.dropout, b_, h, first_key, first_query)
                                   : kept_slots<tiles>(thread_, args_.dropout, b_, h, first_query, first_key);
    if (!of_value()) {
      multiply_rows<Depth, T>(thread_, own_ + tile_bytes, tile_b, ds);
      make_score_gradients(col, plain, forbidden, kept, p, ds);
    }
    if (both || of_value()) {
      const float kept_scale = static_cast<float>(args_.dropout.kept_scale);
#pragma unroll
      for (int slot = 0; slot < slots; ++slot) {
        float& weight = p[slot / 4][slot % 4];
        weight = (kept >> slot & 1) != 0 ? weight * kept_scale : 0.0f;
      }
    }
    if constexpr (both) {
      add(careful, first + col, ds, forbidden, tile_a, a, sums_);
      add(careful, first + col, p, forbidden, tile_b, b, value_sums_);
    } else if (of_value()) {
      add(careful, first + col, p, forbidden, tile_b, b, sums_);
    } else {
      add(careful, first + col, ds, forbidden, tile_a, a, sums_);
    }
  }

  // sums += coefficients rows
  __device__ void add(bool careful, std::int64_t first, const float (&coefficients)[tiles][4], std::uint32_t forbidden,
                      unsigned char* tile, const HalfRows<T>& rows, float (&sums)[Depth / 8][4]) {
    const std::uint64_t found = careful ? take_out_nonfinite<Depth, T>(tile, part) : 0;
    multiply_coefficients<Depth, T>(thread_, coefficients, 1.0f, tile, sums);
    if (found != 0) {
      add_nonfinite<Depth>(found, rows, first, coefficients, 1.0f, forbidden, sums);
    }
  }

  __device__ Stats stats_of(int slot, int col) const {
    return stats()[KeysAreRows ? col + thread_.col_of(slot) : thread_.row_of(slot)];
  }

  // Products become weights p, 0 in the slots returned as forbidden.
  __device__ std::uint32_t make_weights(const Modifiers<float>& modifiers, std::int64_t h, std::int64_t first, int col,
                                        bool plain, bool holes, bool careful, float (&p)[tiles][4]) {
    const auto where = [&](int r, int c) {
      const int query = KeysAreRows ? col + c : r;
      const std::int64_t j = KeysAreRows ? first_ + r : first + col + c;
      const KeyRange range = ranges()[query];
      return Pair{(KeysAreRows ? first : first_) + query, j, j >= range.begin && j < range.end};
    };
    modify_slots(thread_, modifiers, plain, where, scratch_, slopes_, p);
    if (holes) {
      forbid_by_words<KeysAreRows>(thread_, words(), col, p);
    }
    if (careful) {
      settle(h, first, col, p);
    }
    std::uint32_t forbidden = 0;
#pragma unroll
    for (int slot = 0; slot < slots; ++slot) {
      float& score = p[slot / 4][slot % 4];
      const bool none = score == -infinity<float>();
      forbidden |= std::uint32_t{none} << slot;
      score = none ? 0.0f : exponential(score - stats_of(slot, col).lse);
    }
    return forbidden;
  }

  // Scores that say too little are found again, and rows that are left out are forbidden whatever their scores are.
  __device__ void settle(std::int64_t h, std::int64_t first, int col, float (&scores)[tiles][4]) const {
    visit_in_loop(scores, [&](float& score, int slot) {
      const std::int64_t row = first_ + thread_.row_of(slot), other = first + col + thread_.col_of(slot);
      if (stats_of(slot, col).lse == infinity<float>()) {
        score = -infinity<float>();
      } else if (is_odd_score(score)) {
        float slope;
        score = settled_score<T>(args_, b_, h, KeysAreRows ? other : row, KeysAreRows ? row : other, slope);
        if (slopes_ != nullptr) {
          slopes_[slot * mma_threads + threadIdx.x] = slope;
        }
      }
    });
  }

  // dP becomes ds, times softcap's slope; 0 where forbidden.
  __device__ void make_score_gradients(int col, bool plain, std::uint32_t forbidden, std::uint32_t kept,
                                       const float (&p)[tiles][4], float (&ds)[tiles][4]) const {
    const float kept_scale = static_cast<float>(args_.dropout.kept_scale);
#pragma unroll
    for (int slot = 0; slot < slots; ++slot) {
      float& one = ds[slot / 4][slot % 4];
      const float factor = (kept >> slot & 1) != 0 ? kept_scale : 0.0f;
      one = p[slot / 4][slot % 4] * (one * factor - stats_of(slot, col).delta);
      if (slopes_ != nullptr && !plain) {
        one *= slopes_[slot * mma_threads + threadIdx.x];
      }
      one = (forbidden >> slot & 1) != 0 ? 0.0f : one;
    }
  }

  __device__ void store(const Rows& gradient, std::int64_t rows, std::int64_t width, float scale,
                        const float (&sums)[Depth / 8][4]) {
    if (gradient.data == nullptr) {
      return;
    }
    const std::int64_t begin = KeysAreRows ? sequence_.key_begin : sequence_.query_begin;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::int64_t r = first_ + thread_.row_of(2 * half);
      if (r >= rows) {
        continue;
      }
      T* target = head_of<T>(gradient, b_, head_) + (begin + r) * gradient.row;
#pragma unroll
      for (int t = 0; t < Depth / 8; ++t) {
#pragma unroll
        for (int x = 0; x < 2; ++x) {
          const std::int64_t d = t * 8 + 2 * (thread_.lane % 4) + x;
          if (d < width) {
            // Tensor cores give a sum of zeros either sign.
            target[d * gradient.feature] = element<T>((sums[t][2 * half + x] + 0.0f) * scale);
          }
        }
      }
    }
  }

  const GradientArguments& args_;
  unsigned char *own_, *others_;
  float *scratch_, *slopes_;
  MmaThread thread_;
  std::int64_t b_ = 0, head_ = 0, first_ = 0;
  Sequence sequence_;
  bool odd_ = false;  // a score says too little
  float sums_[Depth / 8][4];
  float value_sums_[both ? Depth / 8 : 1][4];
};

template <class T, int Depth, bool KeysAreRows, int Stages>
__global__ void __launch_bounds__(mma_threads, Depth == 256 ? 1 : 2)
    mma_gradient(const __grid_constant__ GradientArguments arguments, std::int64_t row_tiles, std::int64_t) {
  extern __shared__ __align__(16) unsigned char shared[];
  MmaGradient<T, Depth, KeysAreRows, Stages> gradient(arguments, shared);
  const std::int64_t heads = KeysAreRows ? arguments.kv_heads : arguments.heads;
  const std::int64_t tasks = arguments.batch * heads * row_tiles;
  for (std::int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const std::int64_t head = task / row_tiles, tile = task % row_tiles;
    // When causal, late queries see the most keys and early keys are seen by the most queries: they start first.
    gradient.run(head / heads, head % heads, KeysAreRows ? tile : row_tiles - 1 - tile);
  }
}

}  // namespace headway::cuda
