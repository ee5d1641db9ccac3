// A warp for each row, a lane for each word of it. A row may begin anywhere: a word of the copy has parts of two
// neighbouring words of memory, of which the second is the next lane's first and comes from L1. Bytes, each read and
// written once, bound it.
#include "engines/cuda/kernels/aligned_rows.h"
#include "engines/cuda/kernels/launch.cuh"

namespace headway::cuda {
namespace {

constexpr int threads = 256;
constexpr int rows_a_block = threads / 32;

// A row's bytes as words, the first of which holds the byte at `begin`.
struct RowWords {
  std::uintptr_t begin, end;

  // Bytes outside of the row are 0 where they could lie outside of the matrix too.
  __device__ __forceinline__ std::uint32_t load(std::int64_t index) const {
    const std::uintptr_t at = (begin & ~std::uintptr_t{3}) + 4 * index;
    if (at >= begin && at + 4 <= end) [[likely]] {
      return __ldg(reinterpret_cast<const std::uint32_t*>(at));
    }
    std::uint32_t word = 0;
    for (int byte = 0; byte < 4; ++byte) {
      if (at + byte >= begin && at + byte < end) {
        word |= std::uint32_t{__ldg(reinterpret_cast<const std::uint8_t*>(at + byte))} << 8 * byte;
      }
    }
    return word;
  }
};

__global__ void __launch_bounds__(threads) aligned_rows(const __grid_constant__ AlignedRows copy) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t words = aligned_row_bytes(copy.bytes) / 4, all = copy.items * copy.heads * copy.rows;
  const std::int64_t step = std::int64_t{gridDim.x} * rows_a_block;
  for (std::int64_t row = std::int64_t{blockIdx.x} * rows_a_block + threadIdx.x / 32; row < all; row += step) {
    const std::int64_t head = row / copy.rows;
    const auto begin = reinterpret_cast<std::uintptr_t>(copy.from) + head / copy.heads * copy.item_step +
                       head % copy.heads * copy.head_step + row % copy.rows * copy.row_step;
    const RowWords from{begin, begin + copy.bytes};
    const std::uint32_t shift = static_cast<std::uint32_t>(begin & 3) * 8;
    auto* to = static_cast<std::uint32_t*>(copy.to) + row * words;
#pragma unroll 4
    for (std::int64_t index = lane; index < words; index += 32) {
      to[index] = __funnelshift_r(from.load(index), shift == 0 ? 0u : from.load(index + 1), shift);
    }
  }
}

}  // namespace

cudaError_t launch_aligned_rows(const AlignedRows& copy, cudaStream_t stream) {
  const std::int64_t rows = copy.items * copy.heads * copy.rows;
  return start(aligned_rows, grid(blocks(rows, rows_a_block)), threads, stream, copy);
}

}  // namespace headway::cuda
