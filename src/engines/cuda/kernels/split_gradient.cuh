// Gradients of query, or of key and value, for f32 on tensor cores, for every option and stride and head dims up to
// Depth. The formulas and the order of the sums are those of simt_gradient.cuh; split_tile.cuh says how numbers are
// split and which are left out.
//
// A block owns 64 rows (32 of 256 features, by warps) of the gradient, queries or keys, and walks over the rows of the
// other side, 32 (16) at a time, which are copied a step ahead and then split once for all warps. With own rows A, B
// (q, grad_out; or k, v) and the other side's A', B' a step is
//   S = A A'^T   dP = B B'^T   ds = p (dP - delta)   dq or dk += ds A'   dv += p B'
// each of six tensor core products, which bound it. Warpgroups begin a product and do what does not need it meanwhile:
// weights beside dP, ds beside dv. Above 64 features two warps share 16 rows: each has half of the features, adds up
// its part of S and dP, and gets the other part through shared memory. Both then find the same p and ds, and add to the
// sums of their own features, so that the sums of dk and dv fit into registers together.
//
// What leaves a step in registers (ds, p) is multiplied by 2^12 and split, so that weights of 2^-120 still have all
// parts. A ds beyond 2^48 is left out as well, and its products are added by f32 arithmetic (add_large); a NaN is split
// like a number, since it makes all of its row's sums NaN anyway.
#pragma once

#include "engines/cuda/kernels/mma_scores.cuh"
#include "engines/cuda/kernels/softmax.cuh"
#include "engines/cuda/kernels/split_tile.cuh"

namespace headway::cuda {

// `Width` of the features count, the others are 0. Products are WarpProducts or WarpgroupProducts.
template <class Products, int Depth, bool KeysAreRows, int Width = Depth>
class SplitGradient {
 public:
  static constexpr int parts = Depth == 64 ? 1 : 2, features = Width / parts;  // of a warp
  // Whether own rows stay as they are: see WarpgroupProducts::float_place.
  static constexpr bool floats = Products::by_warpgroups && Depth == 256;
  static constexpr int row_warps = !Products::by_warpgroups && Depth == 256 ? 2 : 4, rows = row_warps * 16;
  static constexpr int threads = row_warps * parts * 32;
  static constexpr int cols = Depth == 256 ? 16 : 32;  // rows of the other side in a step
  static constexpr int tiles = cols / 8, slots = cols / 2;
  static constexpr int own_bytes = rows * Depth * (floats ? static_cast<int>(sizeof(float)) : split_parts * 2);
  static constexpr int others_bytes = split_parts * cols * Depth * 2, staged_size = cols * Depth;
  // Tiles of columns whose sums are found at a time: as many as registers hold.
  static constexpr bool few_registers = KeysAreRows && Depth == 256;
  static constexpr int together = Products::by_warpgroups ? (few_registers ? 8 : features / 8) : few_registers ? 2 : 4;
  static constexpr int slots_size = slots * threads, alignment = Products::alignment;

  __host__ static std::size_t shared_bytes(const Arguments& args) {
    const int scratches = args.softcap != 0 ? 2 : 1;
    return 2 * (own_bytes + others_bytes) + (Products::alignment - 16) +
           sizeof(float) * static_cast<std::size_t>(2 * staged_size + scratches * slots_size);
  }

  __device__ SplitGradient(const GradientArguments& args, unsigned char* shared)
      : args_(args),
        own_(shared),
        others_(own_ + 2 * own_bytes),
        staged_(reinterpret_cast<float*>(others_ + 2 * others_bytes)),
        scratch_(staged_ + 2 * staged_size),
        part_(__shfl_sync(~0u, thread_.warp / row_warps, 0)) {
    thread_.warp %= row_warps;
  }

