// Pieces of a mask's or bias' rows for the Hopper backward, from any address: the words that hold them are read whole
// and shifted. A word at either end of the matrix is put together from those of its elements that belong to it.
#pragma once

#include "engines/cuda/kernels/hopper_backward_arguments.h"
#include "engines/cuda/kernels/mask_bits.cuh"

namespace headway::cuda {

// The memory of a matrix: [begin, end). Nothing outside is read.
struct MatrixMemory {
  std::uintptr_t begin, end;

  __device__ __forceinline__ MatrixMemory(const Matrix& matrix, const void* behind)
      : begin(reinterpret_cast<std::uintptr_t>(matrix.data)), end(reinterpret_cast<std::uintptr_t>(behind)) {}

  template <class Word>
  __device__ __forceinline__ bool has(std::uintptr_t at) const {
    return at >= begin && at + sizeof(Word) <= end;
  }

  // So many elements of Element's size from `at` on, zeros for those outside, in 32-bit words.
  template <class Element, int words>
  __device__ __forceinline__ void gather(std::uintptr_t at, std::uint32_t (&to)[words]) const {
    constexpr int each = 4 / sizeof(Element);
#pragma unroll
    for (int w = 0; w < words; ++w) {
      to[w] = 0;
#pragma unroll
      for (int e = 0; e < each; ++e) {
        const std::uintptr_t own = at + (w * each + e) * sizeof(Element);
        const std::uint32_t element = has<Element>(own) ? __ldg(reinterpret_cast<const Element*>(own)) : 0;
        to[w] |= element << (8 * sizeof(Element) * e);
      }
    }
  }
};

// 16 keys of one row of a mask, on their way: four words where all pieces of the matrix are aligned to 16 bytes, else
// the three pairs of words that hold them.
class MaskPiece {
 public:
  __device__ __forceinline__ void load(const MatrixMemory& memory, const std::uint8_t* from, bool exists,
                                       bool aligned) {
    const auto at = reinterpret_cast<std::uintptr_t>(from);
    shift_ = static_cast<std::uint32_t>(at) & 7;
    if (aligned) {
      const uint4 chunk = exists ? words<uint4, 4>(memory, at) : uint4{};
      words_[0] = chunk.x, words_[1] = chunk.y, words_[2] = chunk.z, words_[3] = chunk.w;
      words_[4] = words_[5] = 0;
      return;
    }
#pragma unroll
    for (int pair = 0; pair < 3; ++pair) {
      const uint2 both =
          exists && (pair < 2 || shift_ != 0) ? words<uint2, 2>(memory, at - shift_ + 8 * pair) : uint2{};
      words_[2 * pair] = both.x, words_[2 * pair + 1] = both.y;
    }
  }

  // A bit for each key that is not 0.
  __device__ __forceinline__ std::uint32_t bits(bool aligned) const {
    const std::uint32_t first = bits_of_bytes({words_[0], words_[1], words_[2], words_[3]});
    return aligned ? first : (first | bits_of_eight_bytes(words_[4], words_[5]) << 16) >> shift_ & 0xFFFFu;
  }

 private:
  template <class Words, int count>
  __device__ __forceinline__ static Words words(const MatrixMemory& memory, std::uintptr_t at) {
    if (memory.has<Words>(at)) [[likely]] {
      return __ldg(reinterpret_cast<const Words*>(at));
    }
    std::uint32_t gathered[count];
    memory.gather<std::uint8_t>(at, gathered);
    if constexpr (count == 4) {
      return {gathered[0], gathered[1], gathered[2], gathered[3]};
    } else {
      return {gathered[0], gathered[1]};
    }
  }

  std::uint32_t words_[6];
  std::uint32_t shift_;
};

// Of two neighbouring rows; a lane's part of what a warp reads of 64 queries and 16 keys.
struct MaskPieces {
  MaskPiece even, odd;

  // `from`: the lane's first key; so many rows of the matrix are left from there on.
  __device__ __forceinline__ void load(const HopperBackwardArguments& args, const std::uint8_t* from, int rows) {
    const MatrixMemory memory(args.mask, args.mask_end);
    even.load(memory, from, rows > 0, args.mask_in_pieces);
    odd.load(memory, from + args.mask.query, rows > 1, args.mask_in_pieces);
  }

  __device__ __forceinline__ std::uint32_t bits(const HopperBackwardArguments& args) const {
    return even.bits(args.mask_in_pieces) | odd.bits(args.mask_in_pieces) << 16;
  }
};

// Eight keys of one row of a bias of 16 bits, on their way.
class BiasPiece {
 public:
  __device__ __forceinline__ void load(const MatrixMemory& memory, const void* from, bool exists) {
    const auto at = reinterpret_cast<std::uintptr_t>(from);
    odd_ = (at & 2) != 0;
    const std::uintptr_t first = at & ~std::uintptr_t{3};
#pragma unroll
    for (int w = 0; w < 5; ++w) {
      words_[w] = exists && (w < 4 || odd_) ? word(memory, first + 4 * w) : 0;
    }
  }

  __device__ __forceinline__ uint4 halves() const {
    std::uint32_t words[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      words[w] = __funnelshift_r(words_[w], words_[w + 1], odd_ ? 16 : 0);
    }
    return {words[0], words[1], words[2], words[3]};
  }

 private:
  __device__ __forceinline__ static std::uint32_t word(const MatrixMemory& memory, std::uintptr_t at) {
    if (memory.has<std::uint32_t>(at)) [[likely]] {
      return __ldg(reinterpret_cast<const std::uint32_t*>(at));
    }
    std::uint32_t words[1];
    memory.gather<std::uint16_t>(at, words);
    return words[0];
  }

  std::uint32_t words_[5];
  bool odd_;
};

}  // namespace headway::cuda
