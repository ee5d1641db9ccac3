// A part of exact_decode.cuh: the sums of a tile's rows in shared memory, compensated, to which the warps of a block
// add theirs in order, and at last the blocks of the cluster, which read each other's.
#pragma once

#include "engines/cuda/kernels/compensated_sum.cuh"
#include "engines/cuda/kernels/direct_arguments.h"
#include "engines/cuda/kernels/plain_again.cuh"
#include "engines/cuda/kernels/softmax.cuh"
#include "engines/cuda/kernels/store_eight.cuh"
#include "engines/cuda/ptx/cluster.cuh"
#include "engines/cuda/ptx/shared_address.cuh"

namespace headway::cuda {

constexpr int team_most_warps = 16;  // of a block
constexpr int team_most_blocks = 8;  // of a cluster
constexpr int team_most_rows = 16;   // of a tile
constexpr int team_features = 128;   // of the output, made together: 4 a lane

// Dynamic shared memory, in floats; a tile has `rows` rows of `width` value features. The pieces that other blocks read
// are where they are in every block of a cluster.
struct TeamShared {
  int warps, rows, width;

  HEADWAY_HOST_DEVICE constexpr int sums() const { return 0; }                       // [rows][width]
  HEADWAY_HOST_DEVICE constexpr int lost() const { return rows * width; }            // what rounding took from them
  HEADWAY_HOST_DEVICE constexpr int statistics() const { return 2 * rows * width; }  // [2][16]
  HEADWAY_HOST_DEVICE constexpr int highest() const { return statistics() + 2 * team_most_rows; }  // [warps][16]
  HEADWAY_HOST_DEVICE constexpr int totals() const { return highest() + team_most_rows * warps; }  // [warps][16]
  HEADWAY_HOST_DEVICE constexpr int factors() const { return totals() + team_most_rows * warps; }  // [16]
  HEADWAY_HOST_DEVICE constexpr int shares() const { return factors() + team_most_rows; }          // [8][16]
  HEADWAY_HOST_DEVICE constexpr int parts() const { return shares() + team_most_rows * team_most_blocks; }
  HEADWAY_HOST_DEVICE constexpr int part_stride() const { return team_features + 4; }
  HEADWAY_HOST_DEVICE constexpr int part() const { return rows * part_stride(); }
  HEADWAY_HOST_DEVICE constexpr int end() const { return parts() + warps * part(); }  // parts [warps][rows][stride]
};

class TeamRows {
 protected:
  __device__ TeamRows(const DirectArguments& args, float* shared)
      : args_(args),
        warp_(static_cast<int>(threadIdx.x) / 32),
        lane_(static_cast<int>(threadIdx.x) % 32),
        warps_(static_cast<int>(blockDim.x) / 32),
        rank_(blockIdx.x % args.cluster),
        layout_{warps_, static_cast<int>(args.rows), static_cast<int>(args.value_dim)},
        shared_(shared) {}

  // Row r of the kv head is query r / group of head g * group + r % group.
  __device__ int head_of_row(int r) const {
    const int group = static_cast<int>(args_.group);
    return g_ * group + (first_row_ + r) % group;
  }
  __device__ int query_of_row(int r) const { return (first_row_ + r) / static_cast<int>(args_.group); }

  // This block's of so many chunks of keys.
  struct Chunks {
    int begin, end;
  };
  __device__ Chunks own_chunks(int chunks) const {
    const int size = static_cast<int>(args_.cluster), each = (chunks + size - 1) / size;
    const int begin = static_cast<int>(rank_) * each;
    return {begin, min(begin + each, chunks)};
  }

  // A row's highest score in all warps, which their leaders left.
  __device__ float highest_of(int row, float all) const {
    const float* highest = shared_ + layout_.highest();
#pragma unroll 1
    for (int warp = 0; warp < warps_; ++warp) {
      all = fmaxf(all, highest[warp * team_most_rows + row]);
    }
    return all;
  }
  __device__ float total_of(int row) const {
    const float* totals = shared_ + layout_.totals();
    float sum = 0;
#pragma unroll 1
    for (int warp = 0; warp < warps_; ++warp) {
      sum += totals[warp * team_most_rows + row];
    }
    return sum;
  }

  // The warps' sums of value features [d, d + 128) join those of the rounds before.
  __device__ void add_parts(int d, bool is_first) {
    const float *parts = shared_ + layout_.parts(), *factors = shared_ + layout_.factors();
    for (int task = static_cast<int>(threadIdx.x); task < real_rows_ * team_features;
         task += static_cast<int>(blockDim.x)) {
      const int r = task / team_features, c = task % team_features;
      if (d + c < layout_.width) {
        const float* from = parts + r * layout_.part_stride() + c;
        float sum = 0;
#pragma unroll 4
        for (int warp = 0; warp < warps_; ++warp) {
          sum += from[warp * layout_.part()];
        }
        const int at = r * layout_.width + d + c;
        CompensatedSum<float> all;
        if (!is_first) {
          all = {shared_[layout_.sums() + at], shared_[layout_.lost() + at]};
          all.multiply(factors[r]);
        }
        all.add(sum);
        shared_[layout_.lost() + at] = all.lost;
        shared_[layout_.sums() + at] = all.value;
      }
    }
  }

