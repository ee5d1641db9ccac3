// Tiles of the backward for short sequences (short_gradient.cuh): how they are filled, and products of their parts.
// Layouts and slots are those of mma_tile.cuh. Features past a view's width are neither copied nor multiplied, but for
// those that fill the last 16.
#pragma once

#include "engines/cuda/kernels/mma_tile.cuh"
#include "engines/cuda/ptx/transpose.cuh"

namespace headway::cuda {

constexpr int short_queries = 64;  // rows of a query tile, and columns of a tile of coefficients [keys][queries]

// The address of a chunk in a row of a tile that begins at a multiple of 128 bytes, from that of chunk `lane_chunk` (0
// or 1): one instruction for each even `chunk` to add.
template <int Depth>
__device__ inline std::uint32_t lane_address(std::uint32_t tile, int row, int lane_chunk) {
  return tile + row * Depth * 2 + ((lane_chunk ^ (row & 7)) << 4);
}
__device__ inline std::uint32_t plus_chunks(std::uint32_t lane_address, int chunk) {
  return (lane_address ^ ((chunk & 7) << 4)) + ((chunk & ~7) << 4);
}

// Begins to copy rows [first, first + count) into a tile.
template <int Depth, int Threads, class T>
__device__ inline void fill_short_tile(const HalfRows<T>& rows, std::int64_t first, int count, unsigned char* tile) {
  if (!rows.chunks) {
    fill_tile_by_element<Depth, Threads>(rows, first, tile, count);
    return;
  }
  // A thread copies the same chunk of every few rows.
  constexpr int chunks = Depth / 8, step = Threads / chunks;
  const int chunk = static_cast<int>(threadIdx.x) % chunks;
  if (chunk * 8 >= (rows.width + 15) / 16 * 16) {
    return;
  }
  const std::int64_t left = rows.width - chunk * 8;
  const int whole = left <= 0 ? 0 : left < 8 ? static_cast<int>(left) * 2 : 16;
  const std::int64_t real = whole == 0 ? 0 : rows.end - first;  // rows that have something in this chunk
  const std::uint32_t address = ptx::shared_address(tile);
#pragma unroll 4
  for (int r = static_cast<int>(threadIdx.x) / chunks; r < count; r += step) {
    const bool any = r < real;
    ptx::copy_16(address + chunk_at<Depth>(r, chunk), any ? rows.data + (first + r) * rows.row + chunk * 8 : rows.data,
                 any ? whole : 0);
  }
}

// c[16 x 8 Tiles] = a[rows from a_row] b[rows from b_row]^T over `width` features.
template <int Depth, class T, int Tiles>
__device__ inline void multiply_short_rows(int lane, const unsigned char* a, int a_row, const unsigned char* b,
                                           int b_row, int width, float (&c)[Tiles][4]) {
  const std::uint32_t a_base = ptx::shared_address(a), b_base = ptx::shared_address(b);
#pragma unroll
  for (int t = 0; t < Tiles; ++t) {
    c[t][0] = c[t][1] = c[t][2] = c[t][3] = 0;
  }
  const std::uint32_t a_lane = lane_address<Depth>(a_base, a_row + (lane & 15), lane >> 4);
  const std::uint32_t b_lane = lane_address<Depth>(b_base, b_row + (lane & 7) + (lane >> 4) * 8, lane >> 3 & 1);
#pragma unroll
  for (int k = 0; k < Depth / 16; ++k) {
    if (k * 16 >= width) {
      break;
    }
    std::uint32_t left[4];
    ptx::load_matrices(plus_chunks(a_lane, 2 * k), left);
#pragma unroll
    for (int t = 0; t < Tiles; t += 2) {
      std::uint32_t right[4];
      ptx::load_matrices(plus_chunks(b_lane, 2 * k) + t * 8 * Depth * 2, right);
      ptx::multiply_add<T>(c[t], left, right[0], right[1]);
      ptx::multiply_add<T>(c[t + 1], left, right[2], right[3]);
    }
  }
}

// c[16 rows from `row`][8 Tiles features from `feature`] += coefficients [16, count] other[count, features]; count in
// whole 16.
template <bool QueriesAreRows, int Depth, class T, int Tiles>
__device__ inline void multiply_short_coefficients(int lane, const unsigned char* coefficients, int row,
                                                   const unsigned char* other, int count, int feature, int width,
                                                   float (&c)[Tiles][4]) {
  // The A operand: 16 keys by 16 queries as they lie, or 16 queries by 16 keys.
  constexpr int pitch = short_queries * 2;
  const std::uint32_t a_base = ptx::shared_address(coefficients), b_base = ptx::shared_address(other);
  const std::uint32_t a_lane =
      QueriesAreRows
          ? plus_chunks(lane_address<short_queries>(a_base, (lane & 7) + (lane >> 4) * 8, lane >> 3 & 1), row / 8)
          : lane_address<short_queries>(a_base, row + (lane & 15), lane >> 4);
  const std::uint32_t b_lane = plus_chunks(lane_address<Depth>(b_base, lane & 15, lane >> 4), feature / 8);
#pragma unroll 1
  for (int k = 0; k < count; k += 16) {
    std::uint32_t left[4];
    if constexpr (QueriesAreRows) {
      ptx::load_matrices_transposed(a_lane + k * pitch, left);
    } else {
      ptx::load_matrices(plus_chunks(a_lane, k / 8), left);
    }
#pragma unroll
    for (int t = 0; t < Tiles; t += 2) {
      if (feature + t * 8 < width) {
        std::uint32_t right[4];
        ptx::load_matrices_transposed(plus_chunks(b_lane, t) + k * Depth * 2, right);
        ptx::multiply_add<T>(c[t], left, right[0], right[1]);
        ptx::multiply_add<T>(c[t + 1], left, right[2], right[3]);
      }
    }
  }
}

// Stores 16 rows of sums, of which those from `rows` on do not exist. target is the first row's; features from
// `feature` on, in whole 16 bytes where the layout allows.
template <class T, int Tiles>
__device__ inline void store_short_rows(int lane, T* target, const Rows& view, int rows, int feature, int width,
                                        float scale, const float (&sums)[Tiles][4]) {
  static_assert(Tiles % 4 == 0);
  const int q = lane % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = lane / 4 + 8 * half;
    T* row = target + r * view.row;
#pragma unroll
    for (int t = 0; t < Tiles; t += 4) {
      std::uint32_t words[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        // Tensor cores give a sum of zeros either sign.
        words[k] =
            ptx::packed_pair<T>((sums[t + k][2 * half] + 0.0f) * scale, (sums[t + k][2 * half + 1] + 0.0f) * scale);
      }
      ptx::transpose_quad(words, q);
      const int d = feature + (t + q) * 8;
      if (r >= rows || d >= width) {
        continue;
      }
      if (view.chunks && d + 8 <= width) {
        *reinterpret_cast<uint4*>(row + d) = make_uint4(words[0], words[1], words[2], words[3]);
      } else {
#pragma unroll
        for (int x = 0; x < 8; ++x) {
          if (d + x < width) {
            row[(d + x) * view.feature].bits = static_cast<std::uint16_t>(words[x / 2] >> (16 * (x % 2)));
          }
        }
      }
    }
  }
}

