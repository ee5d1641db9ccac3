// A warp for each row, a lane for each 16 bytes of it. Neighbouring lanes read neighbouring bytes, which come from L1
// after the first; bytes, each read and written once, bound it.
#include "engines/cuda/kernels/aligned_rows.h"
#include "engines/cuda/kernels/launch.cuh"

namespace headway::cuda {
namespace {

constexpr int threads = 256;
constexpr int rows_a_block = threads / 32;

__global__ void __launch_bounds__(threads) aligned_rows(const __grid_constant__ AlignedRows copy) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t chunks = aligned_row_bytes(copy.bytes) / 16, all = copy.items * copy.heads * copy.rows;
  const std::int64_t step = std::int64_t{gridDim.x} * rows_a_block;
  for (std::int64_t row = std::int64_t{blockIdx.x} * rows_a_block + threadIdx.x / 32; row < all; row += step) {
    const std::int64_t head = row / copy.rows;
    const auto* from = static_cast<const std::uint8_t*>(copy.from) + head / copy.heads * copy.item_step +
                       head % copy.heads * copy.head_step + row % copy.rows * copy.row_step;
    auto* to = static_cast<uint4*>(copy.to) + row * chunks;
    for (std::int64_t chunk = lane; chunk < chunks; chunk += 32) {
      std::uint32_t words[4] = {};
#pragma unroll
      for (int x = 0; x < 16; ++x) {
        const std::int64_t at = chunk * 16 + x;
        words[x / 4] |= (at < copy.bytes ? std::uint32_t{from[at]} : 0u) << x % 4 * 8;
      }
      to[chunk] = {words[0], words[1], words[2], words[3]};
    }
  }
}

}  // namespace

cudaError_t launch_aligned_rows(const AlignedRows& copy, cudaStream_t stream) {
  const std::int64_t rows = copy.items * copy.heads * copy.rows;
  return start(aligned_rows, grid(blocks(rows, rows_a_block)), threads, stream, copy);
}

}  // namespace headway::cuda
