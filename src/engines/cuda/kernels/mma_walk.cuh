// A tile of 64 queries that walks over keys, for bf16 and f16 on tensor cores: the scores of one tile of keys after
// the other in registers, and the softmax's statistics from them. Every option and stride, head dims up to Depth.
//
// A block has 64 queries of one head, 16 a warp, and takes their keys 64 at a time, the next tile copied while this one
// is computed.
#pragma once

#include "engines/cuda/kernels/mma_scores.cuh"
#include "engines/cuda/kernels/walk_scores.cuh"
#include "engines/cuda/ptx/warp.cuh"

namespace headway::cuda {

// The product of two tiles by mma.sync, and how these lie.
template <class T, int Depth>
struct MmaProduct {
  using Chunks = ChunksInRows<Depth>;
  __device__ static void arrived() {}  // what a thread copied; a barrier follows
  __device__ static void run(const MmaThread& thread, const unsigned char* queries, const unsigned char* keys,
                             float (&scores)[8][4]) {
    multiply_rows<Depth, T>(thread, queries, keys, scores);
  }
};

template <class T, int Depth, class Product = MmaProduct<T, Depth>>
class MmaWalk {
 public:
  using Real = float;
  using Chunks = typename Product::Chunks;
  using Scores = float[8][4];  // S = Q K^T  [16, 64] of a warp, in one thread
  static constexpr int threads = mma_threads, rows = mma_rows, keys = mma_rows;
  static constexpr int slots = mma_rows / 2;  // scores of one thread
  static constexpr int own_rows = 2;          // and the rows that they belong to
  static constexpr bool walks_whole_tiles = true;
  static constexpr bool has_registers_left = Depth > 64;  // fewer blocks share a multiprocessor
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
    fill_tile<Depth, Chunks>(queries_of(h), first_, queries_);
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
  // where the stage heeds them. All threads may use the scratch after a barrier of the visit's own.
  template <class Visit>
  __device__ void walk(const Stage& stage, std::int64_t begin, std::int64_t end, const Visit& visit) {
    const Modifiers<float> modifiers(args_, sequence_, b_, h_);
    const HalfRows<T> keys = keys_of(h_);
    const auto fetch = [&](std::int64_t key, unsigned char* tile) { fill_tile<Depth, Chunks>(keys, key, tile); };
    const auto next_from = [&](std::int64_t key) {
      return is_masked(stage) ? next_key_tile(args_, sequence_, b_, h_, first_, mma_rows, key, end, mma_rows) : key;
    };
    each_product(fetch, next_from, begin, end, [&](std::int64_t key, Scores& scores) {
      modify(stage, modifiers, key, scores);
      visit(key, scores);
    });
  }

  // visit(key, products) for tiles that every row sees all keys of, of weights that nothing but the scale has a part
  // in: what most tiles of a long sequence are. The loop has no calls, for which it would have to keep its numbers in
  // local memory.
  template <class Visit>
  __device__ void walk_whole(std::int64_t begin, std::int64_t end, const Visit& visit) {
    TileCopies<Depth, Chunks, T> copies(keys_of(h_), begin);
    const auto fetch = [&](std::int64_t, unsigned char* tile) { copies.next(tile); };
    const auto next_from = [](std::int64_t key) { return key; };
    each_product(fetch, next_from, begin, end, visit);
  }

  // Where from `key` on, the first of a tile, such tiles begin and end; nowhere: both are `end`.
  struct WholeTiles {
    std::int64_t begin, end;
  };
  __device__ WholeTiles whole_tiles(std::int64_t key, std::int64_t end) const {
    const bool only_scale =
        args_.softcap == 0 && args_.bias.data == nullptr && args_.mask.data == nullptr && args_.slopes.data == nullptr;
    const std::int64_t begin = key + (larger(range_.full_begin - key, 0) + mma_rows - 1) / mma_rows * mma_rows;
    const std::int64_t keys = smaller(range_.full_end, end) - begin;
    if (!only_scale || args_.spans.given || !args_.key.chunks || keys < mma_rows) {
      return {end, end};
    }
    return {begin, begin + keys / mma_rows * mma_rows};
  }