  // `head` counts kv heads when the rows are keys.
  __device__ void run(std::int64_t b, std::int64_t head, std::int64_t tile, int part) {
    b_ = b, head_ = head, first_ = tile * rows;
    __syncthreads();  // the tile before has been read
    if (threadIdx.x == 0) {
      here().sequence = sequence_of(args_, b);
      here().walk = walk_of(part);
    }
    __syncthreads();
    const std::int64_t count = KeysAreRows ? here().sequence.key_count : here().sequence.query_count;
    if (first_ >= count) {
      return;
    }
    clear(sums_);
    clear(value_sums_);
    if (here().walk.begin < here().walk.end) {
      fill_own();
      walk();
    }
    const float scale = bounded<float>(args_.scale);
    store(args_.gradient, part * args_.part_step, count, args_.head_dim, scale, sums_);
    if constexpr (KeysAreRows) {
      store(args_.value_gradient, part * args_.value_part_step, count, args_.value_dim, 1.0f, value_sums_);
    }
  }

 private:
  static constexpr int queries = KeysAreRows ? cols : rows, keys = KeysAreRows ? rows : cols;
  enum Side : int { a, b };  // q or k; grad_out or v
  template <int Chains>
  using Scores = typename Products::template Scores<rows, cols, Depth, features, Chains, floats>;
  using Sums = typename Products::template Sums<cols, Depth, features, together>;

  struct Stats {
    float lse, delta;
  };
  // A part's steps [begin, end) of those of all query heads, a head's after another's. A head's have the rows [first,
  // last) of the other side.
  struct Walk {
    std::int64_t begin, end, steps_a_head, first, last;
  };
  // What all threads know about the tile, in shared memory to save registers.
  struct Here {
    Sequence sequence;
    Walk walk;
    Stats stats[queries], next_stats[queries];  // those of the next step are on their way
    KeyRange ranges[queries];
    std::uint64_t words[span_words<queries, keys>];
    std::uint32_t marked_own[2][rows / cols];
    std::uint32_t marked[2][2];  // [stage][side] of the other side's rows
  };
  __device__ static Here& here() {
    __shared__ Here here;
    return here;
  }

  // [slots][mma_threads] for every 128 threads, which begins where modify_slots adds the thread's number.
  __device__ float* modify_scratch(int which) const {
    return scratch_ + which * slots_size + static_cast<int>(threadIdx.x) / mma_threads * (slots - 1) * mma_threads;
  }
  __device__ float* slopes() const { return args_.softcap != 0 ? modify_scratch(1) : nullptr; }
  __device__ int first_feature() const { return part_ * features; }

  __device__ std::int64_t width(Side side) const { return side == a ? args_.head_dim : args_.value_dim; }
  __device__ RowSource<float> queries_from(Side side, std::int64_t h, std::int64_t first) const {
    const Sequence& sequence = here().sequence;
    return {side == a ? args_.query : args_.grad_out, b_, h, sequence.query_begin, first, sequence.real_queries};
  }
  __device__ RowSource<float> keys_from(Side side, std::int64_t g, std::int64_t first) const {
    const Sequence& sequence = here().sequence;
    return {side == a ? args_.key : args_.value, b_, g, sequence.key_begin, first, sequence.key_count};
  }
  __device__ RowSource<float> own_from(Side side, std::int64_t first) const {
    return KeysAreRows ? keys_from(side, head_, first) : queries_from(side, head_, first);
  }
  __device__ RowSource<float> others_from(Side side, std::int64_t h, std::int64_t first) const {
    return KeysAreRows ? queries_from(side, h, first) : keys_from(side, h / args_.group, first);
  }
  __device__ const unsigned char* own(Side side) const { return own_ + side * own_bytes; }
  __device__ const unsigned char* others(Side side) const { return others_ + side * others_bytes; }

