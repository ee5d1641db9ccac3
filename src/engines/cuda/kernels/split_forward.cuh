// Forward for f32 on tensor cores, for every option and stride and head dims up to Depth, within the bounds of exact
// f32 arithmetic. split_tile.cuh says how numbers are split and which are left out.
//
// A block owns 64 queries (128 of 128 features, by warps) of one head and walks over the keys of its rows' ranges, 32
// at a time (16 of 256 features, by warps). Rows of K and V are copied as they are a step ahead, then split into planes
// once for all warps. A step is 6 x 2 rows keys (D + Dv) operations of the tensor cores, which bound it, for (D + Dv)
// keys loads from L2; next comes the splitting, about 6 instructions an element, and where warps make the products
// (before Hopper) their reads of planes. Two warpgroups share the rows of 256 features, as in split_gradient.cuh.
//
// Sums over keys have three levels, so that equal terms do not drift: a step's own, those of 1024 keys, and compensated
// ones of all keys. The last are touched so rarely that they lie in local memory.
//
// Scores of keys and queries that can not be split are replaced by f32 products, and values that can not be split are
// added by f32 arithmetic to the rows that may see them. Weights are relative to the highest score, at most 1, and
// multiplied by 2^24, so that all parts of the smallest ones are normal numbers. Values beyond 2^100 may overflow then:
// rows whose sums are infinite are done again in plain arithmetic.
#pragma once

#include "engines/cuda/kernels/launch.cuh"
#include "engines/cuda/kernels/mma_scores.cuh"
#include "engines/cuda/kernels/plain_again.cuh"
#include "engines/cuda/kernels/softmax.cuh"
#include "engines/cuda/kernels/split_tile.cuh"

namespace headway::cuda {

// `Width` of the features count, the others are 0. Products are WarpProducts or WarpgroupProducts.
template <class Products, int Depth, int Width = Depth>
class SplitForward {
 public:
  static constexpr bool by_warpgroups = Products::by_warpgroups;
  static constexpr int parts = by_warpgroups && Depth == 256 ? 2 : 1, features = Width / parts;  // of a warp
  static constexpr int row_warps = !by_warpgroups && Depth == 128 ? 8 : 4, rows = row_warps * 16;
  static constexpr int threads = row_warps * parts * 32;
  static constexpr int keys = !by_warpgroups && Depth == 256 ? 16 : 32;
  static constexpr int tiles = keys / 8, slots = keys / 2;  // of a warp's scores, in one thread
  static constexpr int query_plane = rows * Depth * 2, key_plane = keys * Depth * 2;
  static constexpr int staged_size = keys * Depth, alignment = Products::alignment;
  static constexpr float weight_scale = 0x1p24f;

  __host__ static std::size_t shared_bytes() {
    return split_parts * (query_plane + (shares_planes ? 1 : 2) * key_plane) + 2 * staged_size * sizeof(float) +
           (alignment - 16);
  }

  __device__ SplitForward(const ForwardArguments& args, unsigned char* shared)
      : args_(args),
        queries_(shared),
        keys_(queries_ + split_parts * query_plane),
        values_(keys_ + (shares_planes ? 0 : split_parts * key_plane)),
        staged_(reinterpret_cast<float*>(values_ + split_parts * key_plane)),
        part_(__shfl_sync(~0u, thread_.warp / row_warps, 0)) {
    thread_.warp %= row_warps;
  }

  __device__ void run(std::int64_t b, std::int64_t h, std::int64_t tile) {
    b_ = b, h_ = h, first_ = tile * rows;
    __syncthreads();  // the tile before has been read
    if (threadIdx.x == 0) {
      here().sequence = sequence_of(args_, b);
      here().range = tile_range(args_, here().sequence, b, first_, rows);
    }
    __syncthreads();
    if (first_ >= here().sequence.query_count) {
      return;
    }
    if (static_cast<int>(threadIdx.x) < rows) {
      here().ranges[threadIdx.x] = row_keys(args_, here().sequence, b, h, first_ + threadIdx.x);
    }
    fill_queries();
    walk();
    store();
    do_again();
  }