  // Tiles of the keys that some row sees begin at a multiple of 64.
  __device__ std::int64_t first_key() const { return range_.begin / mma_rows * mma_rows; }

  // The softmax of every row over the keys that it sees, and the sink where it sees one. The stage says biased or
  // weights.
  __device__ void walk_for_softmax(const Stage& stage) {
    walk(stage, first_key(), range_.end, [&](std::int64_t, const Scores& scores) { add_to_softmax(scores); });
    end_softmax_of_rows(true);
  }

  // The same in two parts, of weights: over whole tiles, and over the other ones, which comes first.
  __device__ void walk_edges_for_softmax() {
    const WholeTiles whole = whole_tiles(first_key(), range_.end);
#pragma unroll 1
    for (int part = 0; part < 2; ++part) {
      walk(Stage::weights, part == 0 ? first_key() : whole.end, part == 0 ? whole.begin : range_.end,
           [&](std::int64_t, const Scores& scores) { add_to_softmax(scores); });
    }
    end_softmax_of_rows(false);
  }
  static constexpr int bounded_scores = 8;
  struct WholeSoftmax {
    bool ordinary = true;   // whether the thread's scores are finite, with room to spare for their differences
    float bound[own_rows];  // a row has so many scores at least as high
  };
  __device__ WholeSoftmax walk_whole_for_softmax() {  // with a scale that is above 0
    const WholeTiles whole = whole_tiles(first_key(), range_.end);
    WholeSoftmax result;
    Highest highest;
#pragma unroll
    for (int half = 0; half < own_rows; ++half) {
      highest.of_parts[half][0] = highest.of_parts[half][1] = -infinity<float>();
    }
    const float scale = bounded<float>(args_.scale);
    walk_whole(whole.begin, whole.end, [&](std::int64_t, const Scores& products) {
      result.ordinary = result.ordinary && are_ordinary(products);
      add_to_softmax(products, scale, highest);
    });
    end_softmax_of_rows(true);
    // Each part has one as high as the part's highest: two of each of four threads.
#pragma unroll
    for (int half = 0; half < own_rows; ++half) {
      result.bound[half] = -quad_maximum(-fminf(highest.of_parts[half][0], highest.of_parts[half][1])) * scale;
    }
    return result;
  }

  // Which of the thread's rows a score belongs to, and where they are in the tile.
  __device__ static int own_row(int slot) { return slot / 2 % 2; }
  __device__ int row_of(int own) const { return thread_.row_of(2 * own); }
  __device__ int col_of(int slot) const { return thread_.col_of(slot); }
  __device__ static float& at(Scores& scores, int slot) { return scores[slot / 4][slot % 4]; }

  // Whether products are finite, with room to spare. A sum of magnitudes that is a number says it of all, in one
  // addition each.
  __device__ static bool are_ordinary(const Scores& products) {
    float magnitudes[4] = {};
#pragma unroll
    for (int slot = 0; slot < slots; ++slot) {
      magnitudes[slot % 4] += fabsf(products[slot / 4][slot % 4]);
    }
    return (magnitudes[0] + magnitudes[1]) + (magnitudes[2] + magnitudes[3]) < 1e30f;
  }

  // A score's column is column_step(slot), which the compiler knows, after the thread's first column.
  __device__ static constexpr int column_step(int slot) { return slot / 4 * 8 + slot % 2; }
  __device__ int first_column() const { return 2 * (thread_.lane % 4); }

