// Few queries over many keys on Hopper in exact f32 arithmetic, in one launch and without workspace.
//
// The keys of a tile of rows are split over the blocks of a cluster and their warps, 32 keys to a warp in a round, and
// Rows is 1, 4 or 16 rows of the heads that share a kv head. Where 16 bytes of a row do not lie together and aligned
// (Whole is false), they are read one number at a time, with the same bits. For scores, 4 lanes share a
// key: each multiplies every fourth 16 bytes of it with all rows' queries, which lie in shared memory, in 4 short
// chains. Then a lane has one key, for modifiers and exponentials; and for P V it has 4 features of all keys. A warp's
// sums are over 32 keys, so they do not drift; those of rounds are compensated.
//
// Memory bounds it up to about 16 rows: 2 multiply-adds for each row and 8 bytes.
#pragma once

#include "engines/cuda/kernels/team_rows.cuh"
#include "engines/cuda/key_range.cuh"
#include "engines/cuda/modifiers.cuh"

namespace headway::cuda {

constexpr int exact_chunk = 32;  // keys of a warp in a round

// Rows of keys or values, from the first of a round on.
template <bool Whole>
struct ExactRows {
  const float* data;
  std::int64_t row, feature;  // steps
  int count;                  // rows that may be read

  // Four features of row r; 0 where there is none.
  __device__ __forceinline__ float4 four(int r, int d, bool inside) const {
    if (!inside || r >= count) {
      return {};
    }
    const float* at = data + r * row;
    if constexpr (Whole) {
      return __ldg(reinterpret_cast<const float4*>(at + d));
    } else {
      return {at[d * feature], at[(d + 1) * feature], at[(d + 2) * feature], at[(d + 3) * feature]};
    }
  }
};

template <int Rows, bool Whole>
class ExactDecode : TeamRows {
 public:
  // Queries [Rows][head_dim] and weights [warps][Rows][32] lie behind the rest.
  __host__ __device__ static constexpr int floats(const TeamShared& layout, int head_dim) {
    return layout.end() + Rows * head_dim + layout.warps * Rows * exact_chunk;
  }

  __device__ ExactDecode(const DirectArguments& args, float* shared)
      : TeamRows(args, shared),
        width_(static_cast<int>(args.head_dim)),
        queries_(shared + layout_.end()),
        weights_(queries_ + Rows * width_ + warp_ * Rows * exact_chunk) {}

  __device__ void run(int b, int g, int row_tile) {
    b_ = b, g_ = g, first_row_ = row_tile * Rows;
    sequence_ = sequence_of(args_, b);
    const std::int64_t all = args_.group * sequence_.query_count;
    if (first_row_ >= all) {  // in no block of the cluster
      return;
    }
    real_rows_ = static_cast<int>(smaller(all - first_row_, Rows));
    const int first = query_of_row(0);
    const TileRange range = tile_range(args_, sequence_, b, first, query_of_row(real_rows_ - 1) + 1 - first);
    end_ = static_cast<int>(range.end);
    keys_ = head_of<float>(args_.key, b, g) + sequence_.key_begin * args_.key.row;
    values_ = head_of<float>(args_.value, b, g) + sequence_.key_begin * args_.value.row;
    const int begin = static_cast<int>(range.begin);
    if (lane_ < real_rows_) {
      const KeyRange own = row_range(args_, sequence_, b, query_of_row(lane_));
      low_ = static_cast<int>(own.begin), high_ = static_cast<int>(own.end);
    }
    fill_queries();
    const Chunks chunks = own_chunks((end_ - begin + exact_chunk - 1) / exact_chunk);
#pragma unroll 1
    for (int chunk = chunks.begin; chunk < chunks.end; chunk += warps_) {
      const int own = chunk + warp_;
      do_round(own < chunks.end ? begin + own * exact_chunk : end_, chunk == chunks.begin);
    }
    if (warp_ == 0 && lane_ < Rows) {
      share(lane_, row_);
    }
    merge();
  }

 private:
  __device__ void fill_queries() {
    for (int task = static_cast<int>(threadIdx.x); task < Rows * width_; task += static_cast<int>(blockDim.x)) {
      const int r = task / width_, d = task % width_;
      queries_[task] =
          r < real_rows_
              ? head_of<float>(
                    args_.query, b_,
                    head_of_row(
                        r))[(sequence_.query_begin + query_of_row(r)) * args_.query.row + d * args_.query.feature]
              : 0.0f;
    }
    __syncthreads();
  }