  template <class From>
  __device__ void start_copies(const From& from) {
    start_rows<threads, cols, Depth>(from(a), 0, width(a), staged_, Depth);
    start_rows<threads, cols, Depth>(from(b), 0, width(b), staged_ + staged_size, Depth);
    ptx::commit_copies();
  }
  // To rows [first, first + cols) of planes of `Rows` rows.
  template <int Rows>
  __device__ void split(unsigned char* planes, int first, std::uint32_t* marked_a, std::uint32_t* marked_b) {
    constexpr int side = split_parts * Rows * Depth * 2;
    split_rows<Products, threads, cols, Depth, backward_limits, Rows, Width>(staged_, planes, first, marked_a);
    split_rows<Products, threads, cols, Depth, backward_limits, Rows, Width>(staged_ + staged_size, planes + side,
                                                                             first, marked_b);
    Products::planes_are_written();
  }

  // `cols` rows at a time, through the place where the other side is staged later.
  __device__ void fill_own() {
#pragma unroll 1
    for (int r = 0; r < rows; r += cols) {
      start_copies([&](Side side) { return own_from(side, first_ + r); });
      ptx::wait_for_copies<0>();
      std::uint32_t(&marked)[2][rows / cols] = here().marked_own;
      if (threadIdx.x == 0) {
        marked[a][r / cols] = marked[b][r / cols] = 0;
      }
      __syncthreads();
      if constexpr (floats) {
        for (const Side side : {a, b}) {
          Products::template keep_rows<threads, cols, Depth, backward_limits>(
              staged_ + side * staged_size, own_ + side * own_bytes, r, &marked[side][r / cols]);
        }
      } else {
        split<rows>(own_, r, &marked[a][r / cols], &marked[b][r / cols]);
      }
      __syncthreads();
    }
  }

  // This part's share of the tile's steps, which follows from the sequence and the number of parts alone.
  __device__ Walk walk_of(int part) const {
    Walk walk{};
    std::int64_t heads = 1;
    if constexpr (KeysAreRows) {
      const QueryRange range = query_range(args_, here().sequence, b_, first_, rows);
      walk.first = range.begin / cols * cols, walk.last = range.end;
      heads = args_.group;
    } else {
      const TileRange range = tile_range(args_, here().sequence, b_, first_, rows);
      walk.first = range.begin / cols * cols, walk.last = range.end;
    }
    walk.steps_a_head = walk.last > walk.first ? (walk.last - walk.first + cols - 1) / cols : 0;
    walk.begin = heads * walk.steps_a_head * part / args_.parts;
    walk.end = heads * walk.steps_a_head * (part + 1) / args_.parts;
    return walk;
  }

  __device__ void walk() {
    if constexpr (!KeysAreRows) {
      start_stats(head_, first_);
      ptx::commit_copies();
      ptx::wait_for_copies<0>();
      fill_stats(first_);
    }
    const std::int64_t first_head = KeysAreRows ? head_ * args_.group : head_;
    const int steps = static_cast<int>(here().walk.steps_a_head);
#pragma unroll 1
    for (std::int64_t head = here().walk.begin / steps; head * steps < here().walk.end; ++head) {
      const Walk& all = here().walk;
      const std::int64_t begin = larger(all.begin - head * steps, 0), end = smaller(all.end - head * steps, steps);
      walk_head(first_head + head, all.first + begin * cols, smaller(all.first + end * cols, all.last));
    }
  }