  // Sums down the columns over the warp's 16 rows; each lane has those of summed_column() and the next. A lane passes
  // on half of its columns in each step, and gets those of other rows for the rest.
  __device__ float2 column_sums(const float (&values)[slots]) const {
    float sums[slots / 2];
#pragma unroll
    for (int n = 0; n < slots / 2; ++n) {
      sums[n] = values[n / 2 * 4 + n % 2] + values[n / 2 * 4 + n % 2 + 2];
    }
    pass_half<8>(sums);
    pass_half<4>(sums);
    pass_half<2>(sums);
    return {sums[0], sums[1]};
  }
  __device__ int summed_column() const { return thread_.lane / 4 * 8 + first_column(); }

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
  // visit(key, products) for every tile that next_from finds; fetch(key, tile) begins to copy one.
  template <class Fetch, class NextFrom, class Visit>
  __device__ void each_product(const Fetch& fetch_tile, const NextFrom& next_from, std::int64_t begin, std::int64_t end,
                               const Visit& visit) {
    const auto fetch = [&](std::int64_t key, int into) {
      if (key < end) {
        fetch_tile(key, keys_ + into * tile_bytes);
      }
      ptx::commit_copies();
    };
    int current = 0;
    std::int64_t key = next_from(begin), next;
    if (stages > 1) {
      fetch(key, current);
    }
#pragma unroll 1
    for (; key < end; key = next) {
      next = next_from(key + mma_rows);
      if (stages == 1) {
        __syncthreads();  // the tile before has been read
        fetch(key, current);
      }
      ptx::wait_for_copies<0>();
      Product::arrived();
      __syncthreads();  // and of two stages, the other one has been read
      const unsigned char* tile = keys_ + current * tile_bytes;
      if (stages > 1) {
        current ^= 1;
        fetch(next, current);
      }
      Scores scores;
      Product::run(thread_, queries_, tile, scores);
      visit(key, scores);
    }
    ptx::wait_for_copies<0>();
    __syncthreads();
  }

  template <int count>
  __device__ void pass_half(float (&sums)[slots / 2]) const {
    constexpr int lanes = 2 * count;
    const bool upper = (thread_.lane & lanes) != 0;
#pragma unroll
    for (int n = 0; n < count; ++n) {
      const float passed = upper ? sums[n] : sums[n + count], kept = upper ? sums[n + count] : sums[n];
      sums[n] = kept + __shfl_xor_sync(0xffffffffu, passed, lanes);
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

  __device__ void end_softmax_of_rows(bool with_sink) {
    const float sink = sink_of<float>(args_, h_);
#pragma unroll
    for (int half = 0; half < own_rows; ++half) {
      RowSoftmax<float>& row = softmax_[half];
      row.total = quad_sum(row.total);
      if (with_sink) {
        end_softmax(row, sink);
      }
    }
  }

  // Results below 2^-126 are 0: beside the highest score's 1 they are nothing.
  __device__ static float vanishing_exponential(float x) { return ptx::exp2_fast(x * 1.4426950408889634f); }

  // The highest products of parts of a row's keys: of the thread's even columns and of its odd ones.
  struct Highest {
    float of_parts[own_rows][2];
  };

  // Of products, and a scale above 0 that makes them scores.
  __device__ void add_to_softmax(const Scores& products, float scale, Highest& all) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float of_parts[2] = {-infinity<float>(), -infinity<float>()};  // a NaN shows in the sum
#pragma unroll
      for (int t = 0; t < 8; ++t) {
        of_parts[0] = fmaxf(of_parts[0], products[t][2 * half]);
        of_parts[1] = fmaxf(of_parts[1], products[t][2 * half + 1]);
      }
      all.of_parts[half][0] = fmaxf(all.of_parts[half][0], of_parts[0]);
      all.of_parts[half][1] = fmaxf(all.of_parts[half][1], of_parts[1]);
      softmax_[half].raise(quad_maximum(fmaxf(of_parts[0], of_parts[1])) * scale);
      const float base = reference(softmax_[half].highest);
      float sums[2] = {};
#pragma unroll
      for (int t = 0; t < 8; ++t) {
        sums[0] += vanishing_exponential(fmaf(products[t][2 * half], scale, -base));
        sums[1] += vanishing_exponential(fmaf(products[t][2 * half + 1], scale, -base));
      }
      softmax_[half].total += sums[0] + sums[1];  // of this thread's columns, until the end
    }
  }

  __device__ void add_to_softmax(const Scores& scores) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float highest = -infinity<float>();
#pragma unroll
      for (int t = 0; t < 8; ++t) {
        highest = fmaxf(fmaxf(highest, scores[t][2 * half]), scores[t][2 * half + 1]);  // a NaN shows in the sum
      }
      softmax_[half].raise(quad_maximum(highest));
      const float base = reference(softmax_[half].highest);
      float sum = 0;
#pragma unroll
      for (int t = 0; t < 8; ++t) {
        sum +=
            vanishing_exponential(scores[t][2 * half] - base) + vanishing_exponential(scores[t][2 * half + 1] - base);
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
