// Few queries over 8-bit pages, bf16 and f16 queries, on tensor cores.
//
// Blocks, splits and warps are those of decode.cuh. Elements stay 8 bits up to the registers: both formats are exact in
// f16, which every product takes, so that the scales of a row can multiply its score (keys) and its weight (values)
// afterwards. Half the bytes of decode.cuh move, and they bound it as long as converting keeps up: a lane reads 16
// features of a key, or 4 keys of 4 features, in words and needs about 5 instructions for 4 elements.
//
// - Queries: a row is multiplied by a power of two that brings its largest number near 2^14; f16 then loses only what
//   is 2^-28 of that.
// - Weights: a value's scale belongs to its weight, exp(score) * scale = exp(score + log |scale|), and the sums have a
//   reference of their own, the highest such exponent, so that no scale is too large or small for f16.
// - Products take features and keys in the order in which lanes find them in memory: feature_of_slot for queries and
//   keys, and column d of the output, which 4 lanes hold (feature_of_column).
// - NaN: an element that is one (f8e4m3 alone has them), a scale that is infinite, and sums that overflow leave a NaN
// in
//   the row's statistics, and plain_again.cuh does the row again.
#pragma once

#include "engines/cuda/kernels/decode_rows.cuh"
#include "engines/cuda/kernels/page_entry.cuh"

namespace headway::cuda {

// Four 8-bit elements of a word as two pairs of halves. Of f8e4m3 they are 2^-8 of themselves.
template <class Stored>
struct ByteWord;

template <>
struct ByteWord<std::int8_t> {
  static constexpr float unit = 1.0f;

  // 1024 + 128 + x, less 1152: exact.
  __device__ static std::uint32_t biased(std::uint32_t word) { return word ^ 0x80808080u; }
  // The bytes `low` and `low + 1` of a biased word.
  template <int low>
  __device__ static std::uint32_t pair(std::uint32_t word) {
    const std::uint32_t sums = __byte_perm(word, 0x64646464u, low == 0 ? 0x4140 : 0x4342);
    std::uint32_t result;
    asm("sub.f16x2 %0, %1, %2;" : "=r"(result) : "r"(sums), "r"(0x64806480u));
    return result;
  }
  __device__ static std::uint32_t nan_bits(std::uint32_t) { return 0; }
};

template <>
struct ByteWord<float8_e4m3> {
  static constexpr float unit = 256.0f;

  __device__ static std::uint32_t biased(std::uint32_t word) { return word; }
  template <int low>
  __device__ static std::uint32_t pair(std::uint32_t word) {
    const std::uint32_t high_bytes = __byte_perm(word, 0u, low == 0 ? 0x1404 : 0x3424);
    return (high_bytes & 0x80008000u) | (high_bytes & 0x7F007F00u) >> 1;
  }
  __device__ static std::uint32_t nan_bits(std::uint32_t word) {
    return ((word & 0x7F7F7F7Fu) + 0x01010101u) & 0x80808080u;
  }
};

template <class T, int Depth, class Stored>
class ByteDecode : DecodeRows<T, Stored> {
  using Base = DecodeRows<T, Stored>;
  using Base::args_, Base::b_, Base::g_, Base::begin_, Base::end_, Base::first_row_, Base::sequence_, Base::range_;
  using Base::thread_, Base::row_of, Base::is_real, Base::query_of, Base::head_of_row;
  using Word = ByteWord<Stored>;

 public:
  using Base::rows;
  static constexpr int tile_bytes = mma_rows * Depth;
  static constexpr int scale_bytes = 2 * mma_rows * static_cast<int>(sizeof(float));
  static constexpr int stage_bytes = 2 * tile_bytes + scale_bytes;
  static constexpr int stages = 4;
  static constexpr int tiles = Depth / 8;
  static constexpr float weight_scale = 32768.0f;
  // The sums of the warps, which take the stages' place at the end.
  static constexpr int sum_bytes = 4 * rows * Depth * static_cast<int>(sizeof(float));
  static_assert(sum_bytes <= stages * stage_bytes);