  // The other side's rows [begin, end), of query head h.
  __device__ void walk_head(std::int64_t h, std::int64_t begin, std::int64_t end) {
    const Modifiers<float> modifiers(args_, here().sequence, b_, h);
    // The first tile from `at` on of which spans leave something.
    const auto next_from = [&](std::int64_t at) {
      return KeysAreRows ? next_query_tile(args_, here().sequence, b_, h, first_, rows, at, end, cols)
                         : next_key_tile(args_, here().sequence, b_, h, first_, rows, at, end, cols);
    };
    const auto fetch = [&](std::int64_t first) {
      if constexpr (KeysAreRows) {
        start_stats(h, first);
      }
      start_copies([&](Side side) { return others_from(side, h, first); });
    };
    std::int64_t first = next_from(begin);
    __syncthreads();  // what was staged and marked for the head before has been read
    if (first < end) {
      fetch(first);
    }
    if (threadIdx.x == 0) {
      here().marked[0][a] = here().marked[0][b] = 0;
    }
    int stage = 0;
#pragma unroll 1
    while (first < end) {
      ptx::wait_for_copies<0>();
      __syncthreads();  // everybody's copies have come, and the step before has been read
      if (threadIdx.x == 0) {
        here().marked[stage ^ 1][a] = here().marked[stage ^ 1][b] = 0;
      }
      split<cols>(others_, 0, &here().marked[stage][a], &here().marked[stage][b]);
      if (KeysAreRows) {
        fill_stats(first);
      }
      const std::int64_t first_query = KeysAreRows ? first : first_, first_key = KeysAreRows ? first_ : first;
      const bool holes = has_holes(args_, here().sequence, b_, h, first_query, queries, first_key, keys);
      if (holes) {
        fill_span_words<queries, keys>(args_, here().sequence, b_, h, first_query, first_key, here().words);
      }
      __syncthreads();
      const std::int64_t next = next_from(first + cols);
      if (next < end) {
        fetch(next);
      }
      const TileRange range = tile_range(args_, here().sequence, b_, first_query, queries);
      const bool plain = modifiers.only_scale() && first_key >= range.full_begin && first_key + keys <= range.full_end;
      step(modifiers, h, first, plain, holes, here().marked[stage]);
      first = next;
      stage ^= 1;
    }
  }

  // They travel with the rows of the next step.
  __device__ void start_stats(std::int64_t h, std::int64_t first_query) {
    if (static_cast<int>(threadIdx.x) < queries) {
      const std::int64_t i = first_query + threadIdx.x;
      // The first, where all are padding.
      const std::int64_t last = larger(here().sequence.real_queries, std::int64_t{1}) - 1;
      const std::int64_t row = here().sequence.query_begin + smaller(i, last);
      Stats& next = here().next_stats[threadIdx.x];
      ptx::copy_word(ptx::shared_address(&next.lse), head_of<float>(args_.lse, b_, h) + row * args_.lse.row, 4);
      ptx::copy_word(ptx::shared_address(&next.delta), head_of<float>(args_.delta, b_, h) + row * args_.delta.row, 4);
    }
  }

  // By threads whose copies have come.
  __device__ void fill_stats(std::int64_t first_query) {
    if (static_cast<int>(threadIdx.x) < queries) {
      const std::int64_t i = first_query + threadIdx.x;
      Stats one{0, 0};
      KeyRange range{0, 0};
      if (i < here().sequence.real_queries) {
        range = row_range(args_, here().sequence, b_, i);
        one = here().next_stats[threadIdx.x];
      }
      here().stats[threadIdx.x] = one;
      here().ranges[threadIdx.x] = range;
    }
  }

  __device__ void step(const Modifiers<float>& modifiers, std::int64_t h, std::int64_t first, bool plain, bool holes,
                       const std::uint32_t (&marked)[2]) {
    float p[tiles][4], ds[tiles][4];  // S, dP  [16, cols]
    Scores<4> scores;
    Scores<2> weight_gradients;
    multiply(a, scores);
    if constexpr (floats) {
      scores.template finish<0>(p);
    }
    multiply(b, weight_gradients);
    if constexpr (!floats) {
      scores.template finish<1>(p);
    }
    join(p);
    if (parts > 1 && !plain) {
      __syncthreads();  // everybody has read: the place becomes the scratch
    }
    replace(a, h, first, marked[a], p);
    const std::uint32_t forbidden = make_weights(modifiers, first, plain, holes, p);
    const std::int64_t first_query = KeysAreRows ? first : first_, first_key = KeysAreRows ? first_ : first;
    const std::uint32_t kept = !args_.dropout.active ? ~0u
                               : KeysAreRows
                                   ? kept_slots_transposed<tiles>(thread_, args_.dropout, b_, h, first_key, first_query)
                                   : kept_slots<tiles>(thread_, args_.dropout, b_, h, first_query, first_key);
    Sums sums, value_sums;
    if constexpr (KeysAreRows && !floats) {
      add_values(h, first, marked[b], forbidden, kept, p, value_sums);
    }
    weight_gradients.template finish<KeysAreRows && !floats ? 1 : 0>(ds);
    if (parts > 1) {
      __syncthreads();  // the scratch has been read
    }
    join(ds);
    replace(b, h, first, marked[b], ds);
    make_score_gradients(plain, forbidden, kept, p, ds);
    if constexpr (KeysAreRows) {
      if constexpr (floats) {  // here it takes fewer registers
        add_values(h, first, marked[b], forbidden, kept, p, value_sums);
      }
      value_sums.template finish<0>(value_sums_);
    }
    add(a, h, first, marked[a], forbidden, ds, sums, sums_);
    sums.template finish<0>(sums_);
  }

