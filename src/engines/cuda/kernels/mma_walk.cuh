// A tile of 64 queries that walks over keys, for bf16 and f16 on tensor cores: the scores of one tile of keys after
// the other in registers, and the softmax's statistics from them. Every option and stride, head dims up to Depth.
//
// A block has 64 queries of one head, 16 a warp, and takes their keys 64 at a time, the next tile copied while this one
// is computed.
#pragma once

#include "engines/cuda/kernels/mma_scores.cuh"
#include "engines/cuda/kernels/walk_scores.cuh"

namespace headway::cuda {

template <class T, int Depth>
class MmaWalk {
 public:
  using Real = float;
  using Scores = float[8][4];  // S = Q K^T  [16, 64] of a warp, in one thread
  static constexpr int threads = mma_threads, rows = mma_rows, keys = mma_rows;
  static constexpr int slots = mma_rows / 2;  // scores of one thread
  static constexpr int own_rows = 2;          // and the rows that they belong to
  static constexpr int tile_bytes = mma_rows * Depth * 2;
  static constexpr int stages = Depth == 256 ? 1 : 2;
  static constexpr int scratch_bytes = slots * mma_threads * static_cast<int>(sizeof(float));

  // The scratch is last.
  __host__ __device__ static std::size_t walk_bytes(std::int64_t) { return (1 + stages) * tile_bytes + scratch_bytes; }

  __device__ MmaWalk(const Arguments& args, unsigned char* shared, int tiles = 1 + stages)
      : args_(args),
        queries_(shared),
        keys_(shared + tile_bytes),
        scratch_(reinterpret_cast<float*>(shared + tiles * tile_bytes)) {}

  // Rows [first, first + count) of a head, count up to 64.
  __device__ void start(std::int64_t b, std::int64_t h, std::int64_t first, std::int64_t count) {
    h_ = h;
    start_rows(b, first, count);
    fill_tile<Depth>(queries_of(h), first_, queries_);
    ptx::commit_copies();
    softmax_[0] = softmax_[1] = {};
  }

  // The same rows of every head.
  __device__ void start_rows(std::int64_t b, std::int64_t first, std::int64_t count) {
    b_ = b, first_ = first;
    sequence_ = sequence_of(args_, b);
    range_ = tile_range(args_, sequence_, b, first_, count);
    __syncthreads();  // the tile before has been read
    if (static_cast<int>(threadIdx.x) < mma_rows) {
      ranges()[threadIdx.x] = row_range(args_, sequence_, b, first_ + threadIdx.x);
    }
  }

  // visit(key, scores) for every tile of keys that begins in [begin, end), but for those that spans leave nothing of,
  // where the stage heeds them. All threads may use the scratch between two
  // barriers of the visit's own.
  template <class Visit>
  __device__ void walk(const Stage& stage, std::int64_t begin, std::int64_t end, const Visit& visit) {
    const HalfRows<T> keys = keys_of(h_);
    const Modifiers<float> modifiers(args_, sequence_, b_, h_);
    const auto fetch = [&](std::int64_t key, int into) {
      if (key < end) {
        fill_tile<Depth>(keys, key, keys_ + into * tile_bytes);
      }
      ptx::commit_copies();
    };
    const auto next_from = [&](std::int64_t key) {
      return is_masked(stage) ? next_key_tile(args_, sequence_, b_, h_, first_, mma_rows, key, end, mma_rows) : key;
    };
    int current = 0;
    std::int64_t key = next_from(begin), next;
    if (stages > 1) {
      fetch(key, current);
    }
#pragma unroll 1
    for (; key < end; key = next) {
      next = next_from(key + mma_rows);
      fetch(stages > 1 ? next : key, current ^ (stages - 1));
      ptx::wait_for_copies<stages - 1>();
      __syncthreads();
      Scores scores;
      multiply_rows<Depth, T>(thread_, queries_, keys_ + current * tile_bytes, scores);
      modify(stage, modifiers, key, scores);
      visit(key, scores);
      __syncthreads();  // the stage may be filled again
      current ^= stages - 1;
    }
    ptx::wait_for_copies<0>();
    __syncthreads();
  }

  // Tiles of the keys that some row sees begin at a multiple of 64.
  __device__ std::int64_t first_key() const { return range_.begin / mma_rows * mma_rows; }

  // The softmax of every row over the keys that it sees, and the sink where it sees one. The stage says biased or
  // weights.
  __device__ void walk_for_softmax(const Stage& stage) {
    walk(stage, first_key(), range_.end, [&](std::int64_t, const Scores& scores) { add_to_softmax(scores); });
    const float sink = sink_of<float>(args_, h_);
#pragma unroll
    for (int half = 0; half < own_rows; ++half) {
      RowSoftmax<float>& row = softmax_[half];
      row.total = quad_sum(row.total);
      end_softmax(row, sink);
    }
  }