  __host__ static std::size_t shared_bytes() { return stages * stage_bytes + rows * Depth * 2; }

  __device__ ByteDecode(const DecodeArguments& args, unsigned char* shared)
      : Base(args), shared_(shared), queries_(shared + stages * stage_bytes) {}

  __device__ void run(std::int64_t b, std::int64_t g, std::int64_t split, int row_tile) {
    Base::start(b, g, split, row_tile);
    __syncthreads();  // what shared memory held has been read
#pragma unroll 1
    for (int stage = 0; stage + 1 < stages; ++stage) {
      fetch(begin_ + stage * mma_rows, stage);
    }
    fill_queries();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_of(half);
      ranges_[half] = is_real(row) ? row_range(args_, sequence_, b, query_of(row)) : KeyRange{0, 0};
    }
    walk();
    merge_warps();
  }

 private:
  // ---- Tiles ----

  __device__ unsigned char* keys(int stage) const { return shared_ + stage * stage_bytes; }
  __device__ unsigned char* values(int stage) const { return keys(stage) + tile_bytes; }
  __device__ float* scales(int stage) const { return reinterpret_cast<float*>(values(stage) + tile_bytes); }

  // Byte offset of a 16-byte chunk: such that a quarter of a warp finds two rows, and a warp four even ones, in
  // different banks (of 64 features: nearly).
  __device__ static int chunk_at(int row, int chunk) {
    const int turn = Depth == 64 ? row >> 1 & 3 : (row & 1) << 2 | (row >> 1 & 3);
    return row * Depth + ((chunk ^ turn) << 4);
  }

  // Begins to copy a tile, if the walk does not end before it. Rows behind the last key become 0, and so do their
  // scales.
  __device__ void fetch(std::int64_t first, int stage) {
    if (first < end_) {
      constexpr int chunks = Depth / 16, step = mma_threads / chunks;
      const auto key = static_cast<int>(first), count = static_cast<int>(sequence_.key_count);
      const int thread = static_cast<int>(threadIdx.x), chunk = thread % chunks, r = thread / chunks;
      const int key_whole = whole(args_.head_dim, chunk), value_whole = whole(args_.value_dim, chunk);
      const auto* key_rows = head_of<Stored>(args_.key, 0, g_);
      const auto* value_rows = head_of<Stored>(args_.value, 0, g_);
      const PageEntries entries(args_.pages, b_);
      // Looked up together, before the first is used.
      int pages[mma_rows / step];
#pragma unroll
      for (int x = 0; x < mma_rows / step; ++x) {
        pages[x] = entries.load(min(key + r + x * step, count - 1));
      }
      const int scaled_key = min(key + thread % mma_rows, count - 1), scale_page = entries.load(scaled_key);
#pragma unroll
      for (int x = 0; x < mma_rows / step; ++x) {
        const int row = r + x * step, to = chunk_at(row, chunk);
        const bool any = key + row < count;
        const PageSlot at{entries.inside(pages[x]), any ? entries.slot_of(key + row) : 0};
        copy(keys(stage) + to, key_rows, args_.key, at, chunk, any ? key_whole : 0);
        copy(values(stage) + to, value_rows, args_.value, at, chunk, any ? value_whole : 0);
      }
      const PageScales& of = thread < mma_rows ? args_.pages.key_scales : args_.pages.value_scales;
      const float* from = of.data + std::int64_t{entries.inside(scale_page)} * of.page + g_ * of.head +
                          entries.slot_of(scaled_key) * of.slot;
      ptx::copy_word(ptx::shared_address(scales(stage) + thread), from, key + thread % mma_rows < count ? 4 : 0);
    }
    ptx::commit_copies();
  }

  // Bytes of a chunk that a row has.
  __device__ static int whole(std::int64_t width, int chunk) {
    const std::int64_t left = width - chunk * 16;
    return left <= 0 ? 0 : left < 16 ? static_cast<int>(left) : 16;
  }
  __device__ static void copy(unsigned char* to, const Stored* rows, const Rows& view, const PageSlot& at, int chunk,
                              int bytes) {
    const Stored* from = rows + at.page * view.batch + at.slot * view.row + chunk * 16;
    ptx::copy_16(ptx::shared_address(to), bytes > 0 ? from : rows, bytes);
  }

