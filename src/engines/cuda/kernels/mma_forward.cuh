// Forward for bf16 and f16 on tensor cores, for every option and stride and head dims up to Depth.
//
// A block owns 64 queries of one head, 16 a warp, and walks over the keys of its rows' ranges, 64 at a time; the next
// tile's K and V are copied while this one is computed (two stages up to 128 features). Q is read once, K and V once
// for each query tile, mostly from L2; the products bound it: 4 x 64 x 64 x D operations a step for 2 x 64 x D loads.
// Scores and sums are f32; the weights are rounded to the inputs' type before the second product. In f16 they are
// multiplied by 2^15 first, so that small weights stay normal numbers.
//
// NaN: as in simt_forward.cuh the walk is repeated carefully only where its result holds one.
#pragma once

#include "engines/cuda/kernels/launch.cuh"
#include "engines/cuda/kernels/mma_scores.cuh"
#include "engines/cuda/kernels/plain_again.cuh"
#include "engines/cuda/kernels/softmax.cuh"

namespace headway::cuda {

template <class T, int Depth, bool Paged = false>
class MmaForward {
 public:
  static constexpr int tile_bytes = mma_rows * Depth * 2;
  static constexpr int slots = mma_rows / 2;           // of a warp's scores, in one thread
  static constexpr int stages = Depth == 256 ? 1 : 2;  // what sm_80 has shared memory for
  static constexpr float weight_scale = std::is_same_v<T, float16> ? 32768.0f : 1.0f;

  __host__ static std::size_t shared_bytes() { return (1 + 2 * stages) * tile_bytes + slots * mma_threads * 4; }

  __device__ MmaForward(const ForwardArguments& args, unsigned char* shared)
      : args_(args),
        queries_(shared),
        keys_(shared + tile_bytes),
        values_(keys_ + stages * tile_bytes),
        scratch_(reinterpret_cast<float*>(values_ + stages * tile_bytes)) {}

  __device__ void run(std::int64_t b, std::int64_t h, std::int64_t tile) {
    b_ = b, h_ = h, first_ = tile * mma_rows;
    sequence_ = sequence_of(args_, b);
    if (first_ >= sequence_.query_count) {
      return;
    }
    range_ = tile_range(args_, sequence_, b, first_, mma_rows);
    const HalfRows<T> queries(args_.query, b, h, sequence_.query_begin, sequence_.query_count, args_.head_dim);
    __syncthreads();  // the tile before has been read
    if (static_cast<int>(threadIdx.x) < mma_rows) {
      ranges()[threadIdx.x] = row_keys(args_, sequence_, b, h, first_ + threadIdx.x);
    }
    fill_tile<Depth>(queries, first_, queries_);
    ptx::commit_copies();
#pragma unroll 1  // one copy of the code for both walks
    for (int careful = 0; careful < 2; ++careful) {
      walk(careful != 0);
      if (!__syncthreads_or(holds_nan(out_))) {
        break;
      }
    }
    store();
    do_again();
  }

 private:
  // Rows that the walk could not do, by the warp that has them.
  __device__ void do_again() {
    unsigned again[2];  // a lane for each row
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      again[half] =
          0x11111111u & __ballot_sync(~0u, needs_plain_row(args_, rows_[half], ranges()[thread_.row_of(2 * half)]));
    }
#pragma unroll 1
    for (unsigned left = again[0] | again[1] << 1; left != 0; left &= left - 1) {
      const int bit = __ffs(static_cast<int>(left)) - 1;
      const int r = __shfl_sync(~0u, thread_.row_of(0), bit & ~3) + (bit & 1) * (thread_.row_of(2) - thread_.row_of(0));
      attend_plainly<T>(args_, b_, h_, first_ + r, 0, args_.value_dim);
    }
  }

  __device__ static KeyRange* ranges() {
    __shared__ KeyRange ranges[mma_rows];
    return ranges;
  }
  __device__ static std::uint64_t* words() {
    __shared__ std::uint64_t words[mma_rows];
    return words;
  }

