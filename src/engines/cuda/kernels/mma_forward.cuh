// Forward for bf16 and f16 on tensor cores, for every option and stride and head dims up to Depth.
//
// A block owns 64 queries of one head, 16 a warp, and walks over the keys of its rows' ranges, 64 at a time; the next
// tile's K and V are copied while this one is computed (two stages up to 128 features). Q is read once, K and V once
// for each query tile, mostly from L2; the products bound it: 4 x 64 x 64 x D operations a step for 2 x 64 x D loads.
// Scores and sums are f32; the weights are rounded to the inputs' type before the second product. In f16 they are
// multiplied by 2^15 first, so that small weights stay normal numbers.
//
// OneTile: all keys are in one tile, and nothing but ranges, a mask and a bias of halves stands between a product and
// its score. Masks are words of bits then (allowed_words.cuh), and a block needs so few registers and so little shared
// memory that up to four share a multiprocessor.
//
// NaN: as in simt_forward.cuh the walk is repeated carefully only where its result holds one.
#pragma once

#include "engines/cuda/kernels/allowed_words.cuh"
#include "engines/cuda/kernels/launch.cuh"
#include "engines/cuda/kernels/mma_scores.cuh"
#include "engines/cuda/kernels/plain_again.cuh"
#include "engines/cuda/kernels/softmax.cuh"

namespace headway::cuda {

// A score with a term of the bias: two finite numbers have a finite sum, so that an allowed pair is never taken for a
// forbidden one.
__device__ __forceinline__ float sum_of_finite(float score, float term) {
  const float sum = score + term;
  const bool passed = fabsf(sum) == infinity<float>() && fabsf(score) <= FLT_MAX && fabsf(term) <= FLT_MAX;
  return passed ? copysignf(FLT_MAX, sum) : sum;
}

template <class T, int Depth, bool OneTile, bool Paged = false>
class MmaForward {
 public:
  static constexpr int tile_bytes = mma_rows * Depth * 2;
  static constexpr int slots = mma_rows / 2;                      // of a warp's scores, in one thread
  static constexpr int stages = OneTile || Depth == 256 ? 1 : 2;  // what sm_80 has shared memory for
  static constexpr float weight_scale = std::is_same_v<T, float16> ? 32768.0f : 1.0f;

  __host__ static std::size_t shared_bytes() {
    return (1 + 2 * stages) * tile_bytes + (OneTile ? 0 : slots * mma_threads * 4);
  }

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
        if (OneTile) {
          ptx::commit_copies();  // products need not wait for the values
        }
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
      // A careful walk tells allowed pairs from forbidden ones by their scores (modifiers.cuh).
      const bool plain =
          !careful && modifiers.only_scale() && key >= range_.full_begin && key + mma_rows <= range_.full_end;
      std::uint32_t own_word = ~0u;
      if (OneTile && !plain) {
        __syncthreads();  // the rows' ranges are there
        own_word = word_of_lane(key);
      }
      ptx::wait_for_copies<OneTile ? 1 : stages - 1>();
      __syncthreads();
      float scores[8][4];  // S = Q K^T  [16, 64] of this warp
      if constexpr (OneTile) {
        find_scores(modifiers, key, plain, own_word, scores);
        ptx::wait_for_copies<0>();
        __syncthreads();
      } else {
        multiply_rows<Depth, T>(thread_, queries_, keys_ + stage * tile_bytes, scores);
        const auto where = [&](int r, int c) {
          const KeyRange range = ranges()[r];
          return Pair{first_ + r, key + c, key + c >= range.begin && key + c < range.end};
        };
        modify_slots(thread_, modifiers, plain, where, scratch_, nullptr, scores);
      }
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

  // Of row lane / 2 of the warp's, and 32 keys: see QueryRowWords.
  __device__ std::uint32_t word_of_lane(std::int64_t key) const {
    const int r = thread_.warp * 16 + thread_.lane / 2;
    const std::int64_t first = key + thread_.lane % 2 * 32;
    const KeyRange keys = ranges()[r];
    return MaskRow(args_.mask, b_, h_, first_ + r, sequence_.key_count)
        .template of<32>(first, range_bits(keys.begin, keys.end, first));
  }

  // S = Q K^T  [16, 64] of this warp as scores, -inf where ranges, mask or bias forbid the pair.
  __device__ void find_scores(const Modifiers<float>& modifiers, std::int64_t key, bool plain, std::uint32_t own_word,
                              float (&scores)[8][4]) const {
    const QueryRowWords allowed(thread_, own_word);
    const bool biased = args_.bias.data != nullptr;
    std::uint32_t terms[slots / 2];  // of neighbouring keys
    if (biased) {                    // they come while the products are made
      load_terms(key, allowed, terms);
    }
    multiply_rows<Depth, T>(thread_, queries_, keys_, scores);
    if (biased) {
      add_terms(modifiers, allowed, terms, scores);
      return;
    }
#pragma unroll
    for (int slot = 0; slot < slots; ++slot) {
      float& score = scores[slot / 4][slot % 4];
      score = modifiers.scaled(score);
      score = plain ? score : allowed.allows(slot) ? modifiers.of_allowed(score) : -infinity<float>();
    }
  }

