// The backward of short sequences for bf16 and f16, all gradients in one kernel: every option but spans, every stride,
// up to 16 KeyGroups keys and head dims up to Depth. The formulas are those of mma_gradient.cuh.
//
// A block owns all keys of one kv head, so that nobody else adds to its dq, dk or dv. Tiles of 64 queries pass by, of
// all query heads one after the other:
//   delta = rowsum(dO * O)
//   S^T = K Q^T   P = exp(S - lse)   dP^T = V dO^T   dS = P (dP - delta)      a warp has 16 keys x 32 queries
//   dV += P^T dO  dK += dS^T Q       16 keys x Depth / Split features a warp, sums in registers
//   dQ = dS K                        16 queries x 32 or 64 features a warp, complete, and so stored
// P^T and dS^T lie between as halves [keys][queries] in shared memory.
//
// Bytes: Q, K, V, O and dO are read once and the gradients written once, which bounds batches of many heads. Few heads
// are bound by latency: one kernel, and a chain of five products for each tile. Rows and features that only fill tiles
// are left out of products, in steps of 16 or 32.
#pragma once

#include "engines/cuda/kernels/allowed_words.cuh"
#include "engines/cuda/kernels/mma_scores.cuh"
#include "engines/cuda/kernels/plain_rows.cuh"
#include "engines/cuda/kernels/short_gradient_kernels.h"
#include "engines/cuda/kernels/short_gradient_tiles.cuh"
#include "engines/cuda/ptx/dependent_launch.cuh"
#include "engines/cuda/ptx/hidden.cuh"

namespace headway::cuda {

// Whether scores may be more than products times the scale where mask and ranges allow them, or weights dropped.
enum class ShortScores : std::uint8_t { scaled, modified };

template <class T, int Depth, int KeyGroups, int Split, ShortScores Scores>
class ShortGradient {
 public:
  static constexpr int keys = 16 * KeyGroups, queries = short_queries;
  static constexpr int warps = KeyGroups * Split, threads = 32 * warps;
  static constexpr int key_bytes = keys * Depth * 2, query_bytes = queries * Depth * 2, pair_bytes = keys * queries * 2;
  static constexpr int part = 32, parts = queries / part;  // queries of a warp's scores
  static constexpr int tiles = part / 8, slots = part / 2;
  static constexpr int own_tiles = Depth / Split / 8;  // of dk and dv in a warp
  static constexpr int query_groups = queries / 16, slices = warps / query_groups;
  static constexpr int slice = Depth / slices < 32 ? 32 : Depth / slices > 64 ? 64 : Depth / slices;  // of dq in a warp
  static_assert(warps % query_groups == 0);

  // With one stage the outputs lie where pairs come later.
  static constexpr bool outputs_share = query_bytes <= 2 * pair_bytes;
  static constexpr std::size_t shared_bytes(int stages) {
    return 2 * key_bytes + 2 * pair_bytes + stages * (stages == 1 && outputs_share ? 2 : 3) * query_bytes;
  }

  __device__ ShortGradient(const ShortGradientArguments& args, unsigned char* shared, int stages)
      : args_(args),
        keys_(shared),
        values_(shared + key_bytes),
        weights_(shared + 2 * key_bytes),
        score_gradients_(weights_ + pair_bytes),
        stages_(score_gradients_ + pair_bytes),
        last_stage_(stages - 1),
        warp_(static_cast<int>(threadIdx.x) / 32),
        lane_(static_cast<int>(threadIdx.x) % 32) {}

  __device__ void run(int b, int g) {
    b_ = b, g_ = g;
    if (threadIdx.x == 0) {
      sequence() = sequence_of(args_, b);
    }
    __syncthreads();
    key_count_ = static_cast<int>(sequence().key_count);
    head_tiles_ = static_cast<int>((sequence().query_count + queries - 1) / queries);
    clear_absent_tiles();
    fill_keys();
    fill_short_tile<Depth, threads>(rows_of_keys(args_.value, args_.value_dim), 0, whole_keys(), values_);
    ptx::commit_copies();
#pragma unroll 1  // one copy of the code for both walks
    for (int careful = 0; careful < 2; ++careful) {
      walk(careful != 0);
      if (!__syncthreads_or(nan_ || holds_nan(key_sums_) || holds_nan(value_sums_))) {
        break;
      }
    }
    store_keys(args_.key_gradient, args_.head_dim, bounded<float>(args_.scale), key_sums_);
    store_keys(args_.value_gradient, args_.value_dim, 1.0f, value_sums_);
  }

