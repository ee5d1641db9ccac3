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

#include "engines/cuda/kernels/direct_tile.cuh"
#include "engines/cuda/kernels/team_rows.cuh"

namespace headway::cuda {

constexpr int direct_chunk = 64;  // keys of a warp in a round

template <class T, bool Modified>
class DirectDecode : TeamRows<T, direct_features, false> {
  using Base = TeamRows<T, direct_features, false>;
  using Base::args_, Base::b_, Base::g_, Base::first_row_, Base::real_rows_, Base::sequence_, Base::layout_;
  using Base::lane_, Base::warp_, Base::warps_, Base::shared_;

 public:
  using Tile = DirectTile<T, direct_chunk, Modified>;

  __host__ __device__ static constexpr int floats(const TeamShared& layout) {
    return layout.end() + 32 * layout.warps * Tile::scratch;
  }

  __device__ DirectDecode(const DirectArguments& args, float* shared) : Base(args, shared), tile_(args) {}

  __device__ void run(int b, int g, int row_tile) {
    b_ = b, g_ = g, first_row_ = row_tile * direct_rows;
    if (!tile_.start(b, g, row_tile)) {  // in no block of the cluster
      return;
    }
    sequence_ = tile_.sequence(), real_rows_ = tile_.real_rows();
    const auto chunks = this->own_chunks((tile_.end() - tile_.begin() + direct_chunk - 1) / direct_chunk);
#pragma unroll 1
    for (int chunk = chunks.begin; chunk < chunks.end; chunk += warps_) {
      const int own = chunk + warp_;
      do_round(own < chunks.end ? tile_.begin() + own * direct_chunk : tile_.end(), chunk == chunks.begin);
    }
    if (warp_ == 0 && lane_ % 4 == 0) {
      this->share(row_of(0), rows_[0]);
      this->share(row_of(1), rows_[1]);
    }
    this->merge(static_cast<float>(args_.dropout.kept_scale) / Tile::weight_scale);
  }

 private:
  __device__ int row_of(int half) const { return lane_ / 4 + 8 * half; }

  // A chunk of each warp, from `key` on; some may begin at the last key's end, and find nothing.
  __device__ void do_round(int key, bool is_first) {
    const bool leads = lane_ % 4 == 0;
    const int row0 = warp_ * team_most_rows;
    typename Tile::Scores scores;
    tile_.find_scores(key, shared_ + layout_.end() + threadIdx.x, scores);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float own = Tile::highest_of(scores, half);
      if (leads) {
        shared_[layout_.highest() + row0 + row_of(half)] = own;
      }
    }
    __syncthreads();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float all = this->highest_of(row_of(half), rows_[half].highest);
      const float factor = rows_[half].raise(all);
      const float total = Tile::weigh(scores, half, all);
      if (leads) {
        shared_[layout_.totals() + row0 + row_of(half)] = total;
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
        rows_[0].total += this->total_of(row_of(0));
        rows_[1].total += this->total_of(row_of(1));
      }
      this->add_parts(d, is_first);
      __syncthreads();  // the parts have been read
    }
  }

  // A warp's sums [rows][64].
  __device__ void leave(const typename Tile::Sums& sums) {
    float* own = shared_ + layout_.parts() + warp_ * layout_.part();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (tile_.is_real(half)) {
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          float eight[8];
          Tile::sums_of(sums, half, part, eight);
          auto* to =
              reinterpret_cast<float4*>(own + row_of(half) * layout_.part_stride() + 16 * (lane_ % 4) + 8 * part);
          to[0] = {eight[0], eight[1], eight[2], eight[3]};
          to[1] = {eight[4], eight[5], eight[6], eight[7]};
        }
      }
    }
  }

  Tile tile_;
  RowSoftmax<float> rows_[2];  // of all warps so far, the same in each
};

// A cluster for each tile of rows.
template <class T, bool Modified>
__global__ void __launch_bounds__(32 * team_most_warps, 1) direct_decode(const __grid_constant__ DirectArguments args) {
  extern __shared__ __align__(16) float direct_shared[];
  const unsigned task = blockIdx.x / args.cluster, head = task / args.row_tiles;
  const unsigned kv_heads = static_cast<unsigned>(args.kv_heads), b = head / kv_heads;
  DirectDecode<T, Modified>(args, direct_shared)
      .run(static_cast<int>(b), static_cast<int>(head - b * kv_heads), static_cast<int>(task - head * args.row_tiles));
}

}  // namespace headway::cuda