// For a careful walk (see take_out_nonfinite): the sums of one lane of 16 rows from `row`, to which is added what was
// taken out of rows `found` of the other operand. `allowed` has a bit for each key of a query, in words_a_query words.
template <bool QueriesAreRows, class T>
__device__ __noinline__ void add_taken_out(const HalfRows<T> rows, std::int64_t first, int count,
                                           const std::uint32_t* found, const unsigned char* coefficients,
                                           const std::uint32_t* allowed, int words_a_query, int row, int feature,
                                           float* sums, int tiles) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 1
  for (int k = 0; k < count; ++k) {
    if ((found[k / 32] >> k % 32 & 1) == 0) {
      continue;
    }
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      const int r = row + lane / 4 + 8 * half;
      const int query = QueriesAreRows ? r : k, key = QueriesAreRows ? k : r;
      if ((allowed[query * words_a_query + key / 32] >> key % 32 & 1) == 0) {
        continue;
      }
      const T coefficient =
          *reinterpret_cast<const T*>(coefficients + chunk_at<short_queries>(key, query / 8) + query % 8 * 2);
#pragma unroll 1
      for (int x = 0; x < 2 * tiles; ++x) {
        const T value = rows.at(first + k, feature + x / 2 * 8 + 2 * (lane % 4) + x % 2);
        if (!is_finite(value)) {
          sums[x / 2 * 4 + 2 * half + x % 2] += ptx::to_float(coefficient) * ptx::to_float(value);
        }
      }
    }
  }
}

}  // namespace headway::cuda