  // ---- Queries ----

  // [16][Depth] halves, each row times a power of two; row_units() undoes it.
  __device__ void fill_queries() {
    constexpr int lanes = mma_threads / rows, each = Depth / lanes;
    const int r = static_cast<int>(threadIdx.x) / lanes, first = static_cast<int>(threadIdx.x) % lanes * each;
    const bool real = is_real(r);
    const T* row = head_of<T>(args_.query, b_, real ? head_of_row(r) : 0) +
                   (real ? sequence_.query_begin + query_of(r) : 0) * args_.query.row;
    float numbers[each], largest = 0;
#pragma unroll
    for (int x = 0; x < each; ++x) {
      numbers[x] = real && first + x < args_.head_dim ? number<float>(row[(first + x) * args_.query.feature]) : 0.0f;
      largest = fmaxf(largest, fabsf(numbers[x]));
    }
#pragma unroll
    for (int other = lanes / 2; other > 0; other /= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, other));
    }
    // The exponent of the largest; of 0, tiny and infinite rows one that keeps the factor in range.
    const int exponent = static_cast<int>(__float_as_uint(largest) >> 23) - 127;
    const int power = 14 - min(max(exponent, -100), 120);
    const float factor = __uint_as_float(static_cast<std::uint32_t>(127 + power) << 23);
    if (first == 0) {
      row_units()[r] = __uint_as_float(static_cast<std::uint32_t>(127 - power) << 23) * Word::unit;
    }
    auto* halves = reinterpret_cast<std::uint32_t*>(queries_) + (r * Depth + first) / 2;
#pragma unroll
    for (int x = 0; x < each; x += 2) {
      halves[x / 2] = ptx::packed_pair<float16>(numbers[x] * factor, numbers[x + 1] * factor);
    }
    __syncthreads();
    // Slots 2t and 2t + 1, and those 8 further on, of step 4m + w are features 64m + 16t + 4w to + 3.
#pragma unroll
    for (int k = 0; k < Depth / 16; ++k) {
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const int row_here = row_of(x & 1), feature = k / 4 * 64 + thread_.lane % 4 * 16 + k % 4 * 4 + (x >> 1) * 2;
        query_[k][x] = reinterpret_cast<const std::uint32_t*>(queries_)[(row_here * Depth + feature) / 2];
      }
    }
    units_[0] = row_units()[row_of(0)] * bounded<float>(args_.scale);
    units_[1] = row_units()[row_of(1)] * bounded<float>(args_.scale);
  }

  __device__ static float* row_units() {
    __shared__ float units[rows];
    return units;
  }

  // ---- The walk ----

  __device__ void walk() {
    rows_[0] = rows_[1] = {};
    value_reference_[0] = value_reference_[1] = -infinity<float>();
    nan_bits_ = 0;
#pragma unroll
    for (int t = 0; t < tiles; ++t) {
      out_[t][0] = out_[t][1] = out_[t][2] = out_[t][3] = 0;
    }
    const Modifiers<float> modifiers(args_, sequence_, b_, head_of_row(0));
    int stage = 0;
#pragma unroll 1
    for (std::int64_t key = begin_; key < end_; key += mma_rows) {
      __syncthreads();  // the stage of the step before may be filled again
      fetch(key + (stages - 1) * mma_rows, stage == 0 ? stages - 1 : stage - 1);
      ptx::wait_for_copies<stages - 1>();
      __syncthreads();
      float scores[2][4];  // S = Q K^T  [16, 16] of this warp's keys
      multiply_keys(keys(stage), scores);
      weigh(modifiers, key + thread_.warp * 16, scales(stage) + thread_.warp * 16, scores);
      multiply_values(values(stage), scores);
      stage = stage + 1 == stages ? 0 : stage + 1;
    }
    ptx::wait_for_copies<0>();
    const bool nan = __syncthreads_or(nan_bits_ != 0) != 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      RowSoftmax<float>& row = rows_[half];
      row.total = quad_sum(row.total);
      if (nan || value_reference_[half] > Limits<float>::highest) {
        row.total = infinity<float>() - infinity<float>();
      }
      // Relative to the highest score from here on.
      const float factor = exponential_of(value_reference_[half] - reference(row.highest));
#pragma unroll
      for (int t = 0; t < tiles; ++t) {
        out_[t][2 * half] *= factor;
        out_[t][2 * half + 1] *= factor;
      }
    }
  }

  // For numbers above 0 too.
  __device__ static float exponential_of(float x) { return expf(x); }

  __device__ void multiply_keys(const unsigned char* tile, float (&scores)[2][4]) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      scores[j][0] = scores[j][1] = scores[j][2] = scores[j][3] = 0;
      const int row = thread_.warp * 16 + j * 8 + thread_.lane / 4;
