// Which pairs of a thread are allowed, or kept by dropout, in a form that costs little for each pair: packed weights
// and score gradients are cut down to those by an AND, whatever was computed for the others (NaN too). Elements as in
// hopper_backward_pairs.cuh.
#pragma once

#include "engines/cuda/kernels/hopper_backward_pairs.cuh"
#include "engines/cuda/ptx/bytes.cuh"

namespace headway::cuda {

// Of each 32 elements a word: element 4 j + 2 r + c has bit 7 - j of byte 2 c + r, which is the byte's sign when j bits
// have been shifted out.
template <int count>
struct AllowedPairs {
  std::uint32_t words[count / 32];
  bool all;  // nothing is forbidden, and nobody needs the words

  __device__ __forceinline__ void set_all() {
    all = true;
#pragma unroll
    for (int w = 0; w < count / 32; ++w) {
      words[w] = ~0u;
    }
  }

  // Ones in the halves of packed elements 2 x and 2 x + 1 that are allowed.
  __device__ __forceinline__ std::uint32_t halves(int x) const {
    const std::uint32_t shifted = words[x / 16] << (x % 16 / 2);
    return x % 2 == 0 ? ptx::signs_of_bytes<0, 2>(shifted) : ptx::signs_of_bytes<1, 3>(shifted);
  }

  // Packed pairs from the first on, cut down to what is allowed.
  template <int packed, int all_packed>
  __device__ __forceinline__ void cut(int first, std::uint32_t (&values)[all_packed]) const {
#pragma unroll
    for (int x = first; x < first + packed; ++x) {
      values[x] &= halves(x);
    }
  }

  __device__ __forceinline__ bool get(int element) const {
    const int byte = element % 2 * 2 + element / 2 % 2;
    return (words[element / 32] >> (8 * byte + 7 - element % 32 / 4) & 1) != 0;
  }

  // A number where an element is allowed, else 0.
  __device__ __forceinline__ float or_zero(int element, float number) const {
    const std::uint32_t shifted = words[element / 32] << (element % 32 / 4);
    const std::uint32_t ones = element % 4 == 0   ? ptx::signs_of_bytes<0, 0>(shifted)
                               : element % 4 == 1 ? ptx::signs_of_bytes<2, 2>(shifted)
                               : element % 4 == 2 ? ptx::signs_of_bytes<1, 1>(shifted)
                                                  : ptx::signs_of_bytes<3, 3>(shifted);
    return __uint_as_float(__float_as_uint(number) & ones);
  }

  // Of packed elements 2 x and 2 x + 1, those whose halves are ones.
  __device__ __forceinline__ void keep_halves(int x, std::uint32_t ones) {
    words[x / 16] &= ones | ~(0x00010001u << (8 * (x % 2) + 7 - x % 16 / 2));
  }

  // Those that the range rule allows.
  __device__ __forceinline__ void keep_range(const BackwardSequence& sequence, const BackwardPairs& pairs) {
    all = false;
    const int offset = sequence.offset + pairs.first_query;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // The columns that see this row's key.
      const int key = pairs.first_key + 8 * r;
      const int begin = key - sequence.right - offset;
      int end = min(key + sequence.left - offset + 1, sequence.real_queries - pairs.first_query);
      end = key < sequence.valid_keys ? end : begin;
#pragma unroll
      for (int w = 0; w < count / 32; ++w) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const auto from = [&](int column) {  // the bits of columns from this one on
            return 0xFFu >> min(max((column - c - 64 * w + 7) >> 3, 0), 8);
          };
          const std::uint32_t byte = from(begin) & ~from(end);
          words[w] &= byte << (8 * (2 * c + r)) | ~(0xFFu << (8 * (2 * c + r)));
        }
      }
    }
  }
};

// What dropout keeps. One draw covers four keys, and four lanes hold them: each draws for one of the four (row, column)
// pairs that they have in a group of columns, and hands each of the others its bits. `together` draws are under way at
// a time.
template <int together, int count>
__device__ __forceinline__ void draw_kept(const DropoutArguments& dropout, const BackwardPairs& pairs, int lane,
                                          AllowedPairs<count>& kept) {
  const int row = lane / 4 % 2, column = lane / 8 % 2;
  const QuadDraw keys = QuadDraw::of(dropout.keys, (pairs.first_key + 8 * row) / 4, pairs.head, pairs.batch);
#pragma unroll
  for (int w = 0; w < count / 32; ++w) {
    KeptBytes own;
#pragma unroll
    for (int j = 0; j < 8; j += together) {
      Philox4x32::Counter draws[together];
#pragma unroll
      for (int n = 0; n < together; ++n) {
        const int query = pairs.first_query + 64 * w + 8 * (j + n) + column;
        draws[n] = keys.with(RowDraw::of(dropout.keys, query, pairs.head));
      }
      finish_draws(dropout, draws);
#pragma unroll
      for (int n = 0; n < together; ++n) {
        own.add(dropout, draws[n]);
      }
    }
    kept.words[w] = ptx::transposed_bytes(own.bytes<8>(dropout), lane);
  }
  kept.all = false;
}

// Cuts pairs down to those that a mask allows: the lane's pieces of it are bits for the lanes that have those pairs.
__device__ __forceinline__ void forbid_by_pieces(std::uint32_t own, int lane, AllowedPairs<32>& allowed) {
  std::uint32_t word = 0;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    // Of the lane's first key: bits 0 and 16; of the second, 8 keys on: bits 8 and 24.
    word = word << 1 | (__shfl_sync(~0u, own, 4 * j + (lane & 3)) >> (lane / 4) & 0x01010101u);
  }
  allowed.words[0] &= word;
  allowed.all = false;
}

}  // namespace headway::cuda