  __device__ void walk(bool careful) {
    rows_[0] = rows_[1] = {};
#pragma unroll
    for (int t = 0; t < Depth / 8; ++t) {
      out_[t][0] = out_[t][1] = out_[t][2] = out_[t][3] = 0;
    }
    const std::int64_t g = h_ / args_.group;
    const auto keys = key_rows<T, Paged>(args_, args_.key, sequence_, b_, g, args_.head_dim);
    const auto values = key_rows<T, Paged>(args_, args_.value, sequence_, b_, g, args_.value_dim);
    const Modifiers<float> modifiers(args_, sequence_, b_, h_);
    const auto next_from = [&](std::int64_t key) {
      return next_key_tile(args_, sequence_, b_, h_, first_, mma_rows, key, range_.end, mma_rows);
    };
    const auto fetch = [&](std::int64_t key, int stage) {
      if (key < range_.end) {
        fill_tile<Depth>(keys, key, keys_ + stage * tile_bytes);
        fill_tile<Depth>(values, key, values_ + stage * tile_bytes);
      }
      ptx::commit_copies();
    };
    int stage = 0;
    std::int64_t key = next_from(range_.begin / mma_rows * mma_rows), next;
    if (stages > 1) {
      fetch(key, stage);
    }
#pragma unroll 1
    for (; key < range_.end; key = next) {
      next = next_from(key + mma_rows);
      fetch(stages > 1 ? next : key, stage ^ (stages - 1));
      ptx::wait_for_copies<stages - 1>();
      __syncthreads();
      float scores[8][4];  // S = Q K^T  [16, 64] of this warp
      multiply_rows<Depth, T>(thread_, queries_, keys_ + stage * tile_bytes, scores);
      const auto where = [&](int r, int c) {
        const KeyRange range = ranges()[r];
        return Pair{first_ + r, key + c, key + c >= range.begin && key + c < range.end};
      };
      // A careful walk tells allowed pairs from forbidden ones by their scores (modifiers.cuh).
      const bool plain =
          !careful && modifiers.only_scale() && key >= range_.full_begin && key + mma_rows <= range_.full_end;
      modify_slots(thread_, modifiers, plain, where, scratch_, nullptr, scores);
      if (has_holes(args_, sequence_, b_, h_, first_, mma_rows, key, mma_rows)) {
        fill_span_words<mma_rows, mma_rows>(args_, sequence_, b_, h_, first_, key, words());
        __syncthreads();
        forbid_by_words<false>(thread_, words(), 0, scores);
      }
      const std::uint32_t forbidden = weigh(key, scores);
      unsigned char* tile = values_ + stage * tile_bytes;
      const std::uint64_t found = careful ? take_out_nonfinite<Depth, T>(tile, mma_rows) : 0;
      multiply_coefficients<Depth, T>(thread_, scores, weight_scale, tile, out_);  // O += P V  [16, Dv]
      if (found != 0) {
        add_nonfinite<Depth>(found, values, key, scores, weight_scale, forbidden, out_);
      }
      __syncthreads();  // the stage may be filled again
      stage ^= stages - 1;
    }
    ptx::wait_for_copies<0>();
    __syncthreads();
    rows_[0].total = quad_sum(rows_[0].total);
    rows_[1].total = quad_sum(rows_[1].total);
  }

