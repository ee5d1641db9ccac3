// Few queries over many keys on Hopper, bf16 and f16, in one launch and without workspace.
//
// The query rows of all heads that share a kv head form tiles of 16 (direct_tile.cuh). The keys of a tile are split
// over the blocks of a cluster, 1 to 8, and a block's part over its warps, 64 keys each in a round. The warps of a
// round agree on the rows' highest scores, then make the output 64 features at a time: each leaves its sums in shared
// memory, and they are added up in the order of the warps, to the sums of the rounds before. At last the blocks of the
// cluster read each other's sums and statistics, in the order of the blocks.
//
// Memory bounds it: a warp has 8 KB of K or V on their way, a multiprocessor 128 KB.
#pragma once

#include "engines/cuda/kernels/direct_arguments.h"
#include "engines/cuda/kernels/direct_tile.cuh"
#include "engines/cuda/ptx/cluster.cuh"
#include "engines/cuda/ptx/shared_address.cuh"

namespace headway::cuda {

constexpr int direct_chunk = 64;       // keys of a warp in a round
constexpr int direct_most_warps = 16;  // of a block
constexpr int direct_most_blocks = 8;  // of a cluster
constexpr int direct_part_stride = direct_features + 4;

// Dynamic shared memory, in floats. The first pieces are where they are in every block of a cluster.
struct DirectShared {
  int warps, rows, width;  // rows of a tile that calls have, value features

  HEADWAY_HOST_DEVICE constexpr int sums() const { return 0; }                         // [rows][width]
  HEADWAY_HOST_DEVICE constexpr int statistics() const { return rows * width; }        // [2][16]
  HEADWAY_HOST_DEVICE constexpr int highest() const { return statistics() + 32; }      // [warps][16]
  HEADWAY_HOST_DEVICE constexpr int totals() const { return highest() + 16 * warps; }  // [warps][16]
  HEADWAY_HOST_DEVICE constexpr int factors() const { return totals() + 16 * warps; }  // [16]
  HEADWAY_HOST_DEVICE constexpr int shares() const { return factors() + 16; }          // [8][16]
  HEADWAY_HOST_DEVICE constexpr int parts() const { return shares() + 16 * direct_most_blocks; }
  // parts [warps][rows][68]
  HEADWAY_HOST_DEVICE constexpr int scratch() const { return parts() + warps * rows * direct_part_stride; }
  HEADWAY_HOST_DEVICE constexpr int floats(int scratch_of_thread) const {
    return scratch() + 32 * warps * scratch_of_thread;
  }
};

template <class T, bool Modified>
class DirectDecode {
 public:
  using Tile = DirectTile<T, direct_chunk, Modified>;

  __device__ DirectDecode(const DirectArguments& args, float* shared)
      : args_(args),
        tile_(args),
        warp_(static_cast<int>(threadIdx.x) / 32),
        warps_(static_cast<int>(blockDim.x) / 32),
        rank_(blockIdx.x % args.cluster),
        layout_{warps_, static_cast<int>(args.rows), static_cast<int>(args.value_dim)},
        shared_(shared) {}

  __device__ void run(int b, int g, int row_tile) {
    b_ = b, g_ = g, first_row_ = row_tile * direct_rows;
    if (!tile_.start(b, g, row_tile)) {  // in no block of the cluster
      return;
    }
    const int chunks = (tile_.end() - tile_.begin() + direct_chunk - 1) / direct_chunk;
    const int size = static_cast<int>(args_.cluster), each = (chunks + size - 1) / size;
    const int begin = static_cast<int>(rank_) * each, end = min(begin + each, chunks);
#pragma unroll 1
    for (int chunk = begin; chunk < end; chunk += warps_) {
      const int own = chunk + warp_;
      do_round(own < end ? tile_.begin() + own * direct_chunk : tile_.end(), chunk == begin);
    }
    share_statistics();
    merge();
  }

 private:
  __device__ int row_of(int half) const { return tile_.lane() / 4 + 8 * half; }