  // A chunk of each warp, from `key` on; some may begin at the last key's end, and find nothing.
  __device__ void do_round(int key, bool is_first) {
    multiply_keys(key);
    __syncwarp();
    float scores[Rows];  // of key `key + lane`
    float own_highest = -infinity<float>();
    const bool plain = only_scales();
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
      scores[r] = modified(r, key + lane_, weights_[r * exact_chunk + lane_], plain);
      const float highest = over_lanes(scores[r], [](float x, float y) { return fmaxf(x, y); });
      own_highest = lane_ == r ? highest : own_highest;
    }
    if (lane_ < Rows) {
      shared_[layout_.highest() + warp_ * team_most_rows + lane_] = own_highest;
    }
    __syncthreads();
    if (lane_ < Rows) {  // lane r has row r's statistics, in every warp the same
      const float factor = row_.raise(highest_of(lane_, row_.highest));
      lost_total_ *= factor;
      if (warp_ == 0) {
        shared_[layout_.factors() + lane_] = factor;
      }
    }
    weigh(scores);
    __syncwarp();
#pragma unroll 1
    for (int d = 0; d < layout_.width; d += team_features) {
      leave(key, d);
      __syncthreads();
      if (d == 0 && lane_ < Rows) {
        CompensatedSum<float> total{row_.total, lost_total_};
        total.add(total_of(lane_));
        row_.total = total.value, lost_total_ = total.lost;
      }
      add_parts(d, is_first);
      __syncthreads();  // the parts have been read
    }
  }

  template <class Combine>
  __device__ static float over_lanes(float value, const Combine& combine) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) {
      value = combine(value, __shfl_xor_sync(~0u, value, lanes));
    }
    return value;
  }

  // S = Q K^T  [Rows, 32], into the weights' place. Lane n has key n / 4 of 8 and chunks n % 4, n % 4 + 4, ... of it.
  __device__ void multiply_keys(int key) {
    constexpr int together = Rows == 1 ? 4 : Rows == 4 ? 2 : 1;  // tiles of 8 keys
    const ExactRows<Whole> rows{keys_ + key * args_.key.row, args_.key.row, args_.key.feature, end_ - key};
    const int quad = lane_ % 4, own = lane_ / 4;
#pragma unroll 1
    for (int t0 = 0; t0 < exact_chunk / 8; t0 += together) {
      float4 sums[together][Rows] = {};
#pragma unroll 4
      for (int d = 4 * quad; d < width_; d += 16) {
        float4 k[together];
#pragma unroll
        for (int t = 0; t < together; ++t) {
          k[t] = rows.four((t0 + t) * 8 + own, d, true);
        }
#pragma unroll
        for (int r = 0; r < Rows; ++r) {
          const float4 q = *reinterpret_cast<const float4*>(queries_ + r * width_ + d);
#pragma unroll
          for (int t = 0; t < together; ++t) {
            sums[t][r] = {fmaf(q.x, k[t].x, sums[t][r].x), fmaf(q.y, k[t].y, sums[t][r].y),
                          fmaf(q.z, k[t].z, sums[t][r].z), fmaf(q.w, k[t].w, sums[t][r].w)};
          }
        }
      }
#pragma unroll
      for (int t = 0; t < together; ++t) {
#pragma unroll
        for (int r = 0; r < Rows; ++r) {
          float sum = (sums[t][r].x + sums[t][r].y) + (sums[t][r].z + sums[t][r].w);
          sum += __shfl_xor_sync(~0u, sum, 1);
          sum += __shfl_xor_sync(~0u, sum, 2);
          if (quad == r % 4) {
            weights_[r * exact_chunk + (t0 + t) * 8 + own] = sum;
          }
        }
      }
    }
  }

  __device__ bool only_scales() const {
    return args_.softcap == 0 && args_.mask.data == nullptr && args_.bias.data == nullptr &&
           args_.slopes.data == nullptr;
  }

  // The score of key j in row r, -inf where forbidden.
  __device__ float modified(int r, int j, float product, bool plain) const {
    const int low = __shfl_sync(~0u, low_, r), high = __shfl_sync(~0u, high_, r);
    const bool inside = j >= low && j < high;
    if (plain) {
      return inside ? product * bounded<float>(args_.scale) : -infinity<float>();
    }
    float one[1] = {product};
    const int i = query_of_row(r);
    Modifiers<float>(args_, sequence_, b_, head_of_row(r)).apply(one, [&](int) { return Pair{i, j, inside}; });
    return one[0];
  }

  // Scores become weights, and their sum the warp's total. A forbidden pair weighs -0.
  __device__ void weigh(const float (&scores)[Rows]) {
    float own_total = 0;
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
      const float base = reference(__shfl_sync(~0u, row_.highest, r));
      const float weight = exponential(scores[r] - base);
      const float total = over_lanes(weight, [](float x, float y) { return x + y; });
      own_total = lane_ == r ? total : own_total;
      weights_[r * exact_chunk + lane_] = scores[r] == -infinity<float>() ? -0.0f : weight;
    }
    if (lane_ < Rows) {
      shared_[layout_.totals() + warp_ * team_most_rows + lane_] = own_total;
    }
  }

  // O = P V  [Rows, 128] over the warp's keys, features from d on.
  __device__ void leave(int key, int d) {
    float4 sums[Rows];
    multiply_values<false>(key, d, sums);
    bool nan = false;
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
      const float all = (sums[r].x + sums[r].y) + (sums[r].z + sums[r].w);
      nan |= all != all;
    }
    if (__any_sync(~0u, nan)) {  // perhaps of a forbidden pair
      multiply_values<true>(key, d, sums);
    }
    float* own = shared_ + layout_.parts() + warp_ * layout_.part() + 4 * lane_;
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
      if (r < real_rows_) {
        *reinterpret_cast<float4*>(own + r * layout_.part_stride()) = sums[r];
      }
    }
  }

  // `Skip`: forbidden pairs are left out one by one. Other sums get the same bits.
  template <bool Skip>
  __device__ void multiply_values(int key, int d, float4 (&sums)[Rows]) const {
    const ExactRows<Whole> rows{values_ + key * args_.value.row, args_.value.row, args_.value.feature, end_ - key};
    const bool has = d + 4 * lane_ < layout_.width;
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
      sums[r] = {};
    }
    constexpr int together = 8;
