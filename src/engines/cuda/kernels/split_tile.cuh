// Products of f32 numbers on tensor cores, each number as the sum of three bf16 parts.
//
// x = h + m + l, with h = bf16(x), m = bf16(x - h), l = x - h - m: 8 bits each and the signs make up all 24, so nothing
// is lost. Of the nine products of two such sums six are computed, hh hm mh hl lh mm. What is left out, ml lm ll, is
// below 2^-23 of the product and has either sign (parts are rounded, not cut).
//
// Tensor cores cut what they add: terms to 24 or 25 bits below the largest one, and each sum to 24. Sums of hh would
// drift, so in scores every 16 terms of them begin at 0, and the results are added by ordinary f32 additions: a score
// may be off by a few 2^-24 of its terms. Sums over the other side's rows may be off by 64 of them, so these begin at 0
// with every step of 32 rows, of which 2^-22 is cut. The other five kinds are 2^-8 as large, and what is cut of them
// 2^-31: they are added up inside.
//
// Which numbers may be split: a part below 2^-133 has no bf16, so that numbers below 2^-110 lose bits, and products of
// large ones overflow. So what lies outside of given limits, infinities and NaN are taken out of a tile when it is
// split (0 takes their place), and their rows are marked. The kernel computes what they take part in by f32 arithmetic
// and leaves all other results as they are. In particular no infinity becomes a part: inf - inf, and inf times a part
// that is 0, would be NaN.
//
// A tile is three planes of [rows][Depth] halves, swizzled as in mma_tile.cuh.
#pragma once

#include "engines/cuda/kernels/mma_tile.cuh"
#include "engines/cuda/kernels/plain_rows.cuh"
#include "engines/cuda/kernels/simt_tile.cuh"

namespace headway::cuda {

constexpr int split_parts = 3;

// Sizes that may be split, and 0. Of factors of a score an error of 2^-126 is nothing, as long as the others are at
// most 2^40 and the scale 2^32. Terms of sums keep all bits down to 2^-100; with weights of up to 2^24, and ten million
// terms, the largest sums stay below 2^110. In a backward rows are both.
struct SplitLimits {
  float least, most;
};
constexpr SplitLimits score_limits{0.0f, 0x1p40f}, sum_limits{0x1p-100f, 0x1p60f}, backward_limits{0x1p-100f, 0x1p40f};

template <SplitLimits limits>
__device__ inline bool fits(float x) {
  const float size = fabsf(x);
  return size <= limits.most && (limits.least == 0 || size >= limits.least || size == 0);
}

// Two numbers as packed pairs of parts, the first in the low halves.
__device__ inline void split_pair(float low, float high, std::uint32_t (&parts)[split_parts]) {
#pragma unroll
  for (int part = 0; part < split_parts; ++part) {
    parts[part] = ptx::packed_pair<bfloat16>(low, high);
    if (part + 1 < split_parts) {
      const float2 taken = ptx::unpacked_pair<bfloat16>(parts[part]);
      low -= taken.x, high -= taken.y;
    }
  }
}

// Takes out of eight numbers of row r, and marks, what may not be split.
template <SplitLimits limits>
__device__ inline void take_out(float (&eight)[8], int r, std::uint32_t* marked) {
  bool all = true;
#pragma unroll
  for (int x = 0; x < 8; ++x) {
    all &= fits<limits>(eight[x]);
  }
  if (!all) {
    atomicOr(marked, 1u << r);
#pragma unroll
    for (int x = 0; x < 8; ++x) {
      eight[x] = fits<limits>(eight[x]) ? eight[x] : 0.0f;
    }
  }
}

// Splits staged [Rows][Depth], of which `Width` features count, into rows [first, first + Rows) of the planes of a tile
// of PlaneRows rows, by all threads of a block. Bit r of `marked` is set where staged row r lost a number.
template <class Products, int Threads, int Rows, int Depth, SplitLimits limits, int PlaneRows = Rows, int Width = Depth>
__device__ inline void split_rows(const float* staged, unsigned char* planes, int first, std::uint32_t* marked) {
  static_assert(Rows <= 32);
  constexpr int chunks = Width / 8, plane = PlaneRows * Depth * 2;
#pragma unroll
  for (int begin = 0; begin < Rows * chunks; begin += Threads) {
    const int task = begin + static_cast<int>(threadIdx.x);
    if (Rows * chunks % Threads != 0 && task >= Rows * chunks) {
      break;
    }
    const int r = task / chunks, chunk = task % chunks;
    float eight[8];
    load_four(staged + r * Depth + chunk * 8, eight);
    load_four(staged + r * Depth + chunk * 8 + 4, eight + 4);
    take_out<limits>(eight, r, marked);
    std::uint32_t pairs[4][split_parts];
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      split_pair(eight[2 * x], eight[2 * x + 1], pairs[x]);
    }
    unsigned char* to = planes + Products::template place<PlaneRows, Depth>(first + r, chunk);
#pragma unroll
    for (int part = 0; part < split_parts; ++part) {
      *reinterpret_cast<uint4*>(to + part * plane) =
          make_uint4(pairs[0][part], pairs[1][part], pairs[2][part], pairs[3][part]);
    }
  }
}