  __device__ void share(int row, const RowSoftmax<float>& statistics) {
    shared_[layout_.statistics() + row] = statistics.highest;
    shared_[layout_.statistics() + team_most_rows + row] = statistics.total;
  }

  // What the blocks found, once all have shared their rows' statistics: each block stores a part of the rows.
  __device__ void merge() {
    synchronize();
    const int size = static_cast<int>(args_.cluster);
    const std::uint32_t base = ptx::shared_address(shared_);
    float *shares = shared_ + layout_.shares(), *factors = shared_ + layout_.factors();
    if (static_cast<int>(threadIdx.x) < real_rows_) {
      factors[threadIdx.x] = close(static_cast<int>(threadIdx.x), base, shares);
    }
    __syncthreads();
    const int chunks = (layout_.width + 7) / 8;
    for (int task = static_cast<int>(rank_ * blockDim.x + threadIdx.x); task < real_rows_ * chunks;
         task += size * static_cast<int>(blockDim.x)) {
      const int r = task / chunks, d = task % chunks * 8;
      float eight[8] = {};
#pragma unroll 1
      for (int block = 0; block < size; ++block) {
        const float share = shares[block * team_most_rows + r];
        if (share >= 0 || share != share) {
          add_eight(base, block, r, d, share, eight);
        }
      }
#pragma unroll
      for (float& number : eight) {
        number *= factors[r];
      }
      float* row =
          head_of<float>(args_.out, b_, head_of_row(r)) + (sequence_.query_begin + query_of_row(r)) * args_.out.row;
      store_eight(args_, row, d, eight);
    }
    synchronize();  // the rows are stored, and nobody reads this block's memory any more
    if (rank_ == 0) {
      do_again();
    }
  }

  const DirectArguments& args_;
  const int warp_, lane_, warps_;
  const unsigned rank_;
  const TeamShared layout_;
  float* shared_;
  int b_ = 0, g_ = 0, first_row_ = 0, real_rows_ = 0;
  Sequence sequence_;

 private:
  __device__ void synchronize() const {
    if (args_.cluster > 1) {
      ptx::cluster_sync();
    } else {
      __syncthreads();
    }
  }

  // Widths are multiples of 4: the second half of the last eight may not be there.
  __device__ void add_eight(std::uint32_t base, int block, int r, int d, float share, float (&eight)[8]) const {
    const std::uint32_t at = ptx::address_in_block(
        base + 4 * static_cast<std::uint32_t>(layout_.sums() + r * layout_.width + d), static_cast<unsigned>(block));
    const float4 low = ptx::load_four_from_block(at);
    eight[0] += low.x * share, eight[1] += low.y * share, eight[2] += low.z * share, eight[3] += low.w * share;
    if (d + 4 < layout_.width) {
      const float4 high = ptx::load_four_from_block(at + 16);
      eight[4] += high.x * share, eight[5] += high.y * share, eight[6] += high.z * share, eight[7] += high.w * share;
    }
  }

  // The shares of the blocks in row r, -1 for one without keys; its lse. Returns what its sums are multiplied by.
  __device__ float close(int r, std::uint32_t base, float* shares) {
    const int size = static_cast<int>(args_.cluster);
    const auto statistic = [&](int block, int which) {
      return ptx::load_from_block(ptx::address_in_block(
          base + 4 * static_cast<std::uint32_t>(layout_.statistics() + team_most_rows * which + r),
          static_cast<unsigned>(block)));
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
      shares[block * team_most_rows + r] = total == 0 ? -1.0f : share;
      all.total += total == 0 ? 0.0f : total * share;
    }
    const int h = head_of_row(r), i = query_of_row(r);
    const RowEnd<float> end = close_row(all, sink_of<float>(args_, h), i >= sequence_.real_queries);
    if (rank_ == 0) {
      if (args_.lse.data != nullptr) {
        head_of<float>(args_.lse, b_, h)[(sequence_.query_begin + i) * args_.lse.row] = end.lse;
      }
      again()[r] = needs_plain_row(args_, all, row_range(args_, sequence_, b_, i));
    }
    return end.factor;
  }

  // Rows whose sums say too little.
  __device__ static bool* again() {
    __shared__ bool again[team_most_rows];
    return again;
  }

  __device__ void do_again() {
#pragma unroll 1
    for (int r = warp_; r < real_rows_; r += warps_) {
      if (again()[r]) {
        attend_plainly<float>(args_, b_, head_of_row(r), query_of_row(r), 0, args_.value_dim);
      }
    }
  }
};

}  // namespace headway::cuda
