// A warp's tile of 16 query rows and up to `Keys` keys, bf16 and f16, whose operands go from global memory straight to
// the registers of tensor core products: no shared memory, no copies to wait for, no barriers.
//
// Two permutations make that possible, both free. Scores sum over features, in any order that Q and K share: a lane
// loads 16 bytes, 8 features of a row, and takes them for columns {2 q, 2 q + 1, 2 q + 8, 2 q + 9} of two products,
// with q = lane % 4. Of V a lane loads 8 features of 4 keys and packs pairs of keys: feature t of each lane's 8 is
// column lane / 4 of product t, so that an accumulator's 8 products are 8 neighbouring features of a row of the output.
//
// All scores of a row are in registers before the first exponential (Keys / 2 of them a lane), so there is no running
// maximum; the output is made 64 features at a time, whatever its width.
#pragma once

#include "engines/cuda/dropout.cuh"
#include "engines/cuda/kernels/direct_rows.cuh"
#include "engines/cuda/kernels/mma_scores.cuh"
#include "engines/cuda/kernels/plain_again.cuh"
#include "engines/cuda/kernels/softmax.cuh"
#include "engines/cuda/kernels/store_eight.cuh"

namespace headway::cuda {

constexpr int direct_rows = 16;
constexpr int direct_features = 64;  // of the output, made together

// Of two keys' words, the pair of halves that feature `high` of each has.
__device__ __forceinline__ std::uint32_t key_pair(std::uint32_t first, std::uint32_t second, bool high) {
  return __byte_perm(first, second, high ? 0x7632 : 0x5410);
}

__device__ __forceinline__ std::uint32_t word_of(const uint4& four, int n) {
  return n == 0 ? four.x : n == 1 ? four.y : n == 2 ? four.z : four.w;
}

// `Modified`: softcap, mask, bias, ALiBi or dropout, besides scale, ranges and sinks.
template <class T, int Keys, bool Modified>
class DirectTile {
 public:
  static constexpr int tiles = Keys / 8, steps = Keys / 16;
  static constexpr float weight_scale = std::is_same_v<T, float16> ? 32768.0f : 1.0f;
  // Floats of scratch for each thread: modifiers are applied in a loop, which registers cannot be indexed by.
  static constexpr int scratch = Modified && Keys > 16 ? Keys / 2 : 0;
  using Scores = float[tiles][4];           // S = Q K^T  [16, Keys]
  using Weights = std::uint32_t[steps][4];  // P in pairs of T: the left operands of P V
  using Sums = float[8][4];                 // O = P V  [16, 64]; see sums_of

  __device__ explicit DirectTile(const ForwardArguments& args)
      : args_(args), lane_(static_cast<int>(threadIdx.x) % 32) {}

  // Row r of the kv head is query r / group of head g * group + r % group. False: the sequence has none of these rows.
  __device__ bool start(int b, int g, int row_tile) {
    b_ = b;
    sequence_ = sequence_of(args_, b);
    const int group = static_cast<int>(args_.group), first = row_tile * direct_rows;
    const std::int64_t all = args_.group * sequence_.query_count;
    if (first >= all) {
      return false;
    }
    real_rows_ = static_cast<int>(smaller(all - first, direct_rows));
    const int first_query = first / group, last_query = (first + real_rows_ - 1) / group;
    const TileRange range = tile_range(args_, sequence_, b, first_query, last_query + 1 - first_query);
    begin_ = static_cast<int>(range.begin) & ~7;  // dropout draws for 4 keys at once
    end_ = static_cast<int>(range.end);
    keys_ = head_of<T>(args_.key, b, g) + sequence_.key_begin * args_.key.row;
    values_ = head_of<T>(args_.value, b, g) + sequence_.key_begin * args_.value.row;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = first + lane_ / 4 + 8 * half;
      real_[half] = r < all;
      query_[half] = r / group;
      head_[half] = g * group + r % group;
      const KeyRange keys = real_[half] ? row_range(args_, sequence_, b, query_[half]) : KeyRange{0, 0};
      low_[half] = static_cast<int>(keys.begin), high_[half] = static_cast<int>(keys.end);
    }
    return true;
  }