  // dv += dropout(p) grad_out
  __device__ void add_values(std::int64_t h, std::int64_t first, std::uint32_t marked, std::uint32_t forbidden,
                             std::uint32_t kept, const float (&p)[tiles][4], Sums& product) {
    const float kept_scale = static_cast<float>(args_.dropout.kept_scale);
    float left[tiles][4];
#pragma unroll
    for (int slot = 0; slot < slots; ++slot) {
      left[slot / 4][slot % 4] = (kept >> slot & 1) != 0 ? p[slot / 4][slot % 4] * kept_scale : 0.0f;
    }
    add(b, h, first, marked, forbidden, left, product, value_sums_);
  }

  // products = own rows times the other side's, over this warp's features
  template <class Product>
  __device__ void multiply(Side side, Product& product) {
    const int end = static_cast<int>(smaller(width(side), first_feature() + features));
    product.start(thread_, own(side), others(side), first_feature(), end);
  }

  // The parts of both warps that share rows. (Their sum does not depend on which comes first.)
  __device__ void join(float (&products)[tiles][4]) {
    if constexpr (parts > 1) {
      float* mine = scratch_ + threadIdx.x;
      const float* other = scratch_ + (threadIdx.x ^ row_warps * 32);
#pragma unroll
      for (int slot = 0; slot < slots; ++slot) {
        mine[slot * threads] = products[slot / 4][slot % 4];
      }
      __syncthreads();
#pragma unroll
      for (int slot = 0; slot < slots; ++slot) {
        products[slot / 4][slot % 4] += other[slot * threads];
      }
    }
  }

  // Products of rows that could not be split.
  __device__ void replace(Side side, std::int64_t h, std::int64_t first, std::uint32_t marked,
                          float (&products)[tiles][4]) {
    const auto bit = [&](int r) { return here().marked_own[side][r / cols] >> r % cols & 1; };
    const std::uint32_t marked_rows = bit(thread_.row_of(0)) | bit(thread_.row_of(2)) << 1;
    if ((marked | marked_rows) != 0) {
      replace_products(own_from(side, first_), others_from(side, h, first), width(side), marked, marked_rows,
                       thread_.warp, products);
    }
  }

  // sums += coefficients rows of the other side, complete after `product` has finished
  __device__ void add(Side side, std::int64_t h, std::int64_t first, std::uint32_t marked, std::uint32_t forbidden,
                      const float (&coefficients)[tiles][4], Sums& product, float (&sums)[features / 8][4]) {
    float split[tiles][4];
    bool large = false;
#pragma unroll
    for (int slot = 0; slot < slots; ++slot) {
      const float one = coefficients[slot / 4][slot % 4];
      const bool beyond = fabsf(one) > split_coefficient_most;
      split[slot / 4][slot % 4] = beyond ? 0.0f : one;
      large |= beyond;
    }
    product.start(thread_, split, split_coefficient_scale, others(side), first_feature(), static_cast<int>(width(side)),
                  sums);
    if (__any_sync(~0u, large) != 0) {
      add_large<cols>(others_from(side, h, first), width(side), coefficients, first_feature(), sums);
    }
    if (marked != 0) {
      add_taken_out<backward_limits>(others_from(side, h, first), width(side), marked, coefficients,
                                     split_coefficient_scale, forbidden, first_feature(), sums);
    }
  }