  // Scores become weights relative to the row's highest score; returns the slots that are forbidden.
  __device__ std::uint32_t weigh(std::int64_t key, float (&scores)[8][4]) {
    std::uint32_t forbidden = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float highest = -infinity<float>();
#pragma unroll
      for (int t = 0; t < 8; ++t) {
        highest = higher(higher(highest, scores[t][2 * half]), scores[t][2 * half + 1]);
      }
      const float factor = rows_[half].raise(quad_maximum(highest));
      const float base = reference(rows_[half].highest);
      float sum = 0;
#pragma unroll
      for (int t = 0; t < 8; ++t) {
#pragma unroll
        for (int x = 0; x < 2; ++x) {
          float& score = scores[t][2 * half + x];
          forbidden |= std::uint32_t{score == -infinity<float>()} << (4 * t + 2 * half + x);
          score = exponential(score - base);
          sum += score;
        }
      }
      rows_[half].total += sum;  // of this thread's columns, until the end
#pragma unroll
      for (int t = 0; t < Depth / 8; ++t) {
        out_[t][2 * half] *= factor;
        out_[t][2 * half + 1] *= factor;
      }
    }
    if (args_.dropout.active) {
      const std::uint32_t kept = kept_slots<mma_rows / 8>(thread_, args_.dropout, b_, h_, first_, key);
#pragma unroll
      for (int slot = 0; slot < slots; ++slot) {
        scores[slot / 4][slot % 4] = (kept >> slot & 1) != 0 ? scores[slot / 4][slot % 4] : 0.0f;
      }
    }
    return forbidden;
  }

  __device__ void store() {
    const float sink = sink_of<float>(args_, h_);
    const float kept_scale = static_cast<float>(args_.dropout.kept_scale) / weight_scale;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::int64_t i = first_ + thread_.row_of(2 * half);
      if (i >= sequence_.query_count) {
        continue;
      }
      const RowEnd<float> end = close_row(rows_[half], sink, i >= sequence_.real_queries);
      const std::int64_t row = sequence_.query_begin + i;
      T* out = head_of<T>(args_.out, b_, h_) + row * args_.out.row;
#pragma unroll
      for (int t = 0; t < Depth / 8; ++t) {
#pragma unroll
        for (int x = 0; x < 2; ++x) {
          const std::int64_t d = t * 8 + 2 * (thread_.lane % 4) + x;
          if (d < args_.value_dim) {
            const float value = out_[t][2 * half + x] * end.factor * kept_scale;
            out[d * args_.out.feature] = element<T>(rows_[half].empty() ? 0.0f : value);
          }
        }
      }
      if (args_.lse.data != nullptr && thread_.lane % 4 == 0) {
        head_of<float>(args_.lse, b_, h_)[row * args_.lse.row] = end.lse;
      }
    }
  }

  const ForwardArguments& args_;
  unsigned char *queries_, *keys_, *values_;
  float* scratch_;
  MmaThread thread_;
  std::int64_t b_ = 0, h_ = 0, first_ = 0;
  Sequence sequence_;
  TileRange range_;
  RowSoftmax<float> rows_[2];
  float out_[Depth / 8][4];
};

template <class T, int Depth, bool Paged>
__global__ void __launch_bounds__(mma_threads, Depth == 256 ? 1 : 2)
    mma_forward(const __grid_constant__ ForwardArguments arguments, std::int64_t row_tiles, std::int64_t) {
  extern __shared__ __align__(16) unsigned char shared[];
  MmaForward<T, Depth, Paged> forward(arguments, shared);
  const std::int64_t tasks = arguments.batch * arguments.heads * row_tiles;
  for (std::int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const std::int64_t head = task / row_tiles;
    forward.run(head / arguments.heads, head % arguments.heads, row_tiles - 1 - task % row_tiles);
  }
}

template <class T, int Depth, bool Paged>
Launch mma_forward_launch_of(const ForwardArguments& arguments) {
  Launch launch;
  launch.name = Paged ? "tensor core tiles, keys in pages" : "tensor core tiles";
  launch.kernel = reinterpret_cast<const void*>(mma_forward<T, Depth, Paged>);
  launch.threads = mma_threads;
  launch.shared_bytes = MmaForward<T, Depth, Paged>::shared_bytes();
  launch.query_block = launch.key_block = mma_rows;
  launch.stages = MmaForward<T, Depth, Paged>::stages;
  launch.row_tiles = blocks(arguments.query_len, mma_rows);
  launch.tasks = arguments.batch * arguments.heads * launch.row_tiles;
  return launch;
}

}  // namespace headway::cuda
