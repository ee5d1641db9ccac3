// What a consumer of the Hopper backward knows about the pairs of its tile: which are allowed, which dropout keeps, and
// the bias of each. Rows are keys and columns queries: a thread holds, as element 4 j + 2 r + c, the key first_key + 8
// r and the query first_query + 8 j + c. (Or the other way round, where a function says so.) Bits are kept in that
// order, 32 in a word.
#pragma once

#include "engines/cuda/dropout.cuh"
#include "engines/cuda/elements.cuh"
#include "engines/cuda/kernels/hopper_backward_pieces.cuh"
#include "engines/cuda/kernels/hopper_backward_shared.cuh"
#include "engines/cuda/kernels/hopper_finish.cuh"
#include "engines/cuda/kernels/hopper_softmax.cuh"
#include "engines/cuda/key_range.cuh"
#include "engines/cuda/ptx/transpose.cuh"

namespace headway::cuda {

// A thread's part of a tile.
struct BackwardPairs {
  int batch, head;
  int first_key, first_query;
};

template <int count>
struct PairBits {
  std::uint32_t words[count / 32];

  __device__ __forceinline__ bool get(int element) const { return (words[word(element)] >> (element % 32) & 1) != 0; }
  __device__ __forceinline__ void clear(int element, bool condition) {
    words[word(element)] &= ~(std::uint32_t{condition} << (element % 32));
  }
  __device__ __forceinline__ void set_all() {
#pragma unroll
    for (int w = 0; w < count / 32; ++w) {
      words[w] = ~0u;
    }
  }

 private:
  __device__ __forceinline__ static int word(int element) { return count == 32 ? 0 : element / 32; }
};

__device__ __forceinline__ int query_of(const BackwardPairs& pairs, int element) {
  return pairs.first_query + element / 4 * 8 + element % 2;
}

// visit(element, whether the range rule forbids it), for all.
template <int count, class Visit>
__device__ __forceinline__ void for_range(const BackwardSequence& sequence, const BackwardPairs& pairs,
                                          const Visit& visit) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    // The columns that see this row's key.
    const int key = pairs.first_key + 8 * r;
    const int begin = key - sequence.right - sequence.offset - pairs.first_query;
    int end = min(key + sequence.left - sequence.offset + 1, sequence.real_queries) - pairs.first_query;
    end = key < sequence.valid_keys ? end : begin;
#pragma unroll
    for (int j = 0; j < count / 4; ++j) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int column = 8 * j + c;
        visit(4 * j + 2 * r + c, column < begin || column >= end);
      }
    }
  }
}

// Each row of queries has its own end of keys.
template <int count>
__device__ __forceinline__ void forbid_by_ends(const HopperBackwardArguments& args, const BackwardPairs& pairs,
                                               int real_queries, int key_count, PairBits<count>& allowed) {
#pragma unroll
  for (int column = 0; column < count / 2; ++column) {
    const int element = column / 2 * 4 + column % 2;
    const int query = min(query_of(pairs, element), real_queries - 1);
    const int end = static_cast<int>(length_at(args.valid_lens, pairs.batch, query, key_count));
    allowed.clear(element, pairs.first_key >= end);
    allowed.clear(element + 2, pairs.first_key + 8 >= end);
  }
}

enum class Columns : std::uint8_t { queries, keys };

// Reads matrix elements of the allowed pairs: visit(element, value), with any value for the others. All loads of a
// batch are issued before the first is used; a branch for each pair would keep them apart.
template <class T, Columns columns, int count, class Visit>
__device__ __forceinline__ void for_allowed(const Matrix& matrix, const BackwardPairs& pairs,
                                            const PairBits<count>& allowed, const Visit& visit) {
  const std::int64_t column_step = columns == Columns::queries ? matrix.query : matrix.key;
  const std::int64_t row_step = columns == Columns::queries ? matrix.key : matrix.query;
  const T* first = static_cast<const T*>(matrix.data) + pairs.batch * matrix.batch + pairs.head * matrix.head +
                   pairs.first_query * matrix.query + pairs.first_key * matrix.key;
  constexpr int together = 16;
#pragma unroll
  for (int begin = 0; begin < count; begin += together) {
    T loaded[together];
#pragma unroll
    for (int x = 0; x < together; ++x) {
      const int e = begin + x;
      const T* own = first + (e / 4 * 8 + e % 2) * column_step + e / 2 % 2 * 8 * row_step;
      loaded[x] = *(allowed.get(e) ? own : static_cast<const T*>(matrix.data));
    }
#pragma unroll
    for (int x = 0; x < together; ++x) {
      visit(begin + x, loaded[x]);
    }
  }
}