  // A chunk of each warp, from `key` on; some may begin at the last key's end, and find nothing.
  __device__ void do_round(int key, bool is_first) {
    const bool leads = tile_.lane() % 4 == 0;
    float *highest = shared_ + layout_.highest(), *totals = shared_ + layout_.totals();
    typename Tile::Scores scores;
    tile_.find_scores(key, shared_ + layout_.scratch() + threadIdx.x, scores);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float own = Tile::highest_of(scores, half);
      if (leads) {
        highest[warp_ * 16 + row_of(half)] = own;
      }
    }
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float all = rows_[half].highest;
#pragma unroll 1
      for (int warp = 0; warp < warps_; ++warp) {
        all = fmaxf(all, highest[warp * 16 + row_of(half)]);
      }
      const float factor = rows_[half].raise(all);
      const float total = Tile::weigh(scores, half, all);
      if (leads) {
        totals[warp_ * 16 + row_of(half)] = total;
      }
      if (warp_ == 0 && leads) {
        shared_[layout_.factors() + row_of(half)] = factor;
      }
    }
    typename Tile::Weights weights;
    tile_.pack(key, scores, weights);
#pragma unroll 1
    for (int d = 0; d < layout_.width; d += direct_features) {
      typename Tile::Sums sums[1];
      tile_.template multiply_values<1>(key, d, weights, sums);
      leave(sums[0]);
      __syncthreads();
      if (d == 0) {
        add_totals(totals);
      }
      add_parts(d, is_first);
      __syncthreads();  // the parts have been read
    }
  }

  // A warp's sums [rows][64].
  __device__ void leave(const typename Tile::Sums& sums) {
    float* own = shared_ + layout_.parts() + warp_ * layout_.rows * direct_part_stride;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (tile_.is_real(half)) {
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          float eight[8];
          Tile::sums_of(sums, half, part, eight);
          auto* to =
              reinterpret_cast<float4*>(own + row_of(half) * direct_part_stride + 16 * (tile_.lane() % 4) + 8 * part);
          to[0] = {eight[0], eight[1], eight[2], eight[3]};
          to[1] = {eight[4], eight[5], eight[6], eight[7]};
        }
      }
    }
  }

  __device__ void add_totals(const float* totals) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float sum = 0;
