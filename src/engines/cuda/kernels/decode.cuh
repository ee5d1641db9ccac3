// Few queries over many keys (decoding with a KV cache), bf16 and f16.
//
// The query rows of all heads that share a kv head form tiles of 16 rows: usually one, so that K and V are read exactly
// once; the tiles of up to 64 rows walk over the same keys side by side, and all but the first find them in L2. A block
// walks over one split of the keys, 64 at a time, three tiles in flight; each of its 4 warps has 16 of the 64
// keys, with statistics and sums of its own, which are merged at the end in the order of the warps. Splits are merged
// the same way by the blocks of a cluster, which have them all (Hopper, up to 8), or by a second, small kernel. Memory
// bounds it: 2 x 64 x D halves a step for 64 tensor core products a warp.
//
// A Feed brings the tiles: CopiedFeed here by copies of every thread, BoxedFeed (hopper_decode.cuh) by the copy engine
// of Hopper, each of keys in one tensor or in pages.
#pragma once

#include "engines/cuda/kernels/allowed_words.cuh"
#include "engines/cuda/kernels/decode_rows.cuh"

namespace headway::cuda {

// Of keys or values, in one stage.
template <int Depth>
inline constexpr int decode_tile_bytes = 2 * Depth* mma_rows;

struct DecodeTiles {
  unsigned char *keys, *values;  // [stages][decode_tile_bytes]
};

// Every thread copies 16 bytes at a time. Any layout.
template <class T, int Depth, bool Paged>
class CopiedFeed {
 public:
  static constexpr bool paged = Paged;
  static constexpr bool has_clusters = false;  // for chips without any
  static constexpr int stages = Depth == 64 ? 3 : 2;
  static constexpr int columns = Depth;  // of a tile's panel
  static constexpr int shared_bytes = 0;

  __device__ CopiedFeed(const DecodeArguments& args, const DecodeTiles& tiles, unsigned char*)
      : args_(args), tiles_(tiles) {}

  // Where a tile has a 16-byte chunk.
  __device__ static int chunk_at(int row, int chunk) { return cuda::chunk_at<Depth>(row, chunk); }

  __device__ void open(const Sequence& sequence, std::int64_t b, std::int64_t g) {
    sequence_ = sequence, b_ = b, g_ = g;
  }

  // Begins to bring a tile, if the walk does not end before it.
  __device__ void fetch(std::int64_t key, std::int64_t end, int stage) {
    if (key < end) {
      fill_tile<Depth>(key_rows<T, Paged>(args_, args_.key, sequence_, b_, g_, args_.head_dim), key,
                       tiles_.keys + stage * decode_tile_bytes<Depth>);
      fill_tile<Depth>(key_rows<T, Paged>(args_, args_.value, sequence_, b_, g_, args_.value_dim), key,
                       tiles_.values + stage * decode_tile_bytes<Depth>);
    }
    ptx::commit_copies();
  }

  // Waits for the tile that was begun `stages - 1` calls ago.
  __device__ void wait(int) {
    ptx::wait_for_copies<stages - 1>();
    __syncthreads();
  }

  __device__ void finish() { ptx::wait_for_copies<0>(); }

  // The threads wrote into tiles.
  __device__ static void written() {}

 private:
  const DecodeArguments& args_;
  DecodeTiles tiles_;
  Sequence sequence_;
  std::int64_t b_ = 0, g_ = 0;
};

template <class T, int Depth, class Feed>
class Decode : DecodeRows<T> {
  using Base = DecodeRows<T>;
  using Base::args_, Base::b_, Base::g_, Base::begin_, Base::end_, Base::first_row_, Base::sequence_, Base::range_;
  using Base::thread_, Base::row_of, Base::is_real, Base::query_of, Base::head_of_row;

 public:
  using Base::rows;
  static constexpr int tile_bytes = decode_tile_bytes<Depth>;
  static constexpr int stages = Feed::stages;
  static constexpr int tiles = Depth / 8;
  static constexpr bool keeps_queries = Depth <= 128;  // in registers, where the sums leave room for them
  static constexpr float weight_scale = std::is_same_v<T, float16> ? 32768.0f : 1.0f;

  __host__ static std::size_t shared_bytes() { return 2 * stages * tile_bytes + rows * Depth * 2 + Feed::shared_bytes; }

  __device__ Decode(const DecodeArguments& args, unsigned char* shared)
      : Base(args),
        keys_(shared),
        values_(shared + stages * tile_bytes),
        queries_(values_ + stages * tile_bytes),
        feed_(args, {keys_, values_}, queries_ + rows * Depth * 2) {}