 private:
  // In shared memory, since it is read now and then and has many numbers.
  __device__ static Sequence& sequence() {
    __shared__ Sequence sequence;
    return sequence;
  }
  // Of the queries of one step and the next: the keys that each sees, its lse, +inf for coarse rows, and its delta.
  struct RowStates {
    int2 ranges[queries];
    float lse[queries], delta[queries];
  };
  __device__ static RowStates& states(int step) {
    __shared__ RowStates states[2];
    return states[step & 1];
  }
  // Of a careful walk: a bit for each key of a query that sees it, and for each row that lost an element.
  static constexpr int words_a_query = (keys + 31) / 32;
  __device__ static std::uint32_t* allowed() {
    __shared__ std::uint32_t allowed[queries * words_a_query];
    return allowed;
  }
  __device__ static std::uint32_t* found() {
    __shared__ std::uint32_t found[(keys > queries ? keys : queries) / 32];
    return found;
  }

  // The step that the walk is at: a tile of one query head.
  struct Step {
    int number, h, first;
    int count;  // rows of the tile that exist, padding included
    unsigned char *query, *grad_out, *out;
  };

  __device__ int whole_keys() const { return (key_count_ + 15) / 16 * 16; }
  __device__ int group() const { return warp_ % KeyGroups; }
  __device__ int side() const { return warp_ / KeyGroups; }
  __device__ int own_feature() const { return side() * (Depth / Split); }

  __device__ HalfRows<T> rows_of_queries(const Rows& view, std::int64_t h, std::int64_t width) const {
    return {view, b_, h, sequence().query_begin, sequence().real_queries, width};
  }
  __device__ HalfRows<T> rows_of_keys(const Rows& view, std::int64_t width) const {
    return {view, b_, g_, sequence().key_begin, sequence().key_count, width};
  }
  __device__ void fill_keys() {
    fill_short_tile<Depth, threads>(rows_of_keys(args_.key, args_.head_dim), 0, whole_keys(), keys_);
  }

  __device__ int* found_coarse(std::int64_t h) const {
    return args_.coarse.found + (b_ * args_.heads + h) * args_.coarse.tiles;
  }

  // A pack's longest sequence has more tiles than this one.
  __device__ void clear_absent_tiles() const {
    const std::int64_t absent = args_.coarse.tiles - head_tiles_;
    for (std::int64_t n = threadIdx.x; n < args_.group * absent; n += threads) {
      found_coarse(g_ * args_.group + n / absent)[head_tiles_ + n % absent] = 0;
    }
  }

  __device__ Step step_at(int number) const {
    Step step;
    step.number = number;
    step.h = g_ * static_cast<int>(args_.group) + number / head_tiles_;
    step.first = number % head_tiles_ * queries;
    step.count = min(static_cast<int>(sequence().query_count) - step.first, queries);
    step.query = stages_ + (number & last_stage_) * 3 * query_bytes;
    step.grad_out = step.query + query_bytes;
    step.out = last_stage_ == 0 && outputs_share ? weights_ : step.grad_out + query_bytes;
    return step;
  }