  // The keys that some row sees, the first cut to a multiple of 8.
  __device__ int begin() const { return begin_; }
  __device__ int end() const { return end_; }
  __device__ int real_rows() const { return real_rows_; }
  __device__ bool is_real(int half) const { return real_[half]; }
  __device__ int lane() const { return lane_; }
  __device__ int head(int half) const { return head_[half]; }
  __device__ int query(int half) const { return query_[half]; }
  __device__ KeyRange range(int half) const { return {low_[half], high_[half]}; }
  __device__ const Sequence& sequence() const { return sequence_; }

  // Scores of keys [first, first + Keys), -inf where forbidden.
  __device__ void find_scores(int first, float* own_scratch, Scores& scores) const {
    multiply_keys(first, scores);
    if constexpr (Modified) {
      modify(first, own_scratch, scores);
    } else {
      scale(first, scores);
    }
  }

  __device__ static float highest_of(const Scores& scores, int half) {
    float highest = -infinity<float>();
#pragma unroll
    for (int t = 0; t < tiles; ++t) {  // a NaN makes its row NaN in the sum
      highest = fmaxf(highest, fmaxf(scores[t][2 * half], scores[t][2 * half + 1]));
    }
    highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 1));
    return fmaxf(highest, __shfl_xor_sync(~0u, highest, 2));
  }

  // Weights of one half's rows relative to their highest score; returns their sum. A forbidden pair weighs -0.
  __device__ static float weigh(Scores& scores, int half, float highest) {
    const float base = reference(highest);
    float sum = 0;
#pragma unroll
    for (int t = 0; t < tiles; ++t) {
#pragma unroll
      for (int x = 2 * half; x < 2 * half + 2; ++x) {
        const bool forbidden = scores[t][x] == -infinity<float>();
        const float weight = exponential(scores[t][x] - base);
        sum += weight;
        scores[t][x] = forbidden ? -0.0f : weight;
      }
    }
    return quad_sum(sum);
  }

  __device__ void pack(int first, Scores& scores, Weights& weights) const {
    if constexpr (Modified) {
      if (args_.dropout.active) {
        drop(first, scores);
      }
    }
    constexpr float scale = weight_scale;
#pragma unroll
    for (int s = 0; s < steps; ++s) {
      const float(&low)[4] = scores[2 * s];
      const float(&high)[4] = scores[2 * s + 1];
      weights[s][0] = ptx::packed_pair<T>(low[0] * scale, low[1] * scale);
      weights[s][1] = ptx::packed_pair<T>(low[2] * scale, low[3] * scale);
      weights[s][2] = ptx::packed_pair<T>(high[0] * scale, high[1] * scale);
      weights[s][3] = ptx::packed_pair<T>(high[2] * scale, high[3] * scale);
    }
  }

  // O = P V over keys [first, first + Keys), value features [feature, feature + 64 Groups).
  template <int Groups>
  __device__ void multiply_values(int first, int feature, const Weights& weights, Sums (&sums)[Groups]) const {
    constexpr int together = steps < 4 / Groups ? steps : 4 / Groups;  // steps whose loads are under way at once
    const DirectRows rows = value_rows(first);
    bool has[Groups];
#pragma unroll
    for (int n = 0; n < Groups; ++n) {
      has[n] = feature + n * direct_features + lane_ / 4 * 8 < args_.value_dim;
#pragma unroll
      for (int t = 0; t < 8; ++t) {
        sums[n][t][0] = sums[n][t][1] = sums[n][t][2] = sums[n][t][3] = 0;
      }
    }
#pragma unroll
    for (int s = 0; s < steps; s += together) {
      if (first + 16 * s >= end_) {
        break;
      }
      uint4 v[together][Groups][4];
#pragma unroll
      for (int x = 0; x < together; ++x) {
#pragma unroll
        for (int n = 0; n < Groups; ++n) {
          load_values(rows, 16 * (s + x), (feature + n * direct_features) * 2, has[n], v[x][n]);
        }
      }
#pragma unroll
      for (int x = 0; x < together; ++x) {
#pragma unroll
        for (int n = 0; n < Groups; ++n) {
          add_values(weights[s + x], v[x][n], sums[n]);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < Groups; ++n) {
      if (__any_sync(~0u, holds_nan(sums[n]))) {
        do_values_again(first, feature + n * direct_features, weights, sums[n]);
      }
    }
  }

  // Eight neighbouring features of a row, from `feature` + 16 (lane % 4) + 8 `part` on.
  __device__ static void sums_of(const Sums& sums, int half, int part, float (&eight)[8]) {
#pragma unroll
    for (int t = 0; t < 8; ++t) {
      eight[t] = sums[t][2 * half + part];
    }
  }

  // What ends a row, and its place in the output.
  __device__ T* out_row(int h, int i) const {
    return head_of<T>(args_.out, b_, h) + (sequence_.query_begin + i) * args_.out.row;
  }
  __device__ void store_lse(int h, int i, float lse) const {
    if (args_.lse.data != nullptr) {
      head_of<float>(args_.lse, b_, h)[(sequence_.query_begin + i) * args_.lse.row] = lse;
    }
  }

 private:
  __device__ DirectRows value_rows(int first) const {
    return {reinterpret_cast<const char*>(values_ + first * args_.value.row), static_cast<int>(args_.value.row) * 2,
            end_ - first};
  }

  __device__ void multiply_keys(int first, Scores& scores) const {
    // Features of a step and key tiles of 8 rows whose loads are under way at once: 32 or 64 registers.
    constexpr int chunks = Keys <= 16 ? 4 : 2, together = tiles;
    const int quad = lane_ % 4, row = lane_ / 4;
#pragma unroll
    for (int t = 0; t < tiles; ++t) {
      scores[t][0] = scores[t][1] = scores[t][2] = scores[t][3] = 0;
    }
    const DirectRows keys{reinterpret_cast<const char*>(keys_ + first * args_.key.row),
                          static_cast<int>(args_.key.row) * 2, end_ - first};
    const T* queries[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      queries[half] =
          head_of<T>(args_.query, b_, head_[half]) + (sequence_.query_begin + query_[half]) * args_.query.row;
    }
    const int width = static_cast<int>(args_.head_dim);
#pragma unroll 1
    for (int d = 8 * quad; d - 8 * quad < width; d += 32 * chunks) {
      uint4 q[2][chunks];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int c = 0; c < chunks; ++c) {
          q[half][c] = {};
          if (real_[half] && d + 32 * c < width) {
            q[half][c] = __ldg(reinterpret_cast<const uint4*>(queries[half] + d + 32 * c));
          }
        }
      }
#pragma unroll
      for (int t0 = 0; t0 < tiles; t0 += together) {
        if (first + 8 * t0 >= end_) {
          break;
        }
        uint4 k[together][chunks];
#pragma unroll
        for (int t = 0; t < together; ++t) {
#pragma unroll
          for (int c = 0; c < chunks; ++c) {
            k[t][c] = keys.chunk((t0 + t) * 8 + row, (d + 32 * c) * 2, d + 32 * c < width);
          }
        }
#pragma unroll
        for (int c = 0; c < chunks; ++c) {
          const std::uint32_t a[4] = {q[0][c].x, q[1][c].x, q[0][c].y, q[1][c].y};
          const std::uint32_t b[4] = {q[0][c].z, q[1][c].z, q[0][c].w, q[1][c].w};
#pragma unroll
          for (int t = 0; t < together; ++t) {
            ptx::multiply_add<T>(scores[t0 + t], a, k[t][c].x, k[t][c].y);
          }
#pragma unroll
          for (int t = 0; t < together; ++t) {
            ptx::multiply_add<T>(scores[t0 + t], b, k[t][c].z, k[t][c].w);
          }
        }
      }
    }
  }

  __device__ void scale(int first, Scores& scores) const {
    const float factor = bounded<float>(args_.scale);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int own = first + 2 * (lane_ % 4), low = low_[half] - own, high = high_[half] - own;
#pragma unroll
      for (int slot = 0; slot < 2 * tiles; ++slot) {
        const int column = slot / 2 * 8 + slot % 2;
        float& score = scores[slot / 2][2 * half + slot % 2];
        score = column >= low && column < high ? score * factor : -infinity<float>();
      }
    }
  }

  // The scores of rows `half` at 16 keys from `column` on, which a lane has 4 of.
  __device__ void modify_four(const Modifiers<float>& modifiers, int first, int column, int half,
                              float (&four)[4]) const {
    const int own = first + column + 2 * (lane_ % 4), i = query_[half], low = low_[half], high = high_[half];
    modifiers.apply(four, [&](int x) {
      const int j = own + x / 2 * 8 + x % 2;
      return Pair{i, j, j >= low && j < high};
    });
  }

  __device__ void modify(int first, float* own_scratch, Scores& scores) const {
    const Modifiers<float> modifiers[2] = {Modifiers<float>(args_, sequence_, b_, head_[0]),
                                           Modifiers<float>(args_, sequence_, b_, head_[1])};
    if constexpr (scratch == 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float four[4] = {scores[0][2 * half], scores[0][2 * half + 1], scores[1][2 * half], scores[1][2 * half + 1]};
        modify_four(modifiers[half], first, 0, half, four);
        scores[0][2 * half] = four[0], scores[0][2 * half + 1] = four[1];
        scores[1][2 * half] = four[2], scores[1][2 * half + 1] = four[3];
      }
      return;
    }
    const int threads = static_cast<int>(blockDim.x);