// The five small kinds of products: the parts of a and of b.
constexpr int small_kinds = 5;
__device__ constexpr int part_of_a(int kind) { return kind == 1 || kind == 4 ? 1 : kind == 3 ? 2 : 0; }
__device__ constexpr int part_of_b(int kind) { return kind == 0 || kind == 4 ? 1 : kind == 2 ? 2 : 0; }

// The other kinds to small[t], for a step of 16 terms and Tiles tiles of 8 columns. b[part][t / 2] has the operands of
// two tiles. Fewer tiles have more chains, since a product waits for the one before it in its own.
template <int Tiles, int Chains>
__device__ inline void add_small_products(const std::uint32_t (&a)[split_parts][4],
                                          const std::uint32_t (&b)[split_parts][Tiles / 2][4],
                                          float (&small)[Chains][Tiles][4]) {
#pragma unroll
  for (int kind = 0; kind < small_kinds; ++kind) {
#pragma unroll
    for (int t = 0; t < Tiles; ++t) {
      const std::uint32_t(&pair)[4] = b[part_of_b(kind)][t / 2];
      ptx::multiply_add<bfloat16>(small[kind % Chains][t], a[part_of_a(kind)], pair[t % 2 * 2], pair[t % 2 * 2 + 1]);
    }
  }
}

// big[t] += hh, and the other kinds to small[t].
template <int Tiles, int Chains>
__device__ inline void add_split_products(const std::uint32_t (&a)[split_parts][4],
                                          const std::uint32_t (&b)[split_parts][Tiles / 2][4], float (&big)[Tiles][4],
                                          float (&small)[Chains][Tiles][4]) {
  float ones[Tiles][4];
#pragma unroll
  for (int t = 0; t < Tiles; ++t) {
    ptx::multiply(ones[t], a[0], b[0][t / 2][t % 2 * 2], b[0][t / 2][t % 2 * 2 + 1]);
  }
  add_small_products<Tiles, Chains>(a, b, small);
#pragma unroll
  for (int t = 0; t < Tiles; ++t) {
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      big[t][x] += ones[t][x];
    }
  }
}

template <int Tiles, int Chains>
__device__ inline void add_small(const float (&small)[Chains][Tiles][4], float (&big)[Tiles][4]) {
#pragma unroll
  for (int t = 0; t < Tiles; ++t) {
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      float sum = small[0][t][x];
#pragma unroll
      for (int chain = 1; chain < Chains; ++chain) {
        sum += small[chain][t][x];
      }
      big[t][x] += sum;
    }
  }
}

// c = own[16 rows of this warp] other[8 Tiles rows]^T over features [from, to), `from` a multiple of 16. Planes of
// `own` and `other` lie so many bytes apart.
template <int Depth, int Tiles>
__device__ inline void multiply_split_rows(const MmaThread& thread, const unsigned char* own, int own_plane,
                                           const unsigned char* other, int other_plane, int from, int to,
                                           float (&c)[Tiles][4]) {
  constexpr int chains = Tiles < 4 ? 2 : 1;
  const std::uint32_t a_base = ptx::shared_address(own), b_base = ptx::shared_address(other);
  float small[chains][Tiles][4];
#pragma unroll
  for (int t = 0; t < Tiles; ++t) {
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      c[t][x] = 0;
#pragma unroll
      for (int chain = 0; chain < chains; ++chain) {
        small[chain][t][x] = 0;
      }
    }
  }
  const int a_row = thread.warp * 16 + (thread.lane & 15), a_chunk = thread.lane >> 4;
  const int b_row = (thread.lane & 7) + (thread.lane >> 4) * 8, b_chunk = thread.lane >> 3 & 1;