template <Columns columns = Columns::queries, int count>
__device__ __forceinline__ void forbid_by_mask(const Matrix& mask, const BackwardPairs& pairs,
                                               PairBits<count>& allowed) {
  const PairBits<count> before = allowed;
  for_allowed<std::uint8_t, columns>(mask, pairs, before,
                                     [&](int element, std::uint8_t byte) { allowed.clear(element, byte == 0); });
}

// The bias of each allowed pair; -inf forbids.
template <Columns columns = Columns::queries, int count>
__device__ __forceinline__ void load_bias(const Matrix& bias, const BackwardPairs& pairs, PairBits<count>& allowed,
                                          float (&terms)[count]) {
  const PairBits<count> before = allowed;
  const auto visit = [&](int element, auto value) {
    terms[element] = number<float>(value);
    allowed.clear(element, terms[element] == minus_infinity);
  };
  switch (bias.dtype) {
    case DType::bf16: return for_allowed<bfloat16, columns>(bias, pairs, before, visit);
    case DType::f16: return for_allowed<float16, columns>(bias, pairs, before, visit);
    default: return for_allowed<float, columns>(bias, pairs, before, visit);
  }
}

// Whether a matrix has all pairs of a warp, 16 keys and `queries` queries from a lane's own on.
__device__ __forceinline__ bool has_all(const HopperBackwardArguments& args, const BackwardPairs& pairs, int lane,
                                        int queries) {
  return args.cu_seqlens_q.data == nullptr && pairs.first_key - lane / 4 + 16 <= args.key_len &&
         pairs.first_query - 2 * (lane & 3) + queries <= args.query_len;
}

// The first pair of a warp in a matrix.
template <class T>
__device__ __forceinline__ const T* warp_corner(const Matrix& matrix, const BackwardPairs& pairs, int lane) {
  return static_cast<const T*>(matrix.data) + pairs.batch * matrix.batch + pairs.head * matrix.head +
         (pairs.first_query - 2 * (lane & 3)) * matrix.query + pairs.first_key - lane / 4;
}

// A lane's pieces of 64 queries' rows of a mask: 16 keys of two queries.
__device__ __forceinline__ void load_mask_pieces(const HopperBackwardArguments& args, const BackwardPairs& pairs,
                                                 int lane, MaskPieces& pieces) {
  const int first = pairs.first_query - 2 * (lane & 3) + 2 * lane;
  pieces.load(args, warp_corner<std::uint8_t>(args.mask, pairs, lane) + 2 * lane * args.mask.query,
              static_cast<int>(args.query_len) - first);
}

// The same as forbid_by_mask for 64 queries, where neighbouring keys are neighbours in memory: each lane hands the bits
// of its pieces to the lanes that have them.
__device__ __forceinline__ void forbid_by_pieces(std::uint32_t own, int lane, PairBits<32>& allowed) {
  std::uint32_t bits = 0;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    // Of the lane's first key: bits 0 and 16; of the second, 8 keys on: bits 8 and 24.
    const std::uint32_t both = __shfl_sync(~0u, own, 4 * j + (lane & 3)) >> (lane / 4) & 0x01010101u;
    bits |= ((both | both >> 15 | both >> 6 | both >> 21) & 15u) << (4 * j);
  }
  allowed.words[0] &= bits;
}

// The same as load_bias, where two neighbouring keys can be read at once: read as rows of queries, and transposed.
template <class T, int count>
__device__ __forceinline__ void load_bias_pairs(const Matrix& bias, const BackwardPairs& pairs, int lane,
                                                PairBits<count>& allowed, float (&terms)[count]) {
  const T* corner = warp_corner<T>(bias, pairs, lane) + lane / 4 * bias.query + 2 * (lane & 3);
  std::uint32_t loaded[count / 2];
#pragma unroll
  for (int x = 0; x < count / 2; ++x) {
    loaded[x] = *reinterpret_cast<const std::uint32_t*>(corner + x / 2 * 8 * bias.query + x % 2 * 8);
  }
#pragma unroll
  for (int x = 0; x < count / 2; ++x) {
    const float2 both = ptx::unpacked_pair<T>(ptx::transposed(loaded[x]));
    terms[2 * x] = both.x;
    terms[2 * x + 1] = both.y;
    allowed.clear(2 * x, both.x == minus_infinity);
    allowed.clear(2 * x + 1, both.y == minus_infinity);
  }
}

}  // namespace headway::cuda