  __device__ void run(std::int64_t b, std::int64_t g, std::int64_t split, int row_tile) {
    Base::start(b, g, split, row_tile);
    feed_.open(sequence_, b, g);
    Feed::written();
    __syncthreads();  // what shared memory held has been read
    begin_walk();     // tiles are under way while the rest is set up
    fill_queries();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_of(half);
      ranges_[half] = is_real(row) ? row_range(args_, sequence_, b, query_of(row)) : KeyRange{0, 0};
    }
#pragma unroll 1  // one copy of the code for both walks
    for (bool careful = false;; careful = true) {
      walk(careful);
      if (!__syncthreads_or(holds_nan(out_)) || careful) {
        break;
      }
      begin_walk();
    }
    merge_warps();
  }

 private:
  __device__ void fill_queries() {
    constexpr int chunks = Depth / 8;
    for (int task = static_cast<int>(threadIdx.x); task < rows * chunks; task += mma_threads) {
      const int r = task / chunks, chunk = task % chunks;
      uint4 eight{};
      if (is_real(r)) {
        const T* row =
            head_of<T>(args_.query, b_, head_of_row(r)) + (sequence_.query_begin + query_of(r)) * args_.query.row;
        eight = eight_of(row, chunk * 8);
      }
      *reinterpret_cast<uint4*>(queries_ + chunk_at<Depth>(r, chunk)) = eight;
    }
    __syncthreads();
    if constexpr (keeps_queries) {
#pragma unroll
      for (int k = 0; k < Depth / 16; ++k) {
        load_queries(k, query_[k]);
      }
    }
  }

  // Features 16 k to 16 k + 15 of all rows.
  __device__ void load_queries(int k, std::uint32_t (&query)[4]) const {
    const int chunk = chunk_at<Depth>(thread_.lane & 15, 2 * k + (thread_.lane >> 4));
    ptx::load_matrices(ptx::shared_address(queries_) + chunk, query);
  }

  // Features d to d + 7 of a query row; 0 from head_dim on.
  __device__ uint4 eight_of(const T* row, int d) const {
    if (args_.query.chunks && d + 8 <= args_.head_dim) {
      return *reinterpret_cast<const uint4*>(row + d);
    }
    std::uint16_t eight[8];
#pragma unroll
    for (int x = 0; x < 8; ++x) {
      eight[x] = d + x < args_.head_dim ? row[(d + x) * args_.query.feature].bits : std::uint16_t{0};
    }
    return make_uint4(eight[0] | eight[1] << 16, eight[2] | eight[3] << 16, eight[4] | eight[5] << 16,
                      eight[6] | eight[7] << 16);
  }

  __device__ void begin_walk() {
#pragma unroll 1
    for (int stage = 0; stage + 1 < stages; ++stage) {
      feed_.fetch(begin_ + stage * mma_rows, end_, stage);
    }
  }

  // Its first tiles are under way.
  __device__ void walk(bool careful) {
    rows_[0] = rows_[1] = {};
#pragma unroll
    for (int t = 0; t < tiles; ++t) {
      out_[t][0] = out_[t][1] = out_[t][2] = out_[t][3] = 0;
    }
    const Modifiers<float> modifiers(args_, sequence_, b_, head_of_row(0));
    const bool masked = args_.mask.data != nullptr && args_.bias.data == nullptr && args_.slopes.data == nullptr;
    int stage = 0;
    for (std::int64_t key = begin_; key < end_; key += mma_rows) {
      __syncthreads();  // the stage of the step before may be filled again, before anyone waits for this one
      feed_.fetch(key + (stages - 1) * mma_rows, end_, stage == 0 ? stages - 1 : stage - 1);
      const std::uint32_t own_word = masked ? word_of_lane(key + thread_.warp * 16) : 0;  // while the tile comes
      feed_.wait(stage);
      float scores[2][4];  // S = Q K^T  [16, 16] of this warp's keys
      multiply_keys(keys_ + stage * tile_bytes, scores);
      const std::uint32_t forbidden = weigh(modifiers, key + thread_.warp * 16, masked, own_word, scores);
      unsigned char* tile = values_ + stage * tile_bytes;
      std::uint64_t found = careful ? take_out_nonfinite<Depth, T, Feed::columns>(tile, mma_rows) : 0;
      multiply_values(tile, scores);
      found = found >> (16 * thread_.warp) & 0xFFFF;
      if (found != 0) {
        const auto values = key_rows<T, Feed::paged>(args_, args_.value, sequence_, b_, g_, args_.value_dim);
        add_nonfinite<Depth>(found, values, key + thread_.warp * 16, scores, weight_scale, forbidden, out_);
      }
      if (careful) {
        Feed::written();
      }
      stage = stage + 1 == stages ? 0 : stage + 1;
    }
    feed_.finish();
    __syncthreads();
    rows_[0].total = quad_sum(rows_[0].total);
    rows_[1].total = quad_sum(rows_[1].total);
  }