#pragma unroll
      for (int m = 0; m < Depth / 64; ++m) {
        const uint4 raw = *reinterpret_cast<const uint4*>(tile + chunk_at(row, 4 * m + thread_.lane % 4));
        const std::uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          nan_bits_ |= Word::nan_bits(words[w]);
          const std::uint32_t word = Word::biased(words[w]);
          ptx::multiply_add<float16>(scores[j], query_[4 * m + w], Word::template pair<0>(word),
                                     Word::template pair<2>(word));
        }
      }
    }
  }

  // Products become weights times the values' scales, relative to the row's highest such weight so far; totals are
  // those of the weights alone. `scales` of this warp's keys, those of values 64 further on.
  __device__ void weigh(const Modifiers<float>& modifiers, std::int64_t key, const float* scales,
                        float (&scores)[2][4]) {
    const bool inside = key >= range_.full_begin && key + 16 <= range_.full_end;
    float exponents[2][4], value_scales[2][2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        const int column = j * 8 + 2 * (thread_.lane % 4) + x;
        const float key_scale = scales[column];
        value_scales[j][x] = scales[mma_rows + column];
        const float log_scale = logarithm_of(value_scales[j][x]);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float& score = scores[j][2 * half + x];
          score = score * units_[half] * key_scale;
          if (args_.softcap != 0) {
            score = modifiers.capped(score);
          }
          if (!inside) {
            const std::int64_t at = key + column;
            score = at >= ranges_[half].begin && at < ranges_[half].end ? score : -infinity<float>();
          }
          exponents[j][2 * half + x] = score == -infinity<float>() ? score : score + log_scale;
        }
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto highest_of = [&](const float(&four)[2][4]) {
        const float highest =
            higher(higher(four[0][2 * half], four[0][2 * half + 1]), higher(four[1][2 * half], four[1][2 * half + 1]));
        return quad_maximum(highest == highest ? highest : -infinity<float>());
      };
      rows_[half].raise(highest_of(scores));
      const float base = reference(rows_[half].highest);
      const float before = value_reference_[half];
      value_reference_[half] = higher(before, highest_of(exponents));
      const float value_base = reference(value_reference_[half]);
#pragma unroll
      for (int slot = 0; slot < 4; ++slot) {
        float& score = scores[slot / 2][2 * half + slot % 2];
        rows_[half].total += power_of(score - base);
        const float weight = power_of(exponents[slot / 2][2 * half + slot % 2] - value_base);
        score = copysignf(weight, value_scales[slot / 2][slot % 2]);
      }
      if (before != value_reference_[half]) {
        const float factor = exponential(before - value_base);
#pragma unroll
        for (int t = 0; t < tiles; ++t) {
          out_[t][2 * half] *= factor;
          out_[t][2 * half + 1] *= factor;
        }
      }
    }
  }

  // exp and log of a size in one or two instructions, to about 2^-22: nothing that half outputs show.
  __device__ static float power_of(float x) {
    float result;
    asm("ex2.approx.f32 %0, %1;" : "=f"(result) : "f"(x * 1.4426950408889634f));
    return result;
  }
  __device__ static float logarithm_of(float x) {
    float result;
    asm("lg2.approx.f32 %0, %1;" : "=f"(result) : "f"(fabsf(x)));
    return result * 0.6931471805599453f;
  }

  // O += P V  [16, Dv] over this warp's 16 keys. Column n of tile 4G + j is feature 32G + 4n + j.
  __device__ void multiply_values(const unsigned char* tile, const float (&p)[2][4]) {
    constexpr float scale = weight_scale;
    const std::uint32_t a[4] = {ptx::packed_pair<float16>(p[0][0] * scale, p[0][1] * scale),
                                ptx::packed_pair<float16>(p[0][2] * scale, p[0][3] * scale),
                                ptx::packed_pair<float16>(p[1][0] * scale, p[1][1] * scale),
                                ptx::packed_pair<float16>(p[1][2] * scale, p[1][3] * scale)};
    const int row = thread_.warp * 16 + 2 * (thread_.lane % 4), chunk = thread_.lane >> 4, word = thread_.lane / 4 % 4;
#pragma unroll
    for (int group = 0; group < Depth / 32; ++group) {
      std::uint32_t words[4];  // of keys 2t, 2t + 1, 2t + 8 and 2t + 9
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const int key = row + x % 2 + x / 2 * 8;
        const auto* from = reinterpret_cast<const std::uint32_t*>(tile + chunk_at(key, 2 * group + chunk));
        words[x] = from[word];
        nan_bits_ |= Word::nan_bits(words[x]);
        words[x] = Word::biased(words[x]);
      }
      // The bytes of two keys side by side: those of features 0 and 1, and of 2 and 3.
      const std::uint32_t low[2] = {__byte_perm(words[0], words[1], 0x5140), __byte_perm(words[2], words[3], 0x5140)};
      const std::uint32_t high[2] = {__byte_perm(words[0], words[1], 0x7362), __byte_perm(words[2], words[3], 0x7362)};
      float(*out)[4] = out_ + 4 * group;
      ptx::multiply_add<float16>(out[0], a, Word::template pair<0>(low[0]), Word::template pair<0>(low[1]));
      ptx::multiply_add<float16>(out[1], a, Word::template pair<2>(low[0]), Word::template pair<2>(low[1]));
      ptx::multiply_add<float16>(out[2], a, Word::template pair<0>(high[0]), Word::template pair<0>(high[1]));
      ptx::multiply_add<float16>(out[3], a, Word::template pair<2>(high[0]), Word::template pair<2>(high[1]));
    }
  }

  __device__ void merge_warps() {
    float* sums = reinterpret_cast<float*>(shared_);                    // [4][16][Depth]
    auto* statistics = reinterpret_cast<RowSoftmax<float>*>(queries_);  // [4][16]
    __syncthreads();
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
        const int feature = t / 4 * 32 + thread_.lane % 4 * 8 + t % 4;
        sums[at * Depth + feature] = out_[t][2 * half];
        sums[at * Depth + feature + 4] = out_[t][2 * half + 1];
      }
    }
    __syncthreads();
    this->template close_rows<Depth>(sums, statistics, Word::unit / weight_scale);
  }

  unsigned char *shared_, *queries_;
  KeyRange ranges_[2];
  float units_[2];  // what undoes the queries' factors, times the scale
  std::uint32_t query_[Depth / 16][4];
  std::uint32_t nan_bits_ = 0;
  RowSoftmax<float> rows_[2];
  float value_reference_[2];  // the highest score + log |scale|
  float out_[Depth / 8][4];
};

// Blocks of one multiprocessor: converting takes more warps than copying.
template <int Depth>
inline constexpr int byte_decode_blocks = Depth == 256   ? 1
                                          : Depth == 128 ? 3
                                                         : 4;

template <class T, int Depth, class Stored>
__global__ void __launch_bounds__(mma_threads, byte_decode_blocks<Depth>)
    byte_decode(const __grid_constant__ DecodeArguments arguments) {
  extern __shared__ __align__(16) unsigned char shared[];
  decode_all<ByteDecode<T, Depth, Stored>>(arguments, shared);
}

}  // namespace headway::cuda