  // Begins to load a step.
  __device__ void fetch(int number, int steps) {
    if (number < steps) {
      const Step step = step_at(number);
      const int rows = (step.count + part - 1) / part * part;
      fill_short_tile<Depth, threads>(rows_of_queries(args_.query, step.h, args_.head_dim), step.first, rows,
                                      step.query);
      fill_short_tile<Depth, threads>(rows_of_queries(args_.grad_out, step.h, args_.value_dim), step.first, rows,
                                      step.grad_out);
      fill_short_tile<Depth, threads>(rows_of_queries(args_.out, step.h, args_.value_dim), step.first, rows, step.out);
      const auto row = static_cast<int>(threadIdx.x);
      if (row < queries) {
        RowStates& rows_states = states(number);
        const std::int64_t i = step.first + row;
        const bool real = i < sequence().real_queries;
        const float* lse = head_of<float>(args_.lse, b_, step.h) + (sequence().query_begin + i) * args_.lse.row;
        ptx::copy_word(ptx::shared_address(&rows_states.lse[row]), real ? lse : args_.lse.data, real ? 4 : 0);
        const KeyRange range = row_range(args_, sequence(), b_, i);
        rows_states.ranges[row] = {static_cast<int>(range.begin), static_cast<int>(range.end)};
      }
    }
    ptx::commit_copies();
  }

  __device__ void walk(bool careful) {
    nan_ = false;
    clear(key_sums_);
    clear(value_sums_);
    const int steps = static_cast<int>(args_.group) * head_tiles_;
#pragma unroll 1
    for (int number = -last_stage_; number < steps; ++number) {
      ptx::hide(lane_);
      ptx::hide(warp_);
      fetch(number + last_stage_, steps);
      if (number < 0) {
        continue;
      }
      if (last_stage_ != 0) {
        ptx::wait_for_copies<1>();
      } else {
        ptx::wait_for_copies<0>();
      }
      const Step step = step_at(number);
      __syncthreads();
      const bool coarse = find_coarse(step);
      find_deltas(step);
      if (careful) {
        for (int n = static_cast<int>(threadIdx.x); n < queries * words_a_query; n += threads) {
          allowed()[n] = 0;
        }
      }
      const int any_coarse = __syncthreads_or(coarse);
      if (threadIdx.x == 0) {
        found_coarse(step.h)[step.first / queries] = any_coarse;
      }
      const Modifiers<float> modifiers(args_, sequence(), b_, step.h);
#pragma unroll 1
      for (int p = side(); p < parts; p += Split) {
        if (group() * 16 < key_count_ && p * part < step.count) {
          find_scores(modifiers, step, p * part, careful);
        }
      }
      __syncthreads();
      add_gradients(step, careful);
      __syncthreads();  // the stage and the tiles of pairs may be filled again
    }
    ptx::wait_for_copies<0>();
  }

  // Whether this thread's row is coarse: its weights become 0 here.
  __device__ static bool find_coarse(const Step& step) {
    const auto row = static_cast<int>(threadIdx.x);
    if (row >= step.count) {
      return false;
    }
    float& lse = states(step.number).lse[row];
    const bool coarse = is_coarse(lse);
    lse = coarse ? infinity<float>() : lse;
    return coarse;
  }

  template <int Tiles>
  __device__ static void clear(float (&sums)[Tiles][4]) {
#pragma unroll
    for (int t = 0; t < Tiles; ++t) {
      sums[t][0] = sums[t][1] = sums[t][2] = sums[t][3] = 0;
    }
  }

  // delta(i) = <dO(i), O(i)>, four lanes a row. Where O is 0 the term is 0, whatever dO holds.
  __device__ void find_deltas(const Step& step) {
    constexpr int lanes = 4;
    const int lane = static_cast<int>(threadIdx.x) % lanes;
    const auto width = static_cast<int>(args_.value_dim);
#pragma unroll 1
    for (int r = static_cast<int>(threadIdx.x) / lanes; r < queries; r += threads / lanes) {
      float sum = 0;
      if (r < step.count) {
#pragma unroll 2
        for (int chunk = lane; chunk * 8 < width; chunk += lanes) {
          const uint4 grads = *reinterpret_cast<const uint4*>(step.grad_out + chunk_at<Depth>(r, chunk));
          const uint4 outs = *reinterpret_cast<const uint4*>(step.out + chunk_at<Depth>(r, chunk));
          sum = add_products(grads.x, outs.x, sum);
          sum = add_products(grads.y, outs.y, sum);
          sum = add_products(grads.z, outs.z, sum);
          sum = add_products(grads.w, outs.w, sum);
        }
      }
      sum = quad_sum(sum);
      if (lane == 0) {
        states(step.number).delta[r] = sum;
      }
    }
  }

