// Tiles of half-precision products on tensor cores (mma.sync, sm_80 and later).
//
// A tile is [rows][Depth] halves in shared memory, its 16-byte chunks swizzled (chunk ^ row % 8) so that the 8 rows of
// a matrix lie in different banks. 4 warps have 16 rows each of a 64-row tile; a warp's accumulators of 16 x 8 Tiles
// are 4 Tiles numbers a thread: slot 4 t + 2 i + c is row lane / 4 + 8 i, column 8 t + 2 (lane % 4) + c.
#pragma once

#include "engines/cuda/elements.cuh"
#include "engines/cuda/kernels/pages.cuh"
#include "engines/cuda/key_range.cuh"
#include "engines/cuda/ptx/copy_async.cuh"
#include "engines/cuda/ptx/warp_matrix.cuh"

namespace headway::cuda {

constexpr int mma_threads = 128;
constexpr int mma_rows = 64;  // of a block's own tile, and of the tiles it walks over

struct MmaThread {
  int warp, lane;
  __device__ MmaThread() : warp(static_cast<int>(threadIdx.x) / 32), lane(static_cast<int>(threadIdx.x) % 32) {}
  __device__ int row_of(int slot) const { return warp * 16 + lane / 4 + 8 * (slot / 2 % 2); }
  __device__ int col_of(int slot) const { return slot / 4 * 8 + 2 * (lane % 4) + slot % 2; }
};

// Byte offset of a 16-byte chunk of a tile.
template <int Depth>
__device__ inline int chunk_at(int row, int chunk) {
  return row * Depth * 2 + ((chunk ^ (row & 7)) << 4);
}

// Where chunks lie, for those who fill tiles: so, or as others need it.
template <int Depth>
struct ChunksInRows {
  __device__ static int at(int row, int chunk) { return chunk_at<Depth>(row, chunk); }
};

// The rows of one head's view, `end` of them; rows past it and features past `width` read as 0.
template <class T>
struct HalfRows {
  using Element = T;
  const T* data;
  std::int64_t row, feature, end, width;
  bool chunks;

  __device__ HalfRows(const Rows& view, std::int64_t b, std::int64_t h, std::int64_t begin, std::int64_t count,
                      std::int64_t features)
      : data(head_of<T>(view, b, h) + begin * view.row),
        row(view.row),
        feature(view.feature),
        end(count),
        width(features),
        chunks(view.chunks) {}

  __device__ T at(std::int64_t r, std::int64_t d) const {
    return r < end && d < width ? data[r * row + d * feature] : T{};
  }
};

// The same of keys or values in pages.
template <class T>
struct PagedHalfRows {
  using Element = T;
  const T* data;  // of the head, in page 0
  const PageArguments& pages;
  std::int64_t page, row, feature, end, width, b;
  bool chunks;

  __device__ PagedHalfRows(const PageArguments& table, const Rows& view, std::int64_t sequence, std::int64_t h,
                           std::int64_t count, std::int64_t features)
      : data(head_of<T>(view, 0, h)),
        pages(table),
        page(view.batch),
        row(view.row),
        feature(view.feature),
        end(count),
        width(features),
        b(sequence),
        chunks(view.chunks) {}