  __device__ Stats stats_of(int slot) const {
    return here().stats[KeysAreRows ? thread_.col_of(slot) : thread_.row_of(slot)];
  }

  // Products become weights p, 0 in the slots returned as forbidden.
  __device__ std::uint32_t make_weights(const Modifiers<float>& modifiers, std::int64_t first, bool plain, bool holes,
                                        float (&p)[tiles][4]) {
    const auto where = [&](int r, int c) {
      const int query = KeysAreRows ? c : r;
      const std::int64_t j = KeysAreRows ? first_ + r : first + c;
      const KeyRange range = here().ranges[query];
      return Pair{(KeysAreRows ? first : first_) + query, j, j >= range.begin && j < range.end};
    };
    modify_slots(thread_, modifiers, plain, where, modify_scratch(0), slopes(), p);
    if (holes) {
      forbid_by_words<KeysAreRows>(thread_, here().words, 0, p);
    }
    std::uint32_t forbidden = 0;
#pragma unroll
    for (int slot = 0; slot < slots; ++slot) {
      float& score = p[slot / 4][slot % 4];
      const bool none = score == -infinity<float>();
      forbidden |= std::uint32_t{none} << slot;
      score = none ? 0.0f : exponential(score - stats_of(slot).lse);
    }
    return forbidden;
  }

  // dP becomes ds, times softcap's slope; 0 where forbidden.
  __device__ void make_score_gradients(bool plain, std::uint32_t forbidden, std::uint32_t kept,
                                       const float (&p)[tiles][4], float (&ds)[tiles][4]) const {
    const float kept_scale = static_cast<float>(args_.dropout.kept_scale);
    const float* slope = slopes();
#pragma unroll
    for (int slot = 0; slot < slots; ++slot) {
      float& one = ds[slot / 4][slot % 4];
      const float factor = (kept >> slot & 1) != 0 ? kept_scale : 0.0f;
      one = p[slot / 4][slot % 4] * (one * factor - stats_of(slot).delta);
      if (slope != nullptr && !plain) {
        one *= slope[slot * mma_threads + threadIdx.x];
      }
      one = (forbidden >> slot & 1) != 0 ? 0.0f : one;
    }
  }

  __device__ void store(const Rows& gradient, std::int64_t further, std::int64_t count, std::int64_t width, float scale,
                        const float (&sums)[features / 8][4]) {
    if (gradient.data == nullptr) {
      return;
    }
    const std::int64_t begin = KeysAreRows ? here().sequence.key_begin : here().sequence.query_begin;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::int64_t r = first_ + thread_.row_of(2 * half);
      if (r >= count) {
        continue;
      }
      float* target = head_of<float>(gradient, b_, head_) + (begin + r) * gradient.row + further;
#pragma unroll
      for (int t = 0; t < features / 8; ++t) {
#pragma unroll
        for (int x = 0; x < 2; ++x) {
          const std::int64_t d = first_feature() + t * 8 + 2 * (thread_.lane % 4) + x;
          if (d < width) {
            // Tensor cores give a sum of zeros either sign.
            target[d * gradient.feature] = (sums[t][2 * half + x] + 0.0f) * (1 / split_coefficient_scale) * scale;
          }
        }
      }
    }
  }

  const GradientArguments& args_;
  unsigned char *own_, *others_;  // A, B; A', B'
  float* staged_;                 // A', B' as [cols][Depth]
  float* scratch_;                // [slots][threads], for the parts of S and dP, modifiers, and slopes
  MmaThread thread_;              // its warp counts those of the same features
  int part_;                      // of the features
  std::int64_t b_ = 0, head_ = 0, first_ = 0;
  float sums_[features / 8][4];
  float value_sums_[KeysAreRows ? features / 8 : 1][4];
};

}  // namespace headway::cuda
