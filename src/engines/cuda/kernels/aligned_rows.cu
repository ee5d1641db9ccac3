// A warp for each row, a lane for each 16 bytes of it. A row may begin anywhere: 16 bytes of the copy have parts of two
// neighbouring chunks of memory, of which the second is the next lane's first. Bytes, each read and written once, bound
// it.
#include "engines/cuda/kernels/aligned_rows.h"
#include "engines/cuda/kernels/launch.cuh"

namespace headway::cuda {
namespace {

constexpr int threads = 256;
constexpr int rows_a_block = threads / 32;

// A row's bytes as aligned chunks, the first of which holds the byte at `begin`.
struct RowChunks {
  std::uintptr_t begin, end;

  // Bytes outside of the row are 0: they could lie outside of the matrix too.
  __device__ __forceinline__ uint4 load(std::int64_t index) const {
    const std::uintptr_t at = (begin & ~std::uintptr_t{15}) + 16 * index;
    if (at >= begin && at + 16 <= end) [[likely]] {
      return __ldg(reinterpret_cast<const uint4*>(at));
    }
    return {load_word(at), load_word(at + 4), load_word(at + 8), load_word(at + 12)};
  }

  __device__ std::uint32_t load_word(std::uintptr_t at) const {
    std::uint32_t word = 0;
    for (int byte = 0; byte < 4; ++byte) {
      if (at + byte >= begin && at + byte < end) {
        word |= std::uint32_t{__ldg(reinterpret_cast<const std::uint8_t*>(at + byte))} << 8 * byte;
      }
    }
    return word;
  }
};

// 16 bytes of two chunks side by side, from byte 4 Words + bits / 8 on.
template <int Words>
__device__ __forceinline__ uint4 shifted(const uint4& first, const uint4& second, std::uint32_t bits) {
  const std::uint32_t all[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
  std::uint32_t result[4];
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    result[word] = __funnelshift_r(all[Words + word], all[Words + word + 1], bits);
  }
  return {result[0], result[1], result[2], result[3]};
}

__device__ __forceinline__ uint4 shifted(const uint4& first, const uint4& second, int bytes) {
  const std::uint32_t bits = static_cast<std::uint32_t>(bytes & 3) * 8;
  switch (bytes / 4) {
    case 0: return shifted<0>(first, second, bits);
    case 1: return shifted<1>(first, second, bits);
    case 2: return shifted<2>(first, second, bits);
    default: return shifted<3>(first, second, bits);
  }
}

__device__ __forceinline__ uint4 next_lanes(const uint4& own) {
  return {__shfl_down_sync(~0u, own.x, 1), __shfl_down_sync(~0u, own.y, 1), __shfl_down_sync(~0u, own.z, 1),
          __shfl_down_sync(~0u, own.w, 1)};
}

__global__ void __launch_bounds__(threads) aligned_rows(const __grid_constant__ AlignedRows copy) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t chunks = aligned_row_bytes(copy.bytes) / 16, all = copy.items * copy.heads * copy.rows;
  const std::int64_t step = std::int64_t{gridDim.x} * rows_a_block;
  for (std::int64_t row = std::int64_t{blockIdx.x} * rows_a_block + threadIdx.x / 32; row < all; row += step) {
    const std::int64_t head = row / copy.rows;
    const auto begin = reinterpret_cast<std::uintptr_t>(copy.from) + head / copy.heads * copy.item_step +
                       head % copy.heads * copy.head_step + row % copy.rows * copy.row_step;
    const RowChunks from{begin, begin + copy.bytes};
    const int offset = static_cast<int>(begin & 15);
    auto* to = static_cast<uint4*>(copy.to) + row * chunks;
#pragma unroll 2
    for (std::int64_t first = 0; first < chunks; first += 32) {
      const std::int64_t index = first + lane;
      const uint4 own = from.load(index);
      uint4 next = next_lanes(own);
      if (lane == 31) {
        next = from.load(index + 1);
      }
      if (index < chunks) {
        to[index] = shifted(own, next, offset);
      }
    }
  }
}

}  // namespace

cudaError_t launch_aligned_rows(const AlignedRows& copy, cudaStream_t stream) {
  const std::int64_t rows = copy.items * copy.heads * copy.rows;
  return start(aligned_rows, grid(blocks(rows, rows_a_block)), threads, stream, copy);
}

}  // namespace headway::cuda