#pragma unroll 1
      for (int warp = 0; warp < warps_; ++warp) {
        sum += totals[warp * 16 + row_of(half)];
      }
      rows_[half].total += sum;
    }
  }

  __device__ void add_parts(int d, bool is_first) {
    const float *parts = shared_ + layout_.parts(), *factors = shared_ + layout_.factors();
    const int part = layout_.rows * direct_part_stride;
    for (int task = static_cast<int>(threadIdx.x); task < tile_.real_rows() * direct_features;
         task += static_cast<int>(blockDim.x)) {
      const int r = task / direct_features, c = task % direct_features;
      if (d + c < layout_.width) {
        const float* from = parts + r * direct_part_stride + c;
        float sum = 0;
#pragma unroll 4
        for (int warp = 0; warp < warps_; ++warp) {
          sum += from[warp * part];
        }
        float& all = shared_[layout_.sums() + r * layout_.width + d + c];
        all = is_first ? sum : all * factors[r] + sum;
      }
    }
  }

  __device__ void share_statistics() {
    if (warp_ == 0 && tile_.lane() % 4 == 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        shared_[layout_.statistics() + row_of(half)] = rows_[half].highest;
        shared_[layout_.statistics() + 16 + row_of(half)] = rows_[half].total;
      }
    }
    synchronize();
  }

  __device__ void synchronize() const {
    if (args_.cluster > 1) {
      ptx::cluster_sync();
    } else {
      __syncthreads();
    }
  }

  // What the blocks found: each block stores a part of the rows.
  __device__ void merge() {
    const int size = static_cast<int>(args_.cluster);
    const std::uint32_t base = ptx::shared_address(shared_);
    float *shares = shared_ + layout_.shares(), *factors = shared_ + layout_.factors();
    if (static_cast<int>(threadIdx.x) < tile_.real_rows()) {
      factors[threadIdx.x] = close(static_cast<int>(threadIdx.x), base, shares);
    }
    __syncthreads();
    const int chunks = layout_.width / 8;
    for (int task = static_cast<int>(rank_ * blockDim.x + threadIdx.x); task < tile_.real_rows() * chunks;
         task += size * static_cast<int>(blockDim.x)) {
      const int r = task / chunks, d = task % chunks * 8;
      float eight[8] = {};
#pragma unroll 1
      for (int block = 0; block < size; ++block) {
        const float share = shares[block * 16 + r];
        if (share >= 0 || share != share) {
          const std::uint32_t at =
              ptx::address_in_block(base + 4 * static_cast<std::uint32_t>(layout_.sums() + r * layout_.width + d),
                                    static_cast<unsigned>(block));
          const float4 low = ptx::load_four_from_block(at), high = ptx::load_four_from_block(at + 16);
          eight[0] += low.x * share, eight[1] += low.y * share, eight[2] += low.z * share, eight[3] += low.w * share;
          eight[4] += high.x * share, eight[5] += high.y * share, eight[6] += high.z * share,
              eight[7] += high.w * share;
        }
      }
#pragma unroll
      for (float& number : eight) {
        number *= factors[r];
      }
      const int row = first_row_ + r, group = static_cast<int>(args_.group);
      store_eight(args_, tile_.out_row(g_ * group + row % group, row / group), d, eight);
    }
    synchronize();  // the row is stored, and nobody reads this block's memory any more
    if (rank_ == 0) {
      do_again();
    }
  }

  // The shares of the blocks in row r, -1 for one without keys; its lse. Returns what its sums are multiplied by.
  __device__ float close(int r, std::uint32_t base, float* shares) {
    const int size = static_cast<int>(args_.cluster), row = first_row_ + r, group = static_cast<int>(args_.group);
    const auto statistic = [&](int block, int which) {
      return ptx::load_from_block(ptx::address_in_block(
          base + 4 * static_cast<std::uint32_t>(layout_.statistics() + 16 * which + r), static_cast<unsigned>(block)));
    };
    RowSoftmax<float> all;
#pragma unroll 1
    for (int block = 0; block < size; ++block) {
      all.highest = fmaxf(all.highest, statistic(block, 0));
    }
#pragma unroll 1
    for (int block = 0; block < size; ++block) {
      const float total = statistic(block, 1);
      const float share = exponential(statistic(block, 0) - reference(all.highest));
      shares[block * 16 + r] = total == 0 ? -1.0f : share;
      all.total += total == 0 ? 0.0f : total * share;
    }
    const int h = g_ * group + row % group, i = row / group;
    const RowEnd<float> end = close_row(all, sink_of<float>(args_, h), i >= tile_.sequence().real_queries);
    if (rank_ == 0) {
      tile_.store_lse(h, i, end.lse);
      again()[r] = needs_plain_row(args_, all, row_range(args_, tile_.sequence(), b_, i));
    }
    return end.factor * (static_cast<float>(args_.dropout.kept_scale) / Tile::weight_scale);
  }

  // Rows whose sums say too little.
  __device__ static bool* again() {
    __shared__ bool again[direct_rows];
    return again;
  }

  __device__ void do_again() {
    const int group = static_cast<int>(args_.group);
#pragma unroll 1
    for (int r = warp_; r < tile_.real_rows(); r += warps_) {
      if (again()[r]) {
        const int row = first_row_ + r;
        attend_plainly<T>(args_, b_, g_ * group + row % group, row / group, 0, args_.value_dim);
      }
    }
  }

  const DirectArguments& args_;
  Tile tile_;
  const int warp_, warps_;
  const unsigned rank_;
  const DirectShared layout_;
  float* shared_;
  int b_ = 0, g_ = 0, first_row_ = 0;
  RowSoftmax<float> rows_[2];  // of all warps so far, the same in each
};

// A cluster for each tile of rows.
template <class T, bool Modified>
__global__ void __launch_bounds__(32 * direct_most_warps, 1)
    direct_decode(const __grid_constant__ DirectArguments args) {
  extern __shared__ __align__(16) float direct_shared[];
  const unsigned task = blockIdx.x / args.cluster, head = task / args.row_tiles;
  const unsigned kv_heads = static_cast<unsigned>(args.kv_heads), b = head / kv_heads;
  DirectDecode<T, Modified>(args, direct_shared)
      .run(static_cast<int>(b), static_cast<int>(head - b * kv_heads), static_cast<int>(task - head * args.row_tiles));
}

}  // namespace headway::cuda