  __device__ const T* row_at(std::int64_t r) const {
    const PageSlot at = slot_of(pages, b, r);
    return data + at.page * page + at.slot * row;
  }
  __device__ T at(std::int64_t r, std::int64_t d) const { return r < end && d < width ? row_at(r)[d * feature] : T{}; }
};

// The keys or values of a sequence.
template <class T, bool Paged>
using KeyRows = std::conditional_t<Paged, PagedHalfRows<T>, HalfRows<T>>;

template <class T, bool Paged>
__device__ inline KeyRows<T, Paged> key_rows(const Arguments& args, const Rows& view, const Sequence& sequence,
                                             std::int64_t b, std::int64_t g, std::int64_t features) {
  if constexpr (Paged) {
    return {args.pages, view, b, g, sequence.key_count, features};
  } else {
    return {view, b, g, sequence.key_begin, sequence.key_count, features};
  }
}

// The same for layouts without whole chunks: element by element, at once. Rare, and not worth registers elsewhere.
template <int Depth, int Threads = mma_threads, class Chunks = ChunksInRows<Depth>, class Source>
__device__ __noinline__ void fill_tile_by_element(const Source rows, std::int64_t first, unsigned char* tile,
                                                  int tile_rows = mma_rows) {
  using T = typename Source::Element;
#pragma unroll 1
  for (int task = static_cast<int>(threadIdx.x); task < tile_rows * (Depth / 8); task += Threads) {
    const int r = task / (Depth / 8), chunk = task % (Depth / 8);
    T eight[8];
#pragma unroll
    for (int x = 0; x < 8; ++x) {
      eight[x] = rows.at(first + r, chunk * 8 + x);
    }
    *reinterpret_cast<uint4*>(tile + Chunks::at(r, chunk)) =
        make_uint4(eight[0].bits | eight[1].bits << 16, eight[2].bits | eight[3].bits << 16,
                   eight[4].bits | eight[5].bits << 16, eight[6].bits | eight[7].bits << 16);
  }
}

// Begins to copy rows [first, first + 64) into a tile.
template <int Depth, class Chunks = ChunksInRows<Depth>, class T>
__device__ inline void fill_tile(const HalfRows<T>& rows, std::int64_t first, unsigned char* tile) {
  if (!rows.chunks) {
    fill_tile_by_element<Depth, mma_threads, Chunks>(rows, first, tile);
    return;
  }
  // A thread copies the same chunk of every few rows.
  constexpr int chunks = Depth / 8, step = mma_threads / chunks;
  const int chunk = static_cast<int>(threadIdx.x) % chunks, r = static_cast<int>(threadIdx.x) / chunks;
  const std::int64_t left = rows.width - chunk * 8;
  const int whole = left <= 0 ? 0 : left < 8 ? static_cast<int>(left) * 2 : 16;
  const std::int64_t count = whole == 0 ? 0 : smaller(rows.end - first, mma_rows);
  const T* from = rows.data + chunk * 8 + (first + r) * rows.row;
  const std::uint32_t address = ptx::shared_address(tile);
  if (first + mma_rows <= rows.end && rows.width >= Depth) {  // nothing to fill with 0
#pragma unroll
    for (int x = 0; x < mma_rows / step; ++x) {
      ptx::copy_16(address + Chunks::at(r + x * step, chunk), from, 16);
      from += step * rows.row;
    }
    return;
  }
#pragma unroll
  for (int x = 0; x < mma_rows / step; ++x) {
    const bool any = r + x * step < count;
    ptx::copy_16(address + Chunks::at(r + x * step, chunk), any ? from : rows.data, any ? whole : 0);
    from += step * rows.row;
  }
}

// Copies tile after tile, of rows that exist and whose chunks may be copied whole.
template <int Depth, class Chunks, class T>
class TileCopies {
 public:
  __device__ TileCopies(const HalfRows<T>& rows, std::int64_t first) : row_(rows.row) {
    const std::int64_t left = rows.width - chunk_of_thread() * 8;
    bytes_ = left <= 0 ? 0 : left < 8 ? static_cast<int>(left) * 2 : 16;
    from_ = rows.data + (first + row_of_thread()) * row_ + (left <= 0 ? 0 : chunk_of_thread() * 8);
  }

  // Begins to copy the next 64 rows.
  __device__ void next(unsigned char* tile) {
    const std::uint32_t to = ptx::shared_address(tile);
#pragma unroll
    for (int x = 0; x < mma_rows / step; ++x) {
      ptx::copy_16(to + Chunks::at(row_of_thread() + x * step, chunk_of_thread()), from_, bytes_);
      from_ += step * row_;
    }
  }