#pragma unroll
    for (int slot = 0; slot < 4 * tiles; ++slot) {
      own_scratch[slot * threads] = scores[slot / 4][slot % 4];
    }
#pragma unroll 1
    for (int column = 0; column < Keys; column += 16) {
      float* from = own_scratch + column / 2 * threads;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float* at = from + 2 * half * threads;
        float four[4] = {at[0], at[threads], at[4 * threads], at[5 * threads]};
        modify_four(modifiers[half], first, column, half, four);
        at[0] = four[0], at[threads] = four[1], at[4 * threads] = four[2], at[5 * threads] = four[3];
      }
    }
#pragma unroll
    for (int slot = 0; slot < 4 * tiles; ++slot) {
      scores[slot / 4][slot % 4] = own_scratch[slot * threads];
    }
  }

  // A dropped pair weighs 0, a forbidden one -0 all the same.
  __device__ void drop(int first, Scores& scores) const {
    // Of the two rows that it shares with its neighbour a lane draws for one, whose place in the tile kept_slots adds.
    const bool odd = (lane_ & 1) != 0;
    MmaThread thread;
    thread.warp = 0;
    const int h = odd ? head_[1] : head_[0], i = (odd ? query_[1] : query_[0]) - thread.row_of(odd ? 2 : 0);
    constexpr int together = tiles < 8 ? tiles : 8;
#pragma unroll
    for (int t0 = 0; t0 < tiles; t0 += together) {
      const std::uint32_t kept = kept_slots<together>(thread, args_.dropout, b_, h, i, first + t0 * 8);
#pragma unroll
      for (int slot = 0; slot < 4 * together; ++slot) {
        float& weight = scores[t0 + slot / 4][slot % 4];
        weight = (kept >> slot & 1) != 0 ? weight : weight * 0.0f;
      }
    }
  }

  // Rows {2 q, 2 q + 1, 2 q + 8, 2 q + 9} of the 16 from `row` on, 8 features.
  __device__ void load_values(const DirectRows& rows, int row, int byte, bool has, uint4 (&v)[4]) const {
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      v[x] = rows.chunk(row + 2 * (lane_ % 4) + x / 2 * 8 + x % 2, byte + lane_ / 4 * 16, has);
    }
  }

  __device__ static void add_values(const std::uint32_t (&weights)[4], const uint4 (&v)[4], Sums& sums) {
#pragma unroll
    for (int t = 0; t < 8; ++t) {
      const bool high = t % 2 != 0;
      ptx::multiply_add<T>(sums[t], weights, key_pair(word_of(v[0], t / 2), word_of(v[1], t / 2), high),
                           key_pair(word_of(v[2], t / 2), word_of(v[3], t / 2), high));
    }
  }

  // 0 * NaN is NaN where a pair is forbidden. The same products without what is not finite, which is added afterwards
  // to exactly the rows that may see it; other rows get the bits that they would have had without it.
  __device__ void do_values_again(int first, int feature, const Weights& weights, Sums& sums) const {
    std::uint32_t copy[steps * 4];  // in local memory, like the result
#pragma unroll
    for (int x = 0; x < steps * 4; ++x) {
      copy[x] = weights[x / 4][x % 4];
    }
    float result[32];
    careful_values(value_rows(first), copy, feature * 2, static_cast<int>(args_.value_dim) * 2,
                   Modified && args_.dropout.active, result);
#pragma unroll
    for (int x = 0; x < 32; ++x) {
      sums[x / 4][x % 4] = result[x];
    }
  }

  __device__ static std::uint32_t finite_pair(std::uint32_t pair) {
    constexpr std::uint32_t exponent = std::is_same_v<T, bfloat16> ? 0x7F80u : 0x7C00u;
    const bool low = (pair & exponent) != exponent, high = (pair >> 16 & exponent) != exponent;
    return (low ? pair & 0xFFFFu : 0u) | (high ? pair & 0xFFFF0000u : 0u);
  }

  __device__ static __noinline__ void careful_values(const DirectRows rows, const std::uint32_t* weights, int byte,
                                                     int end_byte, bool drops, float* result) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    Sums sums = {};