  __device__ static float add_products(std::uint32_t grads, std::uint32_t outs, float sum) {
    const float2 grad = ptx::unpacked_pair<T>(grads), out = ptx::unpacked_pair<T>(outs);
    sum += out.x == 0.0f ? 0.0f : grad.x * out.x;
    return sum + (out.y == 0.0f ? 0.0f : grad.y * out.y);
  }

  // P^T and dS^T of this warp's 16 keys and the 32 queries from `col` of the tile on.
  __device__ void find_scores(const Modifiers<float>& modifiers, const Step& step, int col, bool careful) {
    MmaThread thread;
    thread.warp = group();
    const int first_key = group() * 16;
    const KeyRowWords words(args_, b_, step.h, step.first + col + lane_, states(step.number).ranges[col + lane_],
                            first_key, sequence().key_count);
    float p[tiles][4] = {}, ds[tiles][4] = {};
    if (words.any()) {
      const std::uint32_t allowed = words.slots(lane_);
      multiply_short_rows<Depth, T>(lane_, keys_, first_key, step.query, col, static_cast<int>(args_.head_dim), p);
      float slopes[Scores == ShortScores::modified ? slots : 1];
      const std::uint32_t forbidden = make_weights(thread, modifiers, step, col, allowed, careful, p, slopes);
      const std::uint32_t kept =
          Scores == ShortScores::modified && args_.dropout.active
              ? kept_slots_transposed<tiles>(thread, args_.dropout, b_, step.h, 0, step.first + col)
              : ~0u;
      multiply_short_rows<Depth, T>(lane_, values_, first_key, step.grad_out, col, static_cast<int>(args_.value_dim),
                                    ds);
      make_score_gradients(thread, step, col, forbidden, kept, slopes, p, ds);
      if (careful) {
        mark_allowed(thread, col, forbidden);
      }
    }
    store_pairs(weights_, col, p);
    store_pairs(score_gradients_, col, ds);
  }

  // Products become weights p, 0 in the slots returned as forbidden.
  template <int Count>
  __device__ std::uint32_t make_weights(const MmaThread& thread, const Modifiers<float>& modifiers, const Step& step,
                                        int col, std::uint32_t allowed, bool careful, float (&p)[tiles][4],
                                        float (&slopes)[Count]) const {
    const auto inside = [&](int slot) { return (allowed >> slot & 1) != 0; };
    if constexpr (Scores == ShortScores::modified) {
      constexpr int batch = 8;
#pragma unroll
      for (int first = 0; first < slots; first += batch) {
        float few[batch], few_slopes[batch];
#pragma unroll
        for (int x = 0; x < batch; ++x) {
          few[x] = p[(first + x) / 4][x % 4];
        }
        const auto where = [&](int x) {
          return Pair{step.first + col + thread.col_of(first + x), thread.row_of(first + x), inside(first + x)};
        };
        modifiers.apply(few, where, few_slopes);
#pragma unroll
        for (int x = 0; x < batch; ++x) {
          p[(first + x) / 4][x % 4] = few[x];
          slopes[first + x] = few_slopes[x];
        }
      }
    } else {
      const bool masked = args_.mask.data != nullptr;
#pragma unroll
      for (int slot = 0; slot < slots; ++slot) {
        float& score = p[slot / 4][slot % 4];
        const float scaled = modifiers.scaled(score);
        score = !inside(slot) ? -infinity<float>() : masked ? modifiers.of_allowed(scaled) : scaled;
      }
    }
    if (careful) {  // an allowed score of -inf is not a forbidden pair's, and rows that are left out are forbidden
#pragma unroll
      for (int slot = 0; slot < slots; ++slot) {
        float& score = p[slot / 4][slot % 4];
        const bool left_out = states(step.number).lse[col + thread.col_of(slot)] == infinity<float>();
        const bool seen = Scores == ShortScores::modified ? score != -infinity<float>() : inside(slot);
        score = seen && !left_out ? Modifiers<float>::of_allowed(score) : -infinity<float>();
      }
    }
    std::uint32_t forbidden = 0;
#pragma unroll
    for (int slot = 0; slot < slots; ++slot) {
      float& score = p[slot / 4][slot % 4];
      const bool none = score == -infinity<float>();
      forbidden |= std::uint32_t{none} << slot;
      score = none ? 0.0f : exponential(score - states(step.number).lse[col + thread.col_of(slot)]);
    }
    return forbidden;
  }

