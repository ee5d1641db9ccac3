// The score matrix after a stage for bf16 and f16, on tensor cores: every option and stride, head dims up to Depth.
//
// A block owns 64 queries of one head, 16 a warp, and walks over their keys 64 at a time (mma_walk.cuh). For weights it
// walks twice: once for the softmax's statistics, once to store exp(s - highest) / total. Q is read once, K twice for
// each query tile, mostly from L2, and every element of the matrix is written once: 2 bytes a pair, which bound it
// together with the exponentials. A warp's 16 x 64 results pass through shared memory so that they leave as whole
// lines.
#pragma once

#include "engines/cuda/kernels/mma_walk.cuh"

namespace headway::cuda {

template <class T, int Depth>
class MmaMatrix : MmaWalk<T, Depth> {
 public:
  using Walk = MmaWalk<T, Depth>;
  using Walk::slots, Walk::stages;
  static constexpr int result_bytes = mma_rows * mma_rows * 2;

  __host__ static std::size_t shared_bytes() { return Walk::walk_bytes(Depth) + result_bytes; }

  __device__ MmaMatrix(const ScoresArguments& args, unsigned char* shared)
      : Walk(args, shared), args_(args), results_(shared + Walk::walk_bytes(Depth)) {}

  __device__ void run(std::int64_t b, std::int64_t h, std::int64_t tile) {
    this->start(b, h, tile * mma_rows, mma_rows);
    inverse_[0] = inverse_[1] = 0;
    if (args_.stage == Stage::weights) {
      this->walk_for_softmax(args_.stage);
      inverse_[0] = 1.0f / softmax_[0].total;
      inverse_[1] = 1.0f / softmax_[1].total;
    }
    if (args_.stage == Stage::scaled || args_.stage == Stage::capped) {
      store_range(0, args_.key_len);
    } else {
      const std::int64_t begin = this->first_key();
      // Tiles that the walk skips get nothing; of the others each thread writes the same places again.
      store_nothing(0, args_.spans.given ? range_.end : begin);
      store_range(begin, range_.end);
      store_nothing(larger(blocks_end(range_.end), begin), args_.key_len);
    }
  }

 private:
  using Walk::b_, Walk::first_, Walk::h_, Walk::range_, Walk::softmax_, Walk::thread_;

  // Where the tiles that begin at a multiple of 64 and hold keys before `end` end.
  __device__ static std::int64_t blocks_end(std::int64_t end) { return (end + mma_rows - 1) / mma_rows * mma_rows; }

  __device__ void store_range(std::int64_t begin, std::int64_t end) {
    this->walk(args_.stage, begin, end, [&](std::int64_t key, float(&scores)[8][4]) {
      if (args_.stage == Stage::weights) {
#pragma unroll
        for (int slot = 0; slot < slots; ++slot) {
          float& score = scores[slot / 4][slot % 4];
          const int half = slot / 2 % 2;
          const float weight = exponential(score - reference(softmax_[half].highest)) * inverse_[half];
          score = score == -infinity<float>() ? 0.0f : weight;
        }
      }
      store(key, scores);
    });
  }

  // Keys that no row of the tile sees.
  __device__ void store_nothing(std::int64_t begin, std::int64_t end) {
    float nothing[8][4];
#pragma unroll
    for (int slot = 0; slot < slots; ++slot) {
      nothing[slot / 4][slot % 4] = args_.stage == Stage::weights ? 0.0f : -infinity<float>();
    }
#pragma unroll 1
    for (std::int64_t key = begin; key < end; key += mma_rows) {
      store(key, nothing);
    }
  }

  __device__ T* target(std::int64_t i, std::int64_t j) const {
    const Matrix& to = args_.scores;
    return static_cast<T*>(to.data) + b_ * to.batch + h_ * to.head + i * to.query + j * to.key;
  }

  // A warp's 16 rows of 64 keys.
  __device__ void store(std::int64_t key, const float (&scores)[8][4]) {
    const int first = thread_.warp * 16;
    unsigned char* rows = results_ + first * mma_rows * 2;
#pragma unroll
    for (int t = 0; t < 8; ++t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const std::uint32_t pair = ptx::packed_pair<T>(scores[t][2 * half], scores[t][2 * half + 1]);
        const int r = thread_.lane / 4 + 8 * half;
        *reinterpret_cast<std::uint32_t*>(rows + chunk_at<mma_rows>(r, t) + thread_.lane % 4 * 4) = pair;
      }
    }
    __syncwarp();
    const T* line = target(first_ + first, key);
    const bool whole = key + mma_rows <= args_.key_len && args_.scores.key == 1 && args_.scores.query % 8 == 0 &&
                       reinterpret_cast<std::uintptr_t>(line) % 16 == 0;
    const int chunk = thread_.lane % 8;
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      const int r = thread_.lane / 8 + 4 * x;
      const std::int64_t i = first_ + first + r;
      if (i < args_.query_len) {
        const unsigned char* from = rows + chunk_at<mma_rows>(r, chunk);
        if (whole) {
          *reinterpret_cast<uint4*>(target(i, key + chunk * 8)) = *reinterpret_cast<const uint4*>(from);
        } else {
          store_by_element(reinterpret_cast<const T*>(from), target(i, key + chunk * 8), args_.scores.key,
                           args_.key_len - key - chunk * 8);
        }
      }
    }
    __syncwarp();  // the rows may be written again
  }

  __device__ static __noinline__ void store_by_element(const T* eight, T* to, std::int64_t step, std::int64_t left) {
#pragma unroll 1
    for (int x = 0; x < 8 && x < left; ++x) {
      to[x * step] = eight[x];
    }
  }

  const ScoresArguments& args_;
  unsigned char* results_;
  float inverse_[2];
};

template <class T, int Depth>
__global__ void __launch_bounds__(mma_threads, 256 / Depth < 3 ? 256 / Depth : 3)
    mma_matrix(const __grid_constant__ ScoresArguments arguments, std::int64_t row_tiles) {
  extern __shared__ __align__(16) unsigned char shared[];
  MmaMatrix<T, Depth> matrix(arguments, shared);
  const std::int64_t tasks = arguments.batch * arguments.heads * row_tiles;
  for (std::int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const std::int64_t head = task / row_tiles;
    matrix.run(head / arguments.heads, head % arguments.heads, task % row_tiles);
  }
}

}  // namespace headway::cuda
