#include "engines/cuda/upload.h"

namespace headway::cuda {
namespace {

// As a kernel's parameter the numbers are copied when it is launched, or captured into a graph.
struct Piece {
  static constexpr int capacity = 448;  // under 4 KiB, the limit before CUDA 12.1
  std::int64_t values[capacity];
};

__global__ void store_piece(const __grid_constant__ Piece piece, int count, std::int64_t* target) {
  if (static_cast<int>(threadIdx.x) < count) {
    target[threadIdx.x] = piece.values[threadIdx.x];
  }
}

}  // namespace

cudaError_t upload(const std::int64_t* values, std::size_t count, std::int64_t* target, cudaStream_t stream) {
  // Long lists (valid_lens for each row) go by one copy, which the driver stages.
  if (count > 16 * Piece::capacity) {
    return cudaMemcpyAsync(target, values, count * sizeof(*values), cudaMemcpyHostToDevice, stream);
  }
  for (std::size_t begin = 0; begin < count; begin += Piece::capacity) {
    Piece piece;
    const int here = static_cast<int>(count - begin < Piece::capacity ? count - begin : Piece::capacity);
    for (int n = 0; n < here; ++n) {
      piece.values[n] = values[begin + static_cast<std::size_t>(n)];
    }
    store_piece<<<1, Piece::capacity, 0, stream>>>(piece, here, target + begin);
  }
  return cudaGetLastError();
}

}  // namespace headway::cuda