#pragma unroll 1
    for (int j = 0; j < exact_chunk; j += together) {
      float4 v[together];
#pragma unroll
      for (int x = 0; x < together; ++x) {
        v[x] = rows.four(j + x, d + 4 * lane_, has);
      }
#pragma unroll
      for (int r = 0; r < Rows; ++r) {
#pragma unroll
        for (int x = 0; x < together; ++x) {
          const float weight = weights_[r * exact_chunk + j + x];
          if (!Skip || __float_as_uint(weight) != 0x80000000u) {
            sums[r] = {fmaf(weight, v[x].x, sums[r].x), fmaf(weight, v[x].y, sums[r].y),
                       fmaf(weight, v[x].z, sums[r].z), fmaf(weight, v[x].w, sums[r].w)};
          }
        }
      }
    }
  }

  const int width_;
  float *queries_, *weights_;
  int end_ = 0;
  int low_ = 0, high_ = 0;                           // the keys of row `lane`
  const float *keys_ = nullptr, *values_ = nullptr;  // key 0 of the sequence
  RowSoftmax<float> row_;                            // of row `lane`
  float lost_total_ = 0;
};

// A cluster for each tile of rows.
template <int Rows, bool Whole>
__global__ void __launch_bounds__(32 * team_most_warps, 1) exact_decode(const __grid_constant__ DirectArguments args) {
  extern __shared__ __align__(16) float exact_shared[];
  const unsigned task = blockIdx.x / args.cluster, head = task / args.row_tiles;
  const unsigned kv_heads = static_cast<unsigned>(args.kv_heads), b = head / kv_heads;
  ExactDecode<Rows, Whole>(args, exact_shared)
      .run(static_cast<int>(b), static_cast<int>(head - b * kv_heads), static_cast<int>(task - head * args.row_tiles));
}

}  // namespace headway::cuda