 private:
  // Values are split where the keys were, once everybody has read these: then two blocks of 128 features fit, and 32
  // keys of 256.
  static constexpr bool shares_planes = by_warpgroups;
  static constexpr int slots_size = slots * threads;
  using Scores = typename Products::template Scores<rows, keys, Depth, features>;
  using Sums = typename Products::template Sums<keys, Depth, features>;

  // What all threads know about the tile, in shared memory to save registers.
  struct Here {
    Sequence sequence;
    TileRange range;
    KeyRange ranges[rows];
    std::uint64_t words[span_words<rows, keys>];
    std::uint32_t marked_queries[rows / keys];
    std::uint32_t marked_keys[2], marked_values[2];  // of this step and the next one
  };
  // A thread's sums over all keys but the last few, relative to the highest scores of then.
  struct FarSums {
    CompensatedSum<float> sums[features / 2];
    float highest[2];
  };
  __device__ static Here& here() {
    __shared__ Here here;
    return here;
  }

  __device__ int first_feature() const { return part_ * features; }

  __device__ RowSource<float> rows_from(const Rows& view, std::int64_t head, std::int64_t first) const {
    const Sequence& sequence = here().sequence;
    return &view == &args_.query ? RowSource<float>(view, b_, head, sequence.query_begin, first, sequence.query_count)
                                 : RowSource<float>(view, b_, head, sequence.key_begin, first, sequence.key_count);
  }

  // `keys` rows at a time, through the place where keys are staged later.
  __device__ void fill_queries() {
#pragma unroll 1
    for (int r = 0; r < rows; r += keys) {
      start_rows<threads, keys, Depth>(rows_from(args_.query, h_, first_ + r), 0, args_.head_dim, staged_, Depth);
      ptx::commit_copies();
      ptx::wait_for_copies<0>();
      std::uint32_t& marked = here().marked_queries[r / keys];
      if (threadIdx.x == 0) {
        marked = 0;
      }
      __syncthreads();
      split_rows<Products, threads, keys, Depth, score_limits, rows, Width>(staged_, queries_, r, &marked);
      Products::planes_are_written();
      __syncthreads();
    }
  }

  __device__ void start_keys(std::int64_t key) {
    start_rows<threads, keys, Depth>(rows_from(args_.key, h_ / args_.group, key), 0, args_.head_dim, staged_, Depth);
  }
  __device__ void start_values(std::int64_t key) {
    start_rows<threads, keys, Depth>(rows_from(args_.value, h_ / args_.group, key), 0, args_.value_dim,
                                     staged_ + staged_size, Depth);
  }
  __device__ void split_keys(int stage) {
    split_rows<Products, threads, keys, Depth, score_limits, keys, Width>(staged_, keys_, 0,
                                                                          &here().marked_keys[stage]);
  }
  __device__ void split_values(int stage) {
    split_rows<Products, threads, keys, Depth, sum_limits, keys, Width>(staged_ + staged_size, values_, 0,
                                                                        &here().marked_values[stage]);
  }