  __device__ void multiply_keys(const unsigned char* tile, float (&scores)[2][4]) const {
    const std::uint32_t base = ptx::shared_address(tile);
    const int row = thread_.warp * 16 + (thread_.lane & 7) + (thread_.lane >> 4) * 8, chunk = thread_.lane >> 3 & 1;
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      scores[0][x] = scores[1][x] = 0;
    }
    constexpr int together = Depth == 256 ? 4 : Depth / 16;  // steps whose loads take registers at once
#pragma unroll together
    for (int k = 0; k < Depth / 16; ++k) {
      std::uint32_t a[4], b[4];
      if constexpr (keeps_queries) {
#pragma unroll
        for (int x = 0; x < 4; ++x) {
          a[x] = query_[k][x];
        }
      } else {
        load_queries(k, a);
      }
      ptx::load_matrices(base + Feed::chunk_at(row, 2 * k + chunk), b);
      ptx::multiply_add<T>(scores[0], a, b[0], b[1]);
      ptx::multiply_add<T>(scores[1], a, b[2], b[3]);
    }
  }

  // O += P V  [16, Dv] over this warp's 16 keys
  __device__ void multiply_values(const unsigned char* tile, const float (&p)[2][4]) {
    const std::uint32_t base = ptx::shared_address(tile);
    const int row = thread_.warp * 16 + (thread_.lane & 15), chunk = thread_.lane >> 4;
    constexpr float scale = weight_scale;
    const std::uint32_t a[4] = {
        ptx::packed_pair<T>(p[0][0] * scale, p[0][1] * scale), ptx::packed_pair<T>(p[0][2] * scale, p[0][3] * scale),
        ptx::packed_pair<T>(p[1][0] * scale, p[1][1] * scale), ptx::packed_pair<T>(p[1][2] * scale, p[1][3] * scale)};
#pragma unroll
    for (int t = 0; t < tiles; t += 2) {
      std::uint32_t b[4];
      ptx::load_matrices_transposed(base + Feed::chunk_at(row, t + chunk), b);
      ptx::multiply_add<T>(out_[t], a, b[0], b[1]);
      ptx::multiply_add<T>(out_[t + 1], a, b[2], b[3]);
    }
  }

  // Scores become weights relative to the row's highest score so far; returns the forbidden ones. A thread's total is
  // that of its own columns until the end.
  __device__ std::uint32_t weigh(const Modifiers<float>& modifiers, std::int64_t key, bool masked,
                                 std::uint32_t own_word, float (&scores)[2][4]) {
    const std::uint32_t forbidden = masked                   ? mask_rows(modifiers, key, own_word, scores)
                                    : has_matrix_or_slopes() ? modify_rows(key, scores)
                                                             : modify_alike(modifiers, key, scores);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float highest = higher(higher(scores[0][2 * half], scores[0][2 * half + 1]),
                                   higher(scores[1][2 * half], scores[1][2 * half + 1]));
      const float factor = rows_[half].raise(quad_maximum(highest == highest ? highest : -infinity<float>()));
      const float base = reference(rows_[half].highest);
#pragma unroll
      for (int slot = 0; slot < 4; ++slot) {
        float& score = scores[slot / 2][2 * half + slot % 2];
        score = exponential(score - base);
        rows_[half].total += score;
      }
      if (factor != 1.0f) {
#pragma unroll
        for (int t = 0; t < tiles; ++t) {
          out_[t][2 * half] *= factor;
          out_[t][2 * half + 1] *= factor;
        }
      }
    }
    return forbidden;
  }

  __device__ bool has_matrix_or_slopes() const {
    return args_.mask.data != nullptr || args_.bias.data != nullptr || args_.slopes.data != nullptr;
  }

  __device__ std::int64_t key_of(std::int64_t first, int slot) const {
    return first + slot / 4 * 8 + 2 * (thread_.lane % 4) + slot % 2;
  }

  // Products become scores, -inf where forbidden; returns those. What changes them is the same for all heads.
  __device__ std::uint32_t modify_alike(const Modifiers<float>& modifiers, std::int64_t key, float (&scores)[2][4]) {
    std::uint32_t forbidden = 0;
#pragma unroll
    for (int slot = 0; slot < 8; ++slot) {
      scores[slot / 4][slot % 4] = modifiers.scaled(scores[slot / 4][slot % 4]);
    }
    if (args_.softcap != 0) {
#pragma unroll
      for (int slot = 0; slot < 8; ++slot) {
        scores[slot / 4][slot % 4] = modifiers.capped(scores[slot / 4][slot % 4]);
      }
    }
    if (key < range_.full_begin || key + 16 > range_.full_end) {
#pragma unroll
      for (int slot = 0; slot < 8; ++slot) {
        const std::int64_t j = key_of(key, slot);
        const KeyRange& range = ranges_[slot / 2 % 2];
        const bool inside = j >= range.begin && j < range.end;
        scores[slot / 4][slot % 4] = inside ? scores[slot / 4][slot % 4] : -infinity<float>();
        forbidden |= std::uint32_t{!inside} << slot;
      }
    }
    return forbidden;
  }

  // Of row lane % 16: bits of the 16 keys from `key` on, those that the mask allows.
  __device__ std::uint32_t word_of_lane(std::int64_t key) const {
    const int row = thread_.lane % rows;
    if (!is_real(row)) {
      return 0;
    }
    return MaskRow(args_.mask, b_, head_of_row(row), query_of(row), sequence_.key_count)
        .template of<16>(key, range_bits(range_.begin, range_.end, key) & 0xFFFFu);
  }

  // The same under a mask alone, whose bits the lanes have.
  __device__ std::uint32_t mask_rows(const Modifiers<float>& modifiers, std::int64_t key, std::uint32_t own_word,
                                     float (&scores)[2][4]) {
    std::uint32_t forbidden = modify_alike(modifiers, key, scores);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::uint32_t word = __shfl_sync(~0u, own_word, row_of(half)) >> (2 * (thread_.lane % 4));
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const int slot = x / 2 * 4 + 2 * half + x % 2;
        forbidden |= (~word >> (x / 2 * 8 + x % 2) & 1) << slot;
        float& score = scores[slot / 4][slot % 4];
        score = (forbidden >> slot & 1) != 0 ? -infinity<float>() : modifiers.of_allowed(score);
      }
    }
    return forbidden;
  }

  // The same where each head has a bias or slope of its own.
  __device__ std::uint32_t modify_rows(std::int64_t key, float (&scores)[2][4]) {
    std::uint32_t forbidden = 0;
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      const int row = row_of(half);
      float four[4] = {};
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        four[x] = half == 0 ? scores[x / 2][x % 2] : scores[x / 2][2 + x % 2];
      }
      if (is_real(row)) {
        const KeyRange range = half == 0 ? ranges_[0] : ranges_[1];
        const std::int64_t i = query_of(row);
        Modifiers<float>(args_, sequence_, b_, head_of_row(row)).apply(four, [&](int x) {
          const std::int64_t j = key_of(key, x / 2 * 4 + x % 2);
          return Pair{i, j, j >= range.begin && j < range.end};
        });
      } else {
        four[0] = four[1] = four[2] = four[3] = -infinity<float>();
      }
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        (half == 0 ? scores[x / 2][x % 2] : scores[x / 2][2 + x % 2]) = four[x];
        forbidden |= std::uint32_t{four[x] == -infinity<float>()} << (x / 2 * 4 + 2 * half + x % 2);
      }
    }
    return forbidden;
  }

  // The warps' sums and statistics go through shared memory; each thread then closes some (row, feature)s.
  __device__ void merge_warps() {
    float* sums = reinterpret_cast<float*>(keys_);                      // [4][16][Depth]
    auto* statistics = reinterpret_cast<RowSoftmax<float>*>(queries_);  // [4][16]
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = thread_.warp * rows + row_of(half);
      if (!is_real(row_of(half))) {
        continue;
      }
      if (thread_.lane % 4 == 0) {
        statistics[at] = rows_[half];
      }
#pragma unroll
      for (int t = 0; t < tiles; ++t) {
        *reinterpret_cast<float2*>(sums + at * Depth + t * 8 + 2 * (thread_.lane % 4)) = {out_[t][2 * half],
                                                                                          out_[t][2 * half + 1]};
      }
    }
    __syncthreads();
    if constexpr (Feed::has_clusters) {
      if (args_.cluster > 1) {
        this->template close_rows_of_cluster<Depth>(sums, statistics, 1 / weight_scale);
        return;
      }
    }
    this->template close_rows<Depth>(sums, statistics, 1 / weight_scale);
  }

  unsigned char *keys_, *values_, *queries_;
  Feed feed_;
  KeyRange ranges_[2];
  std::uint32_t query_[keeps_queries ? Depth / 16 : 1][4];
  RowSoftmax<float> rows_[2];
  float out_[Depth / 8][4];
};

// Blocks of one multiprocessor.
template <int Depth>
inline constexpr int decode_blocks = Depth == 256 ? 1 : 2;

template <class T, int Depth, bool Paged>
__global__ void __launch_bounds__(mma_threads, decode_blocks<Depth>)
    decode(const __grid_constant__ DecodeArguments arguments) {
  extern __shared__ __align__(16) unsigned char shared[];
  decode_all<Decode<T, Depth, CopiedFeed<T, Depth, Paged>>>(arguments, shared);
}

}  // namespace headway::cuda
