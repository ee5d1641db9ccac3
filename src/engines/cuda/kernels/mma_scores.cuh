// What every tensor core kernel does between its products: modifiers and dropout on a warp's tile of scores.
#pragma once

#include "engines/cuda/dropout.cuh"
#include "engines/cuda/kernels/mma_tile.cuh"
#include "engines/cuda/modifiers.cuh"
#include "engines/cuda/ptx/transpose.cuh"
#include "engines/cuda/spans.cuh"

namespace headway::cuda {

// Products become scores, -inf where forbidden; see modify_tile in simt_scores.cuh. `scratch` and `slopes` are
// [4 Tiles][threads]; where(r, c) is the Pair of row r and column c of the tile.
template <int Tiles, class Where>
__device__ inline void modify_slots(const MmaThread& thread, const Modifiers<float>& modifiers, bool plain,
                                    const Where& where, float* scratch, float* slopes, float (&scores)[Tiles][4]) {
  constexpr int slots = 4 * Tiles;
  float* own = scratch + threadIdx.x;
#pragma unroll
  for (int slot = 0; slot < slots; ++slot) {
    float& score = scores[slot / 4][slot % 4];
    if (plain) {
      score = modifiers.scaled(score);
    } else {
      own[slot * mma_threads] = score;
    }
  }
  if (plain) {
    return;
  }
  constexpr int batch = 8;
#pragma unroll 1
  for (int first = 0; first < slots; first += batch) {
    float few[batch], few_slopes[batch];
#pragma unroll
    for (int x = 0; x < batch; ++x) {
      few[x] = own[(first + x) * mma_threads];
    }
    modifiers.apply(
        few, [&](int x) { return where(thread.row_of(first + x), thread.col_of(first + x)); }, few_slopes);
#pragma unroll
    for (int x = 0; x < batch; ++x) {
      own[(first + x) * mma_threads] = few[x];
      if (slopes != nullptr) {
        slopes[(first + x) * mma_threads + threadIdx.x] = few_slopes[x];
      }
    }
  }
#pragma unroll
  for (int slot = 0; slot < slots; ++slot) {
    scores[slot / 4][slot % 4] = own[slot * mma_threads];
  }
}

// Forbids the pairs of a warp's tile that the words of its queries leave out (spans.cuh). The tile's columns begin at
// `col` of its block's.
template <bool KeysAreRows, int Tiles>
__device__ inline void forbid_by_words(const MmaThread& thread, const std::uint64_t* words, int col,
                                       float (&scores)[Tiles][4]) {
#pragma unroll
  for (int slot = 0; slot < 4 * Tiles; ++slot) {
    const int r = thread.row_of(slot), c = col + thread.col_of(slot);
    const bool allowed = (words[KeysAreRows ? c : r] >> (KeysAreRows ? r : c) & 1) != 0;
    scores[slot / 4][slot % 4] = allowed ? scores[slot / 4][slot % 4] : -infinity<float>();
  }
}

// Bit `slot` says whether dropout keeps it, in a tile whose rows are queries. The two lanes that share a quad of keys
// draw one row each and exchange halves.
template <int Tiles>
__device__ inline std::uint32_t kept_slots(const MmaThread& thread, const DropoutArguments& dropout, std::int64_t b,
                                           std::int64_t h, std::int64_t first_query, std::int64_t first_key) {
  std::uint32_t bits = 0;
  const bool odd = (thread.lane & 1) != 0;
  const std::int64_t i = first_query + thread.row_of(odd ? 2 : 0);
#pragma unroll 1
  for (int t = 0; t < Tiles; ++t) {
    const auto words = dropout_words(dropout, b, h, i, (first_key + t * 8) / 4 + thread.lane % 4 / 2);
    const std::uint32_t first = __shfl_xor_sync(0xffffffffu, odd ? words[0] : words[2], 1);
    const std::uint32_t second = __shfl_xor_sync(0xffffffffu, odd ? words[1] : words[3], 1);
    bits |= std::uint32_t{is_kept(dropout, odd ? first : words[0])} << (4 * t);
    bits |= std::uint32_t{is_kept(dropout, odd ? second : words[1])} << (4 * t + 1);
    bits |= std::uint32_t{is_kept(dropout, odd ? words[2] : first)} << (4 * t + 2);
    bits |= std::uint32_t{is_kept(dropout, odd ? words[3] : second)} << (4 * t + 3);
  }
  return bits;
}

// The same in a tile whose rows are keys, the first a multiple of 4. Of each quad of keys the four lanes that hold one
// of them draw one query and half of the rows each, and exchange what they found.
template <int Tiles>
__device__ inline std::uint32_t kept_slots_transposed(const MmaThread& thread, const DropoutArguments& dropout,
                                                      std::int64_t b, std::int64_t h, std::int64_t first_key,
                                                      std::int64_t first_query) {
  static_assert(Tiles <= 8);               // bits of a byte
  const int drawn = thread.lane >> 2 & 3;  // slots 4 t + drawn
  const std::int64_t quad = (first_key + thread.warp * 16 + drawn / 2 * 8) / 4 + thread.lane / 16;
  const std::int64_t query = first_query + 2 * (thread.lane % 4) + drawn % 2;
  std::uint32_t bytes = 0;  // one for each key
#pragma unroll 1
  for (int t = 0; t < Tiles; ++t) {
    const auto words = dropout_words(dropout, b, h, query + t * 8, quad);
#pragma unroll
    for (int key = 0; key < 4; ++key) {
      bytes |= std::uint32_t{is_kept(dropout, words[key])} << (8 * key + t);
    }
  }
  bytes = ptx::transposed_bytes(bytes, thread.lane);  // of this lane's key, one for each x of slots 4 t + x
  std::uint32_t bits = 0;
#pragma unroll
  for (int slot = 0; slot < 4 * Tiles; ++slot) {
    bits |= (bytes >> (8 * (slot % 4) + slot / 4) & 1) << slot;
  }
  return bits;
}

// Sums and maxima over the 4 lanes that share rows.
__device__ inline float quad_sum(float value) {
  value += __shfl_xor_sync(0xffffffffu, value, 1);
  return value + __shfl_xor_sync(0xffffffffu, value, 2);
}
__device__ inline float quad_maximum(float value) {
  const float one = __shfl_xor_sync(0xffffffffu, value, 1);
  value = value > one ? value : one;
  const float two = __shfl_xor_sync(0xffffffffu, value, 2);
  return value > two ? value : two;
}

}  // namespace headway::cuda