  __device__ void walk() {
    rows_[0] = rows_[1] = {};
    lost_[0] = lost_[1] = 0;
    clear(out_);
    const Modifiers<float> modifiers(args_, here().sequence, b_, h_);
    const std::int64_t end = here().range.end;
    const auto next_from = [&](std::int64_t key) {
      return next_key_tile(args_, here().sequence, b_, h_, first_, rows, key, end, keys);
    };
    std::int64_t key = next_from(here().range.begin / keys * keys);
    if (key < end) {
      start_keys(key);
      if constexpr (shares_planes) {
        ptx::commit_copies();  // values have a group of their own, which is waited for later
      }
      start_values(key);
      ptx::commit_copies();
    }
    if (threadIdx.x == 0) {
      here().marked_keys[0] = here().marked_values[0] = 0;
    }
    constexpr int steps_a_part = 1024 / keys;
    int stage = 0, steps = 0;
    FarSums far;  // no member: what is in local memory must not take the rest along
    bool any_far = false;
#pragma unroll 1
    while (key < end) {
      ptx::wait_for_copies<shares_planes ? 1 : 0>();
      __syncthreads();  // everybody's copies have come, and the step before has been read
      if (threadIdx.x == 0) {
        here().marked_keys[stage ^ 1] = here().marked_values[stage ^ 1] = 0;
      }
      split_keys(stage);
      if constexpr (!shares_planes) {
        split_values(stage);
      }
      Products::planes_are_written();
      __syncthreads();
      const std::int64_t next = next_from(key + keys);
      if (next < end) {
        start_keys(next);
        if constexpr (!shares_planes) {
          start_values(next);
        }
      }
      ptx::commit_copies();
      step(modifiers, key, stage, next < end ? next : -1);
      if (++steps == steps_a_part) {
        put_far(any_far, far);
        any_far = true;
        steps = 0;
      }
      key = next;
      stage ^= 1;
    }
    if (any_far) {
      put_far(true, far);
#pragma unroll
      for (int slot = 0; slot < features / 2; ++slot) {
        out_[slot / 4][slot % 4] = far.sums[slot].value;
      }
    }
    rows_[0].total = quad_sum(rows_[0].total);
    rows_[1].total = quad_sum(rows_[1].total);
  }

  // `next` is the first key of the next step, -1 in the last one.
  __device__ void step(const Modifiers<float>& modifiers, std::int64_t key, int stage, std::int64_t next) {
    float scores[tiles][4];  // S = Q K^T  [16, keys] of this warp
    Scores product;
    product.start(thread_, queries_, keys_, first_feature(),
                  static_cast<int>(smaller(args_.head_dim, first_feature() + features)));
    product.template finish<0>(scores);
    const bool plain = modifiers.only_scale() && key >= here().range.full_begin && key + keys <= here().range.full_end;
    if (!plain || parts > 1) {
      __syncthreads();  // everybody has read the keys: their place becomes the scratch
    }
    float* scratch = reinterpret_cast<float*>(keys_);
    static_assert((parts > 1 ? 2 : 1) * slots_size * sizeof(float) <= split_parts * key_plane);
    if constexpr (parts > 1) {
      join(scratch + slots_size, scores);
    }
    if (const std::uint32_t marked = here().marked_keys[stage] | marked_rows(); marked != 0) {
      replace_products(rows_from(args_.query, h_, first_), rows_from(args_.key, h_ / args_.group, key), args_.head_dim,
                       here().marked_keys[stage], marked_rows(), thread_.warp, scores);
    }
    const auto where = [&](int r, int c) {
      const KeyRange range = here().ranges[r];
      return Pair{first_ + r, key + c, key + c >= range.begin && key + c < range.end};
    };
    // [slots][mma_threads] for every 128 threads.
    modify_slots(thread_, modifiers, plain, where,
                 scratch + static_cast<int>(threadIdx.x) / mma_threads * (slots - 1) * mma_threads, nullptr, scores);
    if (has_holes(args_, here().sequence, b_, h_, first_, rows, key, keys)) {
      fill_span_words<rows, keys>(args_, here().sequence, b_, h_, first_, key, here().words);
      __syncthreads();
      forbid_by_words<false>(thread_, here().words, 0, scores);
    }
    if constexpr (shares_planes) {
      ptx::wait_for_copies<1>();
      __syncthreads();  // everybody's values have come, and the scratch has been read
      split_values(stage);
      Products::planes_are_written();
      __syncthreads();
      if (next >= 0) {
        start_values(next);
      }
      ptx::commit_copies();
    }
    const std::uint32_t forbidden = weigh(key, scores);
    Sums sums;
    sums.start(thread_, scores, weight_scale, values_, first_feature(), static_cast<int>(args_.value_dim), out_);
    sums.template finish<0>(out_);  // O += P V  [16, Dv]
    if (const std::uint32_t marked = here().marked_values[stage]; marked != 0) {
      add_taken_out<sum_limits>(rows_from(args_.value, h_ / args_.group, key), args_.value_dim, marked, scores,
                                weight_scale, forbidden, first_feature(), out_);
    }
  }