#pragma unroll 2
  for (int k = from; k < to; k += 16) {
    std::uint32_t a[split_parts][4], b[split_parts][Tiles / 2][4];
#pragma unroll
    for (int part = 0; part < split_parts; ++part) {
      ptx::load_matrices(a_base + part * own_plane + chunk_at<Depth>(a_row, k / 8 + a_chunk), a[part]);
#pragma unroll
      for (int t = 0; t < Tiles; t += 2) {
        ptx::load_matrices(b_base + part * other_plane + chunk_at<Depth>(t * 8 + b_row, k / 8 + b_chunk),
                           b[part][t / 2]);
      }
    }
    add_split_products<Tiles, chains>(a, b, c, small);
  }
  add_small(small, c);
}

// The parts of scale p [16 x 8 Tiles], as left operands of Tiles / 2 steps.
template <int Tiles>
__device__ inline void split_coefficients(const float (&p)[Tiles][4], float scale,
                                          std::uint32_t (&a)[Tiles / 2][split_parts][4]) {
#pragma unroll
  for (int k = 0; k < Tiles / 2; ++k) {
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      const float(&four)[4] = p[2 * k + x / 2];
      std::uint32_t parts[split_parts];
      split_pair(four[x % 2 * 2] * scale, four[x % 2 * 2 + 1] * scale, parts);
#pragma unroll
      for (int part = 0; part < split_parts; ++part) {
        a[k][part][x] = parts[part];
      }
    }
  }
}

// c[16 x 8 Columns] += (scale p)[16 x 8 Tiles] other[8 Tiles x features from .. width). What a call adds is summed up
// before it meets c. `Together`: tiles of 8 columns at a time.
template <int Depth, int Together = 4, int Tiles, int Columns>
__device__ inline void multiply_split_coefficients(const MmaThread& thread, const float (&p)[Tiles][4], float scale,
                                                   const unsigned char* other, int other_plane, int from, int width,
                                                   float (&c)[Columns][4]) {
  constexpr int steps = Tiles / 2, together = Together, chains = Together < 4 ? 2 : 1;
  std::uint32_t a[steps][split_parts][4];
  split_coefficients(p, scale, a);
  const std::uint32_t b_base = ptx::shared_address(other);
  const int b_row = thread.lane & 15, b_chunk = (thread.lane >> 4) + from / 8;
#pragma unroll
  for (int t = 0; t < Columns; t += together) {
    if (from + t * 8 < width) {
      float big[together][4] = {}, small[chains][together][4] = {};
#pragma unroll
      for (int k = 0; k < steps; ++k) {
        std::uint32_t b[split_parts][together / 2][4];
#pragma unroll
        for (int part = 0; part < split_parts; ++part) {
#pragma unroll
          for (int x = 0; x < together; x += 2) {
            ptx::load_matrices_transposed(
                b_base + part * other_plane + chunk_at<Depth>(k * 16 + b_row, t + x + b_chunk), b[part][x / 2]);
          }
        }
#pragma unroll
        for (int x = 0; x < together; ++x) {
          ptx::multiply_add<bfloat16>(big[x], a[k][0], b[0][x / 2][x % 2 * 2], b[0][x / 2][x % 2 * 2 + 1]);
        }
        add_small_products<together, chains>(a[k], b, small);
      }
      add_small(small, big);
#pragma unroll
      for (int x = 0; x < together; ++x) {
#pragma unroll
        for (int y = 0; y < 4; ++y) {
          c[t + x][y] += big[x][y];
        }
      }
    }
  }
}

// How a kernel makes the products of a tile: here each warp at once, those of its 16 rows. hopper_split_products.cuh
// has warpgroups that begin products and go on; both have the same members.
struct WarpProducts {
  static constexpr bool by_warpgroups = false;
  static constexpr int alignment = 16;  // of a tile

  // Byte offset of a 16-byte chunk of a plane [Rows][Depth].
  template <int Rows, int Depth>
  static __device__ int place(int r, int chunk) {
    return chunk_at<Depth>(r, chunk);
  }