  // dP becomes dS, and weights those that dropout leaves.
  template <int Count>
  __device__ void make_score_gradients(const MmaThread& thread, const Step& step, int col, std::uint32_t forbidden,
                                       std::uint32_t kept, const float (&slopes)[Count], float (&p)[tiles][4],
                                       float (&ds)[tiles][4]) const {
    const float kept_scale = static_cast<float>(args_.dropout.kept_scale);
#pragma unroll
    for (int slot = 0; slot < slots; ++slot) {
      float& weight = p[slot / 4][slot % 4];
      float& one = ds[slot / 4][slot % 4];
      const float delta = states(step.number).delta[col + thread.col_of(slot)];
      if constexpr (Scores == ShortScores::modified) {
        const float factor = (kept >> slot & 1) != 0 ? kept_scale : 0.0f;
        one = weight * (one * factor - delta) * slopes[slot];
        weight = (kept >> slot & 1) != 0 ? weight * kept_scale : 0.0f;
      } else {
        one = weight * (one - delta);
      }
      one = (forbidden >> slot & 1) != 0 ? 0.0f : one;
    }
  }

  __device__ void mark_allowed(const MmaThread& thread, int col, std::uint32_t forbidden) const {
#pragma unroll 1
    for (int slot = 0; slot < slots; ++slot) {
      if ((forbidden >> slot & 1) == 0) {
        const int key = thread.row_of(slot);
        atomicOr(allowed() + (col + thread.col_of(slot)) * words_a_query + key / 32, 1u << key % 32);
      }
    }
  }

  __device__ void store_pairs(unsigned char* tile, int col, const float (&c)[tiles][4]) const {
#pragma unroll
    for (int t = 0; t < tiles; ++t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int key = group() * 16 + lane_ / 4 + 8 * half;
        *reinterpret_cast<std::uint32_t*>(tile + chunk_at<queries>(key, col / 8 + t) + lane_ % 4 * 4) =
            ptx::packed_pair<T>(c[t][2 * half], c[t][2 * half + 1]);
      }
    }
  }

  // dV += P^T dO   dK += dS^T Q   dQ = dS K, each with what a careful walk takes out of the second operand.
  __device__ void add_gradients(const Step& step, bool careful) {
    const bool has_keys = group() * 16 < key_count_;
    const int row = group() * 16, count = (step.count + 15) / 16 * 16;
    const auto head_dim = static_cast<int>(args_.head_dim), value_dim = static_cast<int>(args_.value_dim);
    if (careful) {
      take_out(step.grad_out, queries);
    }
    if (has_keys) {
      multiply_short_coefficients<false, Depth, T>(lane_, weights_, row, step.grad_out, count, own_feature(), value_dim,
                                                   value_sums_);
    }
    if (careful) {
      add_lost<false>(rows_of_queries(args_.grad_out, step.h, value_dim), step.first, step.count, weights_, row,
                      own_feature(), value_sums_);
      take_out(step.query, queries);
    }
    if (has_keys) {
      multiply_short_coefficients<false, Depth, T>(lane_, score_gradients_, row, step.query, count, own_feature(),
                                                   head_dim, key_sums_);
    }
    if (careful) {
      add_lost<false>(rows_of_queries(args_.query, step.h, head_dim), step.first, step.count, score_gradients_, row,
                      own_feature(), key_sums_);
      take_out(keys_, whole_keys());
    }
    find_query_gradients(step, careful);
    if (careful) {
      __syncthreads();
      fill_keys();
      ptx::commit_copies();
      ptx::wait_for_copies<0>();
    }
  }