#pragma unroll 1
    for (int s = 0; s < steps; ++s) {
      const std::uint32_t a[4] = {weights[4 * s], weights[4 * s + 1], weights[4 * s + 2], weights[4 * s + 3]};
      uint4 v[4];
      bool found = false;
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const int at = byte + lane / 4 * 16;
        const uint4 all = rows.chunk(16 * s + 2 * (lane % 4) + x / 2 * 8 + x % 2, at, at < end_byte);
        v[x] = {finite_pair(all.x), finite_pair(all.y), finite_pair(all.z), finite_pair(all.w)};
        found |= v[x].x != all.x || v[x].y != all.y || v[x].z != all.z || v[x].w != all.w;
      }
      add_values(a, v, sums);
      if (__any_sync(~0u, found)) {
        add_not_finite(rows, 16 * s, a, byte, end_byte, drops, sums);
      }
    }
#pragma unroll
    for (int x = 0; x < 32; ++x) {
      result[x] = sums[x / 4][x % 4];
    }
  }

  // A weight that T rounds to 0 makes no NaN of an infinity; one that was dropped does.
  __device__ static float weight_of(std::uint32_t bits, bool drops) {
    T half;
    half.bits = static_cast<std::uint16_t>(bits);
    const float weight = ptx::to_float(half);
    return weight == 0 && !drops ? FLT_MIN : weight;
  }

  __device__ static void add_not_finite(const DirectRows& rows, int row, const std::uint32_t (&a)[4], int byte,
                                        int end_byte, bool drops, Sums& sums) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 1
    for (int k = 0; k < 16; ++k) {
      const int holder = (lane & ~3) | (k % 8 / 2), shift = k % 2 * 16;
      const std::uint32_t low = __shfl_sync(~0u, k < 8 ? a[0] : a[2], holder) >> shift & 0xFFFFu;
      const std::uint32_t high = __shfl_sync(~0u, k < 8 ? a[1] : a[3], holder) >> shift & 0xFFFFu;
      constexpr std::uint32_t forbidden = 0x8000u;
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        const int at = byte + lane % 4 * 32 + part * 16;
        const uint4 v = rows.chunk(row + k, at, at < end_byte);
#pragma unroll
        for (int t = 0; t < 8; ++t) {
          T value;
          value.bits = static_cast<std::uint16_t>(word_of(v, t / 2) >> (t % 2 * 16));
          if (!is_finite(value)) {
            sums[t][part] += low == forbidden ? 0.0f : weight_of(low, drops) * ptx::to_float(value);
            sums[t][2 + part] += high == forbidden ? 0.0f : weight_of(high, drops) * ptx::to_float(value);
          }
        }
      }
    }
  }

  const ForwardArguments& args_;
  const int lane_;
  int b_ = 0, begin_ = 0, end_ = 0, real_rows_ = 0;
  const T *keys_ = nullptr, *values_ = nullptr;  // key 0 of the sequence
  bool real_[2];
  int query_[2], head_[2], low_[2], high_[2];
  Sequence sequence_;
};

}  // namespace headway::cuda