  // Of a bias of halves, for the pairs that are allowed.
  __device__ void load_terms(std::int64_t key, const QueryRowWords& allowed, std::uint32_t (&terms)[slots / 2]) const {
    const Matrix& bias = args_.bias;
    const auto* head = static_cast<const std::uint16_t*>(bias.data) + b_ * bias.batch + h_ * bias.head;
    const bool pairs = bias.key == 1 && reinterpret_cast<std::uintptr_t>(head) % 4 == 0 && bias.query % 2 == 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::uint16_t* row =
          head + (first_ + thread_.row_of(2 * half)) * bias.query + (key + 2 * (thread_.lane % 4)) * bias.key;
#pragma unroll
      for (int t = 0; t < 8; ++t) {
        const bool first = allowed.allows(4 * t + 2 * half), second = allowed.allows(4 * t + 2 * half + 1);
        const std::uint16_t* from = row + 8 * t * bias.key;
        std::uint32_t& pair = terms[2 * t + half];
        pair = 0;
        if (pairs && first && second) {
          pair = *reinterpret_cast<const std::uint32_t*>(from);
        } else {
          if (first) {
            pair = from[0];
          }
          if (second) {
            pair |= std::uint32_t{from[bias.key]} << 16;
          }
        }
      }
    }
  }

  __device__ void add_terms(const Modifiers<float>& modifiers, const QueryRowWords& allowed,
                            const std::uint32_t (&terms)[slots / 2], float (&scores)[8][4]) const {
    const bool is_bf16 = args_.bias.dtype == DType::bf16;
#pragma unroll
    for (int n = 0; n < slots / 2; ++n) {
      const float2 pair = is_bf16 ? ptx::unpacked_pair<bfloat16>(terms[n]) : ptx::unpacked_pair<float16>(terms[n]);
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        const float term = x == 0 ? pair.x : pair.y;
        float& score = scores[n / 2][n % 2 * 2 + x];
        const bool seen = allowed.allows(2 * n + x) && term != -infinity<float>();
        score = seen ? modifiers.of_allowed(sum_of_finite(modifiers.scaled(score), term)) : -infinity<float>();
      }
    }
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
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::int64_t i = first_ + thread_.row_of(2 * half), row = sequence_.query_begin + i;
      const bool exists = i < sequence_.query_count;
      const RowEnd<float> end = close_row(rows_[half], sink, i >= sequence_.real_queries);
      store_row(head_of<T>(args_.out, b_, h_) + row * args_.out.row, half, exists, end.factor);
      if (exists && args_.lse.data != nullptr && thread_.lane % 4 == 0) {
        head_of<float>(args_.lse, b_, h_)[row * args_.lse.row] = end.lse;
      }
    }
  }

  // By all lanes of a quad: each stores whole chunks of 16 bytes where the layout allows.
  __device__ void store_row(T* row, int half, bool exists, float factor) const {
    const float kept_scale = static_cast<float>(args_.dropout.kept_scale) / weight_scale;
    const bool empty = rows_[half].empty();
    const int q = thread_.lane % 4;
#pragma unroll
    for (int t = 0; t < Depth / 8; t += 4) {
      std::uint32_t words[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float(&pair)[4] = out_[t + k];
        words[k] =
            empty ? 0u
                  : ptx::packed_pair<T>(pair[2 * half] * factor * kept_scale, pair[2 * half + 1] * factor * kept_scale);
      }
      ptx::transpose_quad(words, q);
      const int d = (t + q) * 8, width = static_cast<int>(args_.value_dim);
      if (!exists || d >= width) {
        continue;
      }
      if (args_.out.chunks && d + 8 <= width) {
        *reinterpret_cast<uint4*>(row + d) = make_uint4(words[0], words[1], words[2], words[3]);
        continue;
      }
#pragma unroll
      for (int x = 0; x < 8; ++x) {
        if (d + x < width) {
          row[(d + x) * args_.out.feature].bits = static_cast<std::uint16_t>(words[x / 2] >> (16 * (x % 2)));
        }
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

// How many blocks a multiprocessor is to have room for.
template <int Depth, bool OneTile>
constexpr int mma_forward_blocks = Depth == 256   ? 1
                                   : !OneTile     ? 2
                                   : Depth == 128 ? 3
                                                  : 4;

template <class T, int Depth, bool OneTile, bool Paged>
__global__ void __launch_bounds__(mma_threads, mma_forward_blocks<Depth, OneTile>)
    mma_forward(const __grid_constant__ ForwardArguments arguments, std::int64_t row_tiles, std::int64_t) {
  extern __shared__ __align__(16) unsigned char shared[];
  MmaForward<T, Depth, OneTile, Paged> forward(arguments, shared);
  const std::int64_t tasks = arguments.batch * arguments.heads * row_tiles;
  for (std::int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const std::int64_t head = task / row_tiles;
    forward.run(head / arguments.heads, head % arguments.heads, row_tiles - 1 - task % row_tiles);
  }
}

template <class T, int Depth, bool OneTile, bool Paged>
Launch mma_forward_launch_of(const ForwardArguments& arguments) {
  Launch launch;
  launch.name = Paged ? "tensor core tiles, keys in pages" : "tensor core tiles";
  launch.kernel = reinterpret_cast<const void*>(mma_forward<T, Depth, OneTile, Paged>);
  launch.threads = mma_threads;
  launch.shared_bytes = MmaForward<T, Depth, OneTile, Paged>::shared_bytes();
  launch.query_block = launch.key_block = mma_rows;
  launch.stages = MmaForward<T, Depth, OneTile, Paged>::stages;
  launch.row_tiles = blocks(arguments.query_len, mma_rows);
  launch.tasks = arguments.batch * arguments.heads * launch.row_tiles;
  return launch;
}

}  // namespace headway::cuda
