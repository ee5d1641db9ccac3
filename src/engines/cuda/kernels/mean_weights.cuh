// The mean of the weights over the heads: m(i,j) = sum_h exp(s_h(i,j) - lse_h(i)) / H, from the lse that attention
// left.
//
// A block of threads owns 64 queries and 64 keys of a batch item and takes one head after the other, so that the sum
// stays in registers, is made in one order, and every element of the mean is written once: no head's matrix is stored.
// Queries and keys of each head are read once a tile, from L2: 256 bytes for a row of both at head dim 64, which bounds
// it together with the exponentials. `Walk` brings the scores: MmaHeads or SimtHeads.
#pragma once

#include "engines/cuda/kernels/mean_weights_kernels.h"
#include "engines/cuda/kernels/softmax.cuh"
#include "engines/cuda/key_range.cuh"

namespace headway::cuda {

template <class Walk>
class MeanWeights : Walk {
 public:
  using typename Walk::Element, typename Walk::Real, typename Walk::Scores;
  static constexpr int rows = Walk::rows, keys = Walk::keys, slots = Walk::slots, own_rows = Walk::own_rows;

  __device__ MeanWeights(const MeanWeightsArguments& args, unsigned char* shared) : Walk(args, shared), args_(args) {}

  __device__ void run(std::int64_t b, std::int64_t row_tile, std::int64_t key_tile) {
    const std::int64_t first = row_tile * rows, key = key_tile * keys;
    Real sums[slots] = {};
    if (args_.heads > 0) {
      add_heads(b, first, key, sums);
    }
    store(b, first, key, sums);
  }

 private:
  __device__ __forceinline__ void add_heads(std::int64_t b, std::int64_t first, std::int64_t key, Real (&sums)[slots]) {
    this->start_rows(b, first, smaller(rows, args_.query_len - first));
    if (key < this->range_.end && key + keys > this->range_.begin) {
      Real lse[own_rows];
      this->walk_heads(
          key,
          [&](std::int64_t h) {
#pragma unroll
            for (int m = 0; m < own_rows; ++m) {
              const std::int64_t i = first + this->row_of(m);
              lse[m] = i < args_.query_len ? head_of<Real>(args_.lse, b, h)[i * args_.lse.row] : Real(0);
            }
          },
          [&](Scores& scores) {
#pragma unroll
            for (int slot = 0; slot < slots; ++slot) {
              const Real score = Walk::at(scores, slot);
              sums[slot] += score == -infinity<Real>() ? Real(0) : exponential(score - lse[Walk::own_row(slot)]);
            }
          });
    }
  }

  __device__ void store(std::int64_t b, std::int64_t first, std::int64_t key, const Real (&sums)[slots]) const {
    const Matrix& to = args_.mean;
    const Real heads = static_cast<Real>(larger(args_.heads, 1));  // the mean over none is 0
#pragma unroll
    for (int slot = 0; slot < slots; ++slot) {
      const std::int64_t i = first + this->row_of(Walk::own_row(slot)), j = key + this->col_of(slot);
      if (i < args_.query_len && j < args_.key_len) {
        static_cast<Element*>(to.data)[b * to.batch + i * to.query + j * to.key] = element<Element>(sums[slot] / heads);
      }
    }
  }

  const MeanWeightsArguments& args_;
};

template <class Walk>
__device__ inline void mean_weights_tiles(const MeanWeightsArguments& arguments, unsigned char* shared) {
  MeanWeights<Walk> mean(arguments, shared);
  const std::int64_t tiles = arguments.row_tiles * arguments.key_tiles;
  for (std::int64_t task = blockIdx.x; task < arguments.batch * tiles; task += gridDim.x) {
    const std::int64_t tile = task % tiles;
    mean.run(task / tiles, tile / arguments.key_tiles, tile % arguments.key_tiles);
  }
}

}  // namespace headway::cuda