  // Which of the thread's rows a score belongs to, and where they are in the tile.
  __device__ static int own_row(int slot) { return slot / 2 % 2; }
  __device__ int row_of(int own) const { return thread_.row_of(2 * own); }
  __device__ int col_of(int slot) const { return thread_.col_of(slot); }
  __device__ static float& at(Scores& scores, int slot) { return scores[slot / 4][slot % 4]; }

  // Over the threads that share rows.
  __device__ static double sum_over_row(double value) {
    value += __shfl_xor_sync(0xffffffffu, value, 1);
    return value + __shfl_xor_sync(0xffffffffu, value, 2);
  }
  __device__ bool leads_rows() const { return thread_.lane % 4 == 0; }  // one of them

  // The scores of a warp's tile go to shared memory as pairs.
  __device__ void store_tile(const float (&values)[slots], float* tile, int stride) const {
#pragma unroll
    for (int slot = 0; slot < slots; slot += 2) {
      *reinterpret_cast<float2*>(tile + row_of(own_row(slot)) * stride + col_of(slot)) = {values[slot],
                                                                                          values[slot + 1]};
    }
  }

 protected:
  __device__ static KeyRange* ranges() {
    __shared__ KeyRange ranges[mma_rows];
    return ranges;
  }

  __device__ static std::uint64_t* words() {
    __shared__ std::uint64_t words[mma_rows];
    return words;
  }

  // Whether pairs may be forbidden in the matrix after a stage.
  __device__ static bool is_masked(const Stage& stage) { return stage != Stage::scaled && stage != Stage::capped; }

  __device__ HalfRows<T> queries_of(std::int64_t h) const {
    return {args_.query, b_, h, sequence_.query_begin, sequence_.query_count, args_.head_dim};
  }
  __device__ HalfRows<T> keys_of(std::int64_t h) const {
    return {args_.key, b_, h / args_.group, sequence_.key_begin, sequence_.key_count, args_.head_dim};
  }

  // Products become scores, as far as the stage says.
  __device__ void modify(const Stage& stage, const Modifiers<float>& modifiers, std::int64_t key, Scores& scores) {
    if (!is_masked(stage)) {
      each_slot(scores, [&](float& score, int) { score = modifiers.scaled(score); });
      settle(stage, key, scores);
      each_slot(scores, [&](float& score, int) { score = stage == Stage::capped ? modifiers.capped(score) : score; });
      return;
    }
    const auto where = [&](int r, int c) {
      const KeyRange range = ranges()[r];
      return Pair{first_ + r, key + c, key + c >= range.begin && key + c < range.end};
    };
    const bool plain = modifiers.only_scale() && key >= range_.full_begin && key + mma_rows <= range_.full_end;
    modify_slots(thread_, modifiers, plain, where, scratch_, nullptr, scores);
    if (plain) {
      each_slot(scores, [](float& score, int) { score = Modifiers<float>::of_allowed(score); });
    }
    if (has_holes(args_, sequence_, b_, h_, first_, mma_rows, key, mma_rows)) {
      fill_span_words<mma_rows, mma_rows>(args_, sequence_, b_, h_, first_, key, words());
      __syncthreads();
      forbid_by_words<false>(thread_, words(), 0, scores);
    }
    settle(stage, key, scores);
  }

  template <class Visit>
  __device__ static void each_slot(Scores& scores, const Visit& visit) {
#pragma unroll
    for (int slot = 0; slot < slots; ++slot) {
      visit(at(scores, slot), slot);
    }
  }

  // Finds scores again that say too little.
  __device__ void settle(const Stage& stage, std::int64_t key, Scores& scores) {
    bool any = false;
    each_slot(scores, [&](float& score, int) { any |= is_unsettled(stage, score); });
    if (!any) [[likely]] {
      return;
    }
    visit_in_loop(scores, [&](float& score, int slot) {
      const std::int64_t i = first_ + row_of(own_row(slot)), j = key + col_of(slot);
      if (is_unsettled(stage, score) && i < sequence_.query_count && j < sequence_.key_count) {
        score = settled<T>(args_, stage, b_, h_, i, j);
      }
    });
  }

  __device__ void add_to_softmax(const Scores& scores) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float highest = -infinity<float>();
#pragma unroll
      for (int t = 0; t < 8; ++t) {
        highest = higher(higher(highest, scores[t][2 * half]), scores[t][2 * half + 1]);
      }
      softmax_[half].raise(quad_maximum(highest));
      const float base = reference(softmax_[half].highest);
      float sum = 0;
#pragma unroll
      for (int t = 0; t < 8; ++t) {
        sum += exponential(scores[t][2 * half] - base) + exponential(scores[t][2 * half + 1] - base);
      }
      softmax_[half].total += sum;  // of this thread's columns, until the end
    }
  }

  const Arguments& args_;
  unsigned char *queries_, *keys_;
  float* scratch_;
  MmaThread thread_;
  std::int64_t b_ = 0, h_ = 0, first_ = 0;
  Sequence sequence_;
  TileRange range_;
  RowSoftmax<float> softmax_[own_rows];
};

}  // namespace headway::cuda
