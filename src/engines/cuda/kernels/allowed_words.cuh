// Which pairs a range and a mask allow, as bits: a lane finds those of one query and up to 32 keys, and the lanes of a
// warp exchange them as their slots need (mma_tile.cuh). Loads are then 16 bytes where the mask's layout allows, and a
// slot is one test of a bit.
#pragma once

#include "engines/cuda/kernels/mask_bits.cuh"
#include "engines/cuda/kernels/mma_tile.cuh"

namespace headway::cuda {

// A bit for each of 32 keys from `first` on that lies in the range.
__device__ __forceinline__ std::uint32_t range_bits(std::int64_t begin, std::int64_t end, std::int64_t first) {
  const auto below = [first](std::int64_t key) {
    const std::int64_t count = key - first;
    return count <= 0 ? 0u : count >= 32 ? ~0u : (1u << static_cast<int>(count)) - 1;
  };
  return below(end) & ~below(begin);
}

// The bytes of one query's mask.
struct MaskRow {
  const std::uint8_t* data;  // of key 0; null: all pairs are allowed
  std::int64_t key;          // the step from one to the next
  std::int64_t end;          // keys that there are

  __device__ MaskRow(const Matrix& mask, std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t keys)
      : data(mask.data == nullptr
                 ? nullptr
                 : static_cast<const std::uint8_t*>(mask.data) + b * mask.batch + h * mask.head + i * mask.query),
        key(mask.key),
        end(keys) {}

  // Of `seen`, the bits of keys from `first` on, those that the mask allows. It is read only where something is seen.
  template <int Keys>
  __device__ __forceinline__ std::uint32_t of(std::int64_t first, std::uint32_t seen) const {
    if (data == nullptr) {
      return seen;
    }
    std::uint32_t result = 0;
#pragma unroll
    for (int from = 0; from < Keys; from += 16) {
      if ((seen >> from & 0xFFFFu) != 0) {
        result |= sixteen(first + from, seen >> from & 0xFFFFu) << from;
      }
    }
    return seen & result;
  }

 private:
  __device__ __forceinline__ std::uint32_t sixteen(std::int64_t first, std::uint32_t seen) const {
    const std::uint8_t* bytes = data + first * key;
    const auto place = reinterpret_cast<std::uintptr_t>(bytes);
    if (key == 1 && place % 4 == 0 && first + 16 <= end) {
      if (place % 16 == 0) {
        return bits_of_bytes(*reinterpret_cast<const uint4*>(bytes));
      }
      const auto* words = reinterpret_cast<const std::uint32_t*>(bytes);
      return bits_of_bytes({words[0], words[1], words[2], words[3]});
    }
    std::uint32_t bits = 0;
#pragma unroll 8
    for (int x = 0; x < 16; ++x) {
      bits |= (seen >> x & 1) != 0 && bytes[x * key] != 0 ? 1u << x : 0u;
    }
    return bits;
  }
};

// The pairs of a warp's 16 queries and 64 keys.
class QueryRowWords {
 public:
  // By all lanes: `own` is the word of row lane / 2 of the warp's and keys 32 (lane % 2) to 32 (lane % 2) + 31.
  __device__ QueryRowWords(const MmaThread& thread, std::uint32_t own) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const int holder = 2 * (thread.lane / 4 + 8 * half) + side;
        words_[half][side] = __shfl_sync(~0u, own, holder) >> (2 * (thread.lane % 4));
      }
    }
  }

  __device__ bool allows(int slot) const {
    return (words_[slot / 2 % 2][slot / 16] >> (slot / 4 % 4 * 8 + slot % 2) & 1) != 0;
  }

 private:
  std::uint32_t words_[2][2];
};

// The pairs of a warp's 16 keys and 32 queries, a lane for each query.
class KeyRowWords {
 public:
  // By all lanes: `own` are the keys of this lane's query `i`.
  __device__ KeyRowWords(const Arguments& args, std::int64_t b, std::int64_t h, std::int64_t i, int2 own, int first_key,
                         std::int64_t keys)
      : own_(MaskRow(args.mask, b, h, i, keys).of<16>(first_key, range_bits(own.x, own.y, first_key) & 0xFFFFu)) {}

  __device__ bool any() const { return __any_sync(~0u, own_ != 0) != 0; }

  // A bit for each slot of this lane; by all lanes.
  __device__ std::uint32_t slots(int lane) const {
    std::uint32_t bits = 0;
#pragma unroll
    for (int t = 0; t < 4; ++t) {
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        const std::uint32_t query = __shfl_sync(~0u, own_, t * 8 + 2 * (lane % 4) + x) >> (lane / 4);
        bits |= (query & 1) << (4 * t + x) | (query >> 8 & 1) << (4 * t + x + 2);
      }
    }
    return bits;
  }

 private:
  std::uint32_t own_;
};

}  // namespace headway::cuda
