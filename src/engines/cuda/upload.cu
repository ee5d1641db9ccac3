#include "engines/cuda/kernels/launch.cuh"
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
  // Long lists (valid_lens for each row) go by one copy, which the driver stages; but a graph would copy from the host's
  // memory when it is replayed.
  if (count > 16 * Piece::capacity) {
    cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
    if (const cudaError_t result = cudaStreamIsCapturing(stream, &capturing)) {
      return result;
    }
    if (capturing == cudaStreamCaptureStatusNone) {
      return cudaMemcpyAsync(target, values, count * sizeof(*values), cudaMemcpyHostToDevice, stream);
    }
  }
  for (std::size_t begin = 0; begin < count; begin += Piece::capacity) {
    Piece piece;
    const int here = static_cast<int>(count - begin < Piece::capacity ? count - begin : Piece::capacity);
    for (int n = 0; n < here; ++n) {
      piece.values[n] = values[begin + static_cast<std::size_t>(n)];
    }
    if (const cudaError_t result = start(store_piece, dim3(1), Piece::capacity, stream, piece, here, target + begin)) {
      return result;
    }
  }
  return cudaSuccess;
}

}  // namespace headway::cuda
