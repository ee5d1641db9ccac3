// The score matrix after a stage for bf16 and f16, on tensor cores: every option and stride, head dims up to Depth.
//
// A block owns 64 queries of one head, 16 a warp, and walks over their keys 64 at a time, the next tile copied while
// this one is computed. For weights it walks twice: once for the softmax's statistics, once to store exp(s - highest) /
// total. Q is read once, K twice for each query tile, mostly from L2, and every element of the matrix is written once:
// 2 bytes a pair, which bound it together with the exponentials. A warp's 16 x 64 results pass through shared memory so
// that they leave as whole lines.
#pragma once

#include "engines/cuda/kernels/mma_scores.cuh"
#include "engines/cuda/kernels/softmax.cuh"

namespace headway::cuda {

template <class T, int Depth>
class MmaMatrix {
 public:
  static constexpr int tile_bytes = mma_rows * Depth * 2;
  static constexpr int slots = mma_rows / 2;  // of a warp's scores, in one thread
  static constexpr int stages = Depth == 256 ? 1 : 2;
  static constexpr int result_bytes = mma_rows * mma_rows * 2;

  __host__ static std::size_t shared_bytes() {
    return (1 + stages) * tile_bytes + slots * mma_threads * sizeof(float) + result_bytes;
  }

  __device__ MmaMatrix(const ScoresArguments& args, unsigned char* shared)
      : args_(args),
        queries_(shared),
        keys_(shared + tile_bytes),
        scratch_(reinterpret_cast<float*>(keys_ + stages * tile_bytes)),
        results_(keys_ + stages * tile_bytes + slots * mma_threads * sizeof(float)) {}

  __device__ void run(std::int64_t b, std::int64_t h, std::int64_t tile) {
    b_ = b, h_ = h, first_ = tile * mma_rows;
    sequence_ = sequence_of(args_, b);
    range_ = tile_range(args_, sequence_, b, first_, mma_rows);
    __syncthreads();  // the tile before has been read
    if (static_cast<int>(threadIdx.x) < mma_rows) {
      ranges()[threadIdx.x] = row_range(args_, sequence_, b, first_ + threadIdx.x);
    }
    const HalfRows<T> queries(args_.query, b, h, sequence_.query_begin, sequence_.query_count, args_.head_dim);
    fill_tile<Depth>(queries, first_, queries_);
    ptx::commit_copies();
    rows_[0] = rows_[1] = {};
    inverse_[0] = inverse_[1] = 0;
    const std::int64_t begin = range_.begin / mma_rows * mma_rows;
    if (args_.stage == Stage::weights) {
      walk(begin, range_.end, [&](std::int64_t, float(&scores)[8][4]) { add_to_softmax(scores); });
      close_rows();
    }
    if (args_.stage == Stage::scaled || args_.stage == Stage::capped) {
      store_range(0, args_.key_len);
    } else {
      store_nothing(0, begin);
      store_range(begin, range_.end);
      store_nothing(larger(blocks_end(range_.end), begin), args_.key_len);
    }
  }

 private:
  __device__ static KeyRange* ranges() {
    __shared__ KeyRange ranges[mma_rows];
    return ranges;
  }

  // Where the tiles that begin at a multiple of 64 and hold keys before `end` end.
  __device__ static std::int64_t blocks_end(std::int64_t end) { return (end + mma_rows - 1) / mma_rows * mma_rows; }

  // visit(key, scores) for every tile of keys that begins in [begin, end).
  template <class Visit>
  __device__ void walk(std::int64_t begin, std::int64_t end, const Visit& visit) {
    const HalfRows<T> keys(args_.key, b_, h_ / args_.group, sequence_.key_begin, sequence_.key_count, args_.head_dim);
    const Modifiers<float> modifiers(args_, sequence_, b_, h_);
    const auto fetch = [&](std::int64_t key, int stage) {
      if (key < end) {
        fill_tile<Depth>(keys, key, keys_ + stage * tile_bytes);
      }
      ptx::commit_copies();
    };
    int stage = 0;
#pragma unroll 1
    for (std::int64_t key = begin - (stages - 1) * mma_rows; key < end; key += mma_rows) {
      // With two stages the step before the first one only fetches.
      fetch(key + (stages - 1) * mma_rows, stage ^ (stages - 1));
      if (key < begin) {
        stage ^= 1;
        continue;
      }
      ptx::wait_for_copies<stages - 1>();
      __syncthreads();
      float scores[8][4];  // S = Q K^T  [16, 64] of this warp
      multiply_rows<Depth, T>(thread_, queries_, keys_ + stage * tile_bytes, scores);
      modify(modifiers, key, scores);
      visit(key, scores);
      __syncthreads();  // the stage may be filled again
      stage ^= stages - 1;
    }
    ptx::wait_for_copies<0>();
    __syncthreads();
  }

  // Products become scores, as far as the stage says.
  __device__ void modify(const Modifiers<float>& modifiers, std::int64_t key, float (&scores)[8][4]) {
    if (args_.stage == Stage::scaled || args_.stage == Stage::capped) {
#pragma unroll
      for (int slot = 0; slot < slots; ++slot) {
        float& score = scores[slot / 4][slot % 4];
        score = modifiers.scaled(score);
        score = args_.stage == Stage::capped ? modifiers.capped(score) : score;
      }
      return;
    }
    const auto where = [&](int r, int c) {
      const KeyRange range = ranges()[r];
      return Pair{first_ + r, key + c, key + c >= range.begin && key + c < range.end};
    };
    const bool plain = modifiers.only_scale() && key >= range_.full_begin && key + mma_rows <= range_.full_end;
    modify_slots(thread_, modifiers, plain, where, scratch_, nullptr, scores);
  }

  __device__ void add_to_softmax(const float (&scores)[8][4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float highest = -infinity<float>();
#pragma unroll
      for (int t = 0; t < 8; ++t) {
        highest = higher(higher(highest, scores[t][2 * half]), scores[t][2 * half + 1]);
      }
      rows_[half].raise(quad_maximum(highest));
      const float base = reference(rows_[half].highest);
      float sum = 0;
#pragma unroll
      for (int t = 0; t < 8; ++t) {
        sum += exponential(scores[t][2 * half] - base) + exponential(scores[t][2 * half + 1] - base);
      }
      rows_[half].total += sum;  // of this thread's columns, until the end
    }
  }

  __device__ void close_rows() {
    const float sink = sink_of<float>(args_, h_);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      RowSoftmax<float>& row = rows_[half];
      row.total = quad_sum(row.total);
      if (!row.empty()) {
        row.raise(sink);
        row.total += exponential(sink - reference(row.highest));
      }
      inverse_[half] = 1.0f / row.total;
    }
  }

  __device__ void store_range(std::int64_t begin, std::int64_t end) {
    walk(begin, end, [&](std::int64_t key, float(&scores)[8][4]) {
      if (args_.stage == Stage::weights) {
#pragma unroll
        for (int slot = 0; slot < slots; ++slot) {
          float& score = scores[slot / 4][slot % 4];
          const int half = slot / 2 % 2;
          const float weight = exponential(score - reference(rows_[half].highest)) * inverse_[half];
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
  unsigned char *queries_, *keys_;
  float* scratch_;
  unsigned char* results_;
  MmaThread thread_;
  std::int64_t b_ = 0, h_ = 0, first_ = 0;
  Sequence sequence_;
  TileRange range_;
  RowSoftmax<float> rows_[2];
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