  // By each thread that wrote to planes, before the barrier behind which they are read.
  static __device__ void planes_are_written() {}

  // Own rows times the other side's, over `Features` features from `from` on; those from `end` on are 0.
  template <int OwnRows, int OtherRows, int Depth, int Features, int Chains = 1, bool Floats = false>
  class Scores {
   public:
    __device__ void start(const MmaThread& thread, const unsigned char* own, const unsigned char* other, int from,
                          int end) {
      multiply_split_rows<Depth>(thread, own, OwnRows * Depth * 2, other, OtherRows * Depth * 2, from, end, products_);
    }
    // `Pending` products that began later may go on.
    template <int Pending>
    __device__ void finish(float (&products)[OtherRows / 8][4]) const {
#pragma unroll
      for (int slot = 0; slot < OtherRows / 2; ++slot) {
        products[slot / 4][slot % 4] = products_[slot / 4][slot % 4];
      }
    }

   private:
    float products_[OtherRows / 8][4];
  };

  // sums += scale p times the other side's rows: their `Features` features from `from` on, of which those from `width`
  // on are 0. Complete after finish().
  template <int OtherRows, int Depth, int Features, int Together = 4>
  class Sums {
   public:
    __device__ void start(const MmaThread& thread, const float (&p)[OtherRows / 8][4], float scale,
                          const unsigned char* other, int from, int width, float (&sums)[Features / 8][4]) {
      multiply_split_coefficients<Depth, Together>(thread, p, scale, other, OtherRows * Depth * 2, from, width, sums);
    }
    template <int Pending>
    __device__ void finish(float (&)[Features / 8][4]) {}
  };
};

// Products of the tile's rows and columns that could not be split, in f32: the bits say which columns, and which of the
// two rows of a thread of the warp-th 16 rows. In order, and on copies in local memory, because the calls should take
// few registers.
__device__ __noinline__ inline void plain_products(const RowSource<float> own, const RowSource<float> others,
                                                   std::int64_t width, std::uint32_t marked_columns,
                                                   std::uint32_t marked_rows, int warp, float* products, int slots) {
  MmaThread thread;
  thread.warp = warp;
#pragma unroll 1
  for (int slot = 0; slot < slots; ++slot) {
    const std::int64_t i = own.first + thread.row_of(slot), j = others.first + thread.col_of(slot);
    const bool marked = ((marked_columns >> thread.col_of(slot) | marked_rows >> slot / 2 % 2) & 1) != 0;
    if (marked && i < own.end && j < others.end) {
      products[slot] = plain_product<float, Summing::in_order>(own.data + i * own.row, own.feature,
                                                               others.data + j * others.row, others.feature, width);
    }
  }
}

template <int Tiles>
__device__ inline void replace_products(const RowSource<float>& own, const RowSource<float>& others, std::int64_t width,
                                        std::uint32_t marked_columns, std::uint32_t marked_rows, int warp,
                                        float (&products)[Tiles][4]) {
  float copies[Tiles * 4];
#pragma unroll
  for (int slot = 0; slot < Tiles * 4; ++slot) {
    copies[slot] = products[slot / 4][slot % 4];
  }
  plain_products(own, others, width, marked_columns, marked_rows, warp, copies, Tiles * 4);
#pragma unroll
  for (int slot = 0; slot < Tiles * 4; ++slot) {
    products[slot / 4][slot % 4] = copies[slot];
  }
}