  // The scores' parts of both warps that share rows. (Their sum does not depend on which comes first.)
  __device__ void join(float* place, float (&scores)[tiles][4]) {
    float* mine = place + threadIdx.x;
    const float* other = place + (threadIdx.x ^ row_warps * 32);
#pragma unroll
    for (int slot = 0; slot < slots; ++slot) {
      mine[slot * threads] = scores[slot / 4][slot % 4];
    }
    __syncthreads();
#pragma unroll
    for (int slot = 0; slot < slots; ++slot) {
      scores[slot / 4][slot % 4] += other[slot * threads];
    }
  }

  // Bits of the thread's two rows: whether their queries could not be split.
  __device__ std::uint32_t marked_rows() const {
    const auto bit = [&](int r) { return here().marked_queries[r / keys] >> r % keys & 1; };
    return bit(thread_.row_of(0)) | bit(thread_.row_of(2)) << 1;
  }

  // Scores become weights relative to the row's highest score; returns the slots that are forbidden.
  __device__ std::uint32_t weigh(std::int64_t key, float (&scores)[tiles][4]) {
    std::uint32_t forbidden = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float highest = -infinity<float>();
#pragma unroll
      for (int t = 0; t < tiles; ++t) {
        highest = higher(higher(highest, scores[t][2 * half]), scores[t][2 * half + 1]);
      }
      const float factor = rows_[half].raise(quad_maximum(highest));
      const float base = reference(rows_[half].highest);
      float sum = 0;
#pragma unroll
      for (int t = 0; t < tiles; ++t) {
#pragma unroll
        for (int x = 0; x < 2; ++x) {
          float& score = scores[t][2 * half + x];
          forbidden |= std::uint32_t{score == -infinity<float>()} << (4 * t + 2 * half + x);
          score = exponential(score - base);
          sum += score;
        }
      }
      CompensatedSum<float> total{rows_[half].total, lost_[half] * factor};
      total.add(sum);  // of this thread's columns, until the end
      rows_[half].total = total.value, lost_[half] = total.lost;
#pragma unroll
      for (int t = 0; t < features / 8; ++t) {
        out_[t][2 * half] *= factor;
        out_[t][2 * half + 1] *= factor;
      }
    }
    if (args_.dropout.active) {
      const std::uint32_t kept = kept_slots<tiles>(thread_, args_.dropout, b_, h_, first_, key);
#pragma unroll
      for (int slot = 0; slot < slots; ++slot) {
        scores[slot / 4][slot % 4] = (kept >> slot & 1) != 0 ? scores[slot / 4][slot % 4] : 0.0f;
      }
    }
    return forbidden;
  }

  // The sums so far join those of all keys before, and begin again.
  __device__ void put_far(bool any, FarSums& far) {
    float sums[features / 2];
#pragma unroll
    for (int slot = 0; slot < features / 2; ++slot) {
      sums[slot] = out_[slot / 4][slot % 4];
    }
    add_to_far(any, rows_[0].highest, rows_[1].highest, sums, far);
    clear(out_);
  }

  __device__ __noinline__ static void add_to_far(bool any, float low, float high, const float* sums, FarSums& far) {
    const float factors[2] = {any ? exponential(far.highest[0] - reference(low)) : 0.0f,
                              any ? exponential(far.highest[1] - reference(high)) : 0.0f};
    far.highest[0] = low, far.highest[1] = high;
#pragma unroll 1
    for (int slot = 0; slot < features / 2; ++slot) {
      CompensatedSum<float> sum = any ? far.sums[slot] : CompensatedSum<float>{};
      sum.multiply(factors[slot / 2 % 2]);
      sum.add(sums[slot]);
      far.sums[slot] = sum;
    }
  }