 private:
  // A thread copies the same chunk of every few rows.
  static constexpr int chunks = Depth / 8, step = mma_threads / chunks;
  __device__ static int chunk_of_thread() { return static_cast<int>(threadIdx.x) % chunks; }
  __device__ static int row_of_thread() { return static_cast<int>(threadIdx.x) / chunks; }

  const T* from_;
  std::int64_t row_;
  int bytes_;
};

template <int Depth, class T>
__device__ inline void fill_tile(const PagedHalfRows<T>& rows, std::int64_t first, unsigned char* tile) {
  if (!rows.chunks) {
    fill_tile_by_element<Depth>(rows, first, tile);
    return;
  }
  constexpr int chunks = Depth / 8, step = mma_threads / chunks;
  const int chunk = static_cast<int>(threadIdx.x) % chunks, r = static_cast<int>(threadIdx.x) / chunks;
  const std::int64_t left = rows.width - chunk * 8;
  const int whole = left <= 0 ? 0 : left < 8 ? static_cast<int>(left) * 2 : 16;
  const std::uint32_t address = ptx::shared_address(tile);
#pragma unroll
  for (int x = 0; x < mma_rows / step; ++x) {
    const std::int64_t key = first + r + x * step;
    const bool any = whole > 0 && key < rows.end;
    ptx::copy_16(address + chunk_at<Depth>(r + x * step, chunk), any ? rows.row_at(key) + chunk * 8 : rows.data,
                 any ? whole : 0);
  }
}

// c = own[16 rows of this warp] other[8 Tiles rows]^T, over Depth features.
template <int Depth, class T, int Tiles>
__device__ inline void multiply_rows(const MmaThread& thread, const unsigned char* own, const unsigned char* other,
                                     float (&c)[Tiles][4]) {
  const std::uint32_t a_base = ptx::shared_address(own), b_base = ptx::shared_address(other);
#pragma unroll
  for (int t = 0; t < Tiles; ++t) {
    c[t][0] = c[t][1] = c[t][2] = c[t][3] = 0;
  }
  const int a_row = thread.warp * 16 + (thread.lane & 15), a_chunk = thread.lane >> 4;
  const int b_row = (thread.lane & 7) + (thread.lane >> 4) * 8, b_chunk = thread.lane >> 3 & 1;
#pragma unroll
  for (int k = 0; k < Depth / 16; ++k) {
    std::uint32_t a[4];
    ptx::load_matrices(a_base + chunk_at<Depth>(a_row, 2 * k + a_chunk), a);
#pragma unroll
    for (int t = 0; t < Tiles; t += 2) {
      std::uint32_t b[4];
      ptx::load_matrices(b_base + chunk_at<Depth>(t * 8 + b_row, 2 * k + b_chunk), b);
      ptx::multiply_add<T>(c[t], a, b[0], b[1]);
      ptx::multiply_add<T>(c[t + 1], a, b[2], b[3]);
    }
  }
}

// c[16 x Depth] += p[16 x 8 Tiles] other[8 Tiles x Depth]; p is rounded to T after multiplying by `scale`, a power of
// two.
template <int Depth, class T, int Tiles>
__device__ inline void multiply_coefficients(const MmaThread& thread, const float (&p)[Tiles][4], float scale,
                                             const unsigned char* other, float (&c)[Depth / 8][4]) {
  const std::uint32_t b_base = ptx::shared_address(other);
  const int b_row = thread.lane & 15, b_chunk = thread.lane >> 4;
#pragma unroll
  for (int k = 0; k < Tiles / 2; ++k) {
    const float(&low)[4] = p[2 * k];
    const float(&high)[4] = p[2 * k + 1];
    const std::uint32_t a[4] = {
        ptx::packed_pair<T>(low[0] * scale, low[1] * scale), ptx::packed_pair<T>(low[2] * scale, low[3] * scale),
        ptx::packed_pair<T>(high[0] * scale, high[1] * scale), ptx::packed_pair<T>(high[2] * scale, high[3] * scale)};
#pragma unroll
    for (int t = 0; t < Depth / 8; t += 2) {
      std::uint32_t b[4];
      ptx::load_matrices_transposed(b_base + chunk_at<Depth>(k * 16 + b_row, t + b_chunk), b);
      ptx::multiply_add<T>(c[t], a, b[0], b[1]);
      ptx::multiply_add<T>(c[t + 1], a, b[2], b[3]);
    }
  }
}

template <class T>
__device__ inline bool is_finite(T value) {
  constexpr std::uint16_t exponent = std::is_same_v<T, bfloat16> ? 0x7F80 : 0x7C00;
  return (value.bits & exponent) != exponent;
}

// For a careful walk: a forbidden pair's coefficient is 0, but 0 * NaN is NaN. So what is not finite is taken out of
// the tile before the product, and afterwards added to the sums of exactly those rows that may see it.
//
// Every thread calls it; it begins and ends with a barrier. Bit r of the result is set where row r of the tile lost an
// element. The tile may be made of panels of fewer columns.
template <int Depth, class T, int Columns = Depth>
__device__ inline std::uint64_t take_out_nonfinite(unsigned char* tile, int rows) {
  __shared__ unsigned long long found;
  __syncthreads();
  if (threadIdx.x == 0) {
    found = 0;
  }
  __syncthreads();
  for (int task = static_cast<int>(threadIdx.x); task < rows * Depth; task += mma_threads) {
    T* element = reinterpret_cast<T*>(tile) + task;  // swizzling keeps an element in its row
    if (!is_finite(*element)) {
      *element = T{};
      atomicOr(&found, 1ull << (task / Columns % rows));
    }
  }
  __syncthreads();
  return found;
}

// The sums of one lane, one pair of columns after another; on copies in local memory, to keep the walk's own in
// registers.
template <class Source>
__device__ __noinline__ void add_nonfinite_to(const Source rows, std::int64_t first, std::uint64_t found,
                                              const float* p, float scale, std::uint32_t forbidden, float* sums,
                                              int tiles) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 1
  while (found != 0) {
    const int k = __ffsll(static_cast<long long>(found)) - 1;
    found &= found - 1;
    // The lane that holds column k of this lane's rows, and its two coefficients there.
    const int holder = (lane & ~3) | (k % 8 / 2), slot = k / 8 * 4 + k % 2;
    const float low = __shfl_sync(0xffffffffu, p[slot], holder) * scale;
    const float high = __shfl_sync(0xffffffffu, p[slot + 2], holder) * scale;
    const std::uint32_t bits = __shfl_sync(0xffffffffu, forbidden >> slot, holder);
#pragma unroll 1
    for (int t = 0; t < tiles; ++t) {
#pragma unroll 1
      for (int x = 0; x < 2; ++x) {
        const auto value = rows.at(first + k, t * 8 + 2 * (lane % 4) + x);
        if (!is_finite(value)) {
          float* sum = sums + t * 4 + x;
          sum[0] += (bits & 1) != 0 ? 0.0f : low * ptx::to_float(value);
          sum[2] += (bits & 4) != 0 ? 0.0f : high * ptx::to_float(value);
        }
      }
    }
  }
}

template <int Depth, class Source, int Tiles>
__device__ inline void add_nonfinite(std::uint64_t found, const Source& rows, std::int64_t first,
                                     const float (&p)[Tiles][4], float scale, std::uint32_t forbidden,
                                     float (&c)[Depth / 8][4]) {
  float coefficients[Tiles * 4], sums[Depth / 2];
#pragma unroll
  for (int slot = 0; slot < Tiles * 4; ++slot) {
    coefficients[slot] = p[slot / 4][slot % 4];
  }
#pragma unroll
  for (int slot = 0; slot < Depth / 2; ++slot) {
    sums[slot] = c[slot / 4][slot % 4];
  }
  add_nonfinite_to(rows, first, found, coefficients, scale, forbidden, sums, Depth / 8);
#pragma unroll
  for (int slot = 0; slot < Depth / 2; ++slot) {
    c[slot / 4][slot % 4] = sums[slot];
  }
}

}  // namespace headway::cuda