// What of the tile's marked rows was taken out, times the rows' coefficients p, goes to the sums of exactly those rows
// that may see it. The sums begin with feature `from`. On copies in local memory, to keep the walk's own in registers.
template <SplitLimits limits>
__device__ __noinline__ void add_taken_out_to(const RowSource<float> rows, std::int64_t width, std::uint32_t marked,
                                              const float* p, float scale, std::uint32_t forbidden, float* sums,
                                              int from, int tiles) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 1
  for (; marked != 0; marked &= marked - 1) {
    const int k = __ffs(static_cast<int>(marked)) - 1;
    // The lane that holds column k of this lane's rows, and its two coefficients there.
    const int holder = (lane & ~3) | (k % 8 / 2), slot = k / 8 * 4 + k % 2;
    const float low = __shfl_sync(0xffffffffu, p[slot], holder) * scale;
    const float high = __shfl_sync(0xffffffffu, p[slot + 2], holder) * scale;
    const std::uint32_t bits = __shfl_sync(0xffffffffu, forbidden >> slot, holder);
    const float* row = rows.data + (rows.first + k) * rows.row;
#pragma unroll 1
    for (int at = 0; at < 2 * tiles; ++at) {
      const int d = from + at / 2 * 8 + 2 * (lane % 4) + at % 2;
      const float value = d < width ? row[d * rows.feature] : 0.0f;
      if (!fits<limits>(value)) {
        float* sum = sums + at / 2 * 4 + at % 2;
        sum[0] += (bits & 1) != 0 ? 0.0f : low * value;
        sum[2] += (bits & 4) != 0 ? 0.0f : high * value;
      }
    }
  }
}

template <SplitLimits limits, int Tiles, int Columns>
__device__ inline void add_taken_out(const RowSource<float>& rows, std::int64_t width, std::uint32_t marked,
                                     const float (&p)[Tiles][4], float scale, std::uint32_t forbidden, int from,
                                     float (&c)[Columns][4]) {
  float coefficients[Tiles * 4], sums[Columns * 4];
#pragma unroll
  for (int slot = 0; slot < Tiles * 4; ++slot) {
    coefficients[slot] = p[slot / 4][slot % 4];
  }
#pragma unroll
  for (int slot = 0; slot < Columns * 4; ++slot) {
    sums[slot] = c[slot / 4][slot % 4];
  }
  add_taken_out_to<limits>(rows, width, marked, coefficients, scale, forbidden, sums, from, Columns);
#pragma unroll
  for (int slot = 0; slot < Columns * 4; ++slot) {
    c[slot / 4][slot % 4] = sums[slot];
  }
}

// Coefficients of a backward that may be split, and what they are multiplied by first.
constexpr float split_coefficient_scale = 0x1p12f, split_coefficient_most = 0x1p48f;

// The products of coefficients that were left out, to the sums of their rows; as add_taken_out_to.
__device__ __noinline__ inline void add_large_to(const RowSource<float> rows, std::int64_t width, const float* p,
                                                 int columns, float* sums, int from, int tiles) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 1
  for (int k = 0; k < columns; ++k) {
    const int holder = (lane & ~3) | (k % 8 / 2), slot = k / 8 * 4 + k % 2;
    const float low = __shfl_sync(0xffffffffu, p[slot], holder), high = __shfl_sync(0xffffffffu, p[slot + 2], holder);
    const bool large[2] = {fabsf(low) > split_coefficient_most, fabsf(high) > split_coefficient_most};
    if ((!large[0] && !large[1]) || rows.first + k >= rows.end) {
      continue;
    }
    const float* row = rows.data + (rows.first + k) * rows.row;
#pragma unroll 1
    for (int at = 0; at < 2 * tiles; ++at) {
      const int d = from + at / 2 * 8 + 2 * (lane % 4) + at % 2;
      const float value = d < width ? row[d * rows.feature] : 0.0f;
      if (fits<backward_limits>(value)) {
        float* sum = sums + at / 2 * 4 + at % 2;
        sum[0] += large[0] ? low * split_coefficient_scale * value : 0.0f;
        sum[2] += large[1] ? high * split_coefficient_scale * value : 0.0f;
      }
    }
  }
}

template <int Rows, int Columns>
__device__ inline void add_large(const RowSource<float>& rows, std::int64_t width, const float (&p)[Rows / 8][4],
                                 int from, float (&c)[Columns][4]) {
  float coefficients[Rows / 2], sums[Columns * 4];
#pragma unroll
  for (int slot = 0; slot < Rows / 2; ++slot) {
    coefficients[slot] = p[slot / 4][slot % 4];
  }
#pragma unroll
  for (int slot = 0; slot < Columns * 4; ++slot) {
    sums[slot] = c[slot / 4][slot % 4];
  }
  add_large_to(rows, width, coefficients, Rows, sums, from, Columns);
#pragma unroll
  for (int slot = 0; slot < Columns * 4; ++slot) {
    c[slot / 4][slot % 4] = sums[slot];
  }
}

}  // namespace headway::cuda