  __device__ void store() {
    const float sink = sink_of<float>(args_, h_);
    const float kept_scale = static_cast<float>(args_.dropout.kept_scale) / weight_scale;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::int64_t i = first_ + thread_.row_of(2 * half);
      if (i >= here().sequence.query_count) {
        continue;
      }
      const RowEnd<float> end = close_row(rows_[half], sink, i >= here().sequence.real_queries);
      const std::int64_t row = here().sequence.query_begin + i;
      float* out = head_of<float>(args_.out, b_, h_) + row * args_.out.row;
#pragma unroll
      for (int t = 0; t < features / 8; ++t) {
#pragma unroll
        for (int x = 0; x < 2; ++x) {
          const std::int64_t d = first_feature() + t * 8 + 2 * (thread_.lane % 4) + x;
          if (d < args_.value_dim) {
            const float value = out_[t][2 * half + x] * end.factor * kept_scale;
            out[d * args_.out.feature] = rows_[half].empty() ? 0.0f : value;
          }
        }
      }
      if (args_.lse.data != nullptr && thread_.lane % 4 == 0 && part_ == 0) {
        head_of<float>(args_.lse, b_, h_)[row * args_.lse.row] = end.lse;
      }
    }
  }

  // Rows that the walk could not do, by the warp that has them.
  __device__ void do_again() {
    unsigned again[2];  // a lane for each row
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = thread_.row_of(2 * half);
      bool infinite = false;
#pragma unroll
      for (int t = 0; t < features / 8; ++t) {
        infinite |= fabsf(out_[t][2 * half]) == infinity<float>() || fabsf(out_[t][2 * half + 1]) == infinity<float>();
      }
      infinite &= first_ + r < here().sequence.query_count;
      const unsigned found = __ballot_sync(~0u, infinite);
      again[half] = 0x11111111u & (__ballot_sync(~0u, needs_plain_row(args_, rows_[half], here().ranges[r])) | found |
                                   found >> 1 | found >> 2 | found >> 3);
    }
#pragma unroll 1
    for (unsigned left = again[0] | again[1] << 1; left != 0; left &= left - 1) {
      const int bit = __ffs(static_cast<int>(left)) - 1;
      const int r = __shfl_sync(~0u, thread_.row_of(0), bit & ~3) + (bit & 1) * 8;
      attend_plainly<float>(args_, b_, h_, first_ + r, first_feature(),
                            smaller(args_.value_dim, first_feature() + features));
    }
  }

  const ForwardArguments& args_;
  unsigned char *queries_, *keys_, *values_;
  float* staged_;     // K, V as [keys][Depth]
  MmaThread thread_;  // its warp counts those of the same features
  int part_;          // of the features
  std::int64_t b_ = 0, h_ = 0, first_ = 0;
  RowSoftmax<float> rows_[2];
  float lost_[2];  // what rounding added to their totals
  float out_[features / 8][4];
};

template <class Forward, int Resident>
__global__ void __launch_bounds__(Forward::threads, Resident)
    split_forward(const __grid_constant__ ForwardArguments arguments, std::int64_t row_tiles, std::int64_t) {
  extern __shared__ __align__(16) unsigned char shared[];
  constexpr std::uint32_t alignment = Forward::alignment;
  Forward forward(arguments, shared + (alignment - ptx::shared_address(shared) % alignment) % alignment);
  const std::int64_t tasks = arguments.batch * arguments.heads * row_tiles;
  for (std::int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const std::int64_t head = task / row_tiles;
    // Late rows see the most keys when causal: they start first.
    forward.run(head / arguments.heads, head % arguments.heads, row_tiles - 1 - task % row_tiles);
  }
}

}  // namespace headway::cuda