  __device__ void find_query_gradients(const Step& step, bool careful) {
    const int row = warp_ % query_groups * 16;
    const auto width = static_cast<int>(args_.head_dim);
    if (args_.query_gradient.data == nullptr || row >= step.count) {
      return;
    }
    T* target = head_of<T>(args_.query_gradient, b_, step.h) +
                (sequence().query_begin + step.first + row) * args_.query_gradient.row;
#pragma unroll 1
    for (int feature = warp_ / query_groups * slice; feature < width; feature += slices * slice) {
      float sums[slice / 8][4];
      clear(sums);
      multiply_short_coefficients<true, Depth, T>(lane_, score_gradients_, row, keys_, whole_keys(), feature, width,
                                                  sums);
      if (careful) {
        add_lost<true>(rows_of_keys(args_.key, width), 0, key_count_, score_gradients_, row, feature, sums);
      }
      nan_ |= holds_nan(sums);
      store_short_rows(lane_, target, args_.query_gradient, step.count - row, feature, width,
                       bounded<float>(args_.scale), sums);
    }
  }

  // What is not finite in a tile becomes 0, and its row's bit in found() is set. Begins and ends with a barrier.
  __device__ void take_out(unsigned char* tile, int rows) const {
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < (keys > queries ? keys : queries) / 32) {
      found()[threadIdx.x] = 0;
    }
    __syncthreads();
    for (int task = static_cast<int>(threadIdx.x); task < rows * Depth; task += threads) {
      T* element = reinterpret_cast<T*>(tile) + task;  // swizzling keeps an element in its row
      if (!is_finite(*element)) {
        *element = T{};
        atomicOr(found() + task / Depth / 32, 1u << task / Depth % 32);
      }
    }
    __syncthreads();
  }

  // On a copy of the sums in local memory, to keep the walk's own in registers.
  template <bool QueriesAreRows, int Tiles>
  __device__ void add_lost(const HalfRows<T>& rows, std::int64_t first, int count, const unsigned char* coefficients,
                           int row, int feature, float (&sums)[Tiles][4]) const {
    float copy[Tiles * 4];
#pragma unroll
    for (int n = 0; n < Tiles * 4; ++n) {
      copy[n] = sums[n / 4][n % 4];
    }
    add_taken_out<QueriesAreRows>(rows, first, count, found(), coefficients, allowed(), words_a_query, row, feature,
                                  copy, Tiles);
#pragma unroll
    for (int n = 0; n < Tiles * 4; ++n) {
      sums[n / 4][n % 4] = copy[n];
    }
  }

  __device__ void store_keys(const Rows& gradient, std::int64_t width, float scale,
                             const float (&sums)[own_tiles][4]) const {
    const int row = group() * 16;
    if (gradient.data == nullptr || row >= key_count_) {
      return;
    }
    T* target = head_of<T>(gradient, b_, g_) + (sequence().key_begin + row) * gradient.row;
    store_short_rows(lane_, target, gradient, key_count_ - row, own_feature(), static_cast<int>(width), scale, sums);
  }

  const ShortGradientArguments& args_;
  unsigned char *keys_, *values_, *weights_, *score_gradients_, *stages_;
  const int last_stage_;
  int warp_, lane_;
  int b_ = 0, g_ = 0;
  int key_count_ = 0, head_tiles_ = 0;
  bool nan_ = false;
  float key_sums_[own_tiles][4], value_sums_[own_tiles][4];
};

template <class T, int Depth, int KeyGroups, int Split, ShortScores Scores, int BlocksAtOnce>
__global__ void __launch_bounds__(32 * KeyGroups * Split, BlocksAtOnce)
    short_gradient(const __grid_constant__ ShortGradientArguments arguments, int stages) {
  extern __shared__ __align__(128) unsigned char shared[];
  ptx::let_next_kernel_start();  // the kernel of coarse rows, which waits for this one's end
  ShortGradient<T, Depth, KeyGroups, Split, Scores> gradient(arguments, shared, stages);
  const auto kv_heads = static_cast<unsigned>(arguments.kv_heads);
  gradient.run(static_cast<int>(blockIdx.x / kv_heads), static_cast<int>(blockIdx.x % kv_heads));
}

}  // namespace headway::cuda
