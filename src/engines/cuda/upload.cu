#include <cstring>

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

// Long lists (valid_lens for each row) go by one copy, which the driver stages; but a graph would copy from the host's
// memory when it is replayed.
cudaError_t may_copy(std::size_t words, cudaStream_t stream, bool& may) {
  may = false;
  if (words <= 16 * Piece::capacity) {
    return cudaSuccess;
  }
  cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
  const cudaError_t result = cudaStreamIsCapturing(stream, &capturing);
  may = capturing == cudaStreamCaptureStatusNone;
  return result;
}

cudaError_t upload_words(const void* values, std::size_t count, std::int64_t* target, cudaStream_t stream) {
  bool copies;
  if (const cudaError_t result = may_copy(count, stream, copies)) {
    return result;
  }
  if (copies) {
    return cudaMemcpyAsync(target, values, count * sizeof(std::int64_t), cudaMemcpyHostToDevice, stream);
  }
  for (std::size_t begin = 0; begin < count; begin += Piece::capacity) {
    Piece piece;
    const int here = static_cast<int>(count - begin < Piece::capacity ? count - begin : Piece::capacity);
    std::memcpy(piece.values, static_cast<const char*>(values) + begin * sizeof(std::int64_t),
                static_cast<std::size_t>(here) * sizeof(std::int64_t));
    if (const cudaError_t result = start(store_piece, dim3(1), Piece::capacity, stream, piece, here, target + begin)) {
      return result;
    }
  }
  return cudaSuccess;
}

}  // namespace

cudaError_t upload(const std::int64_t* values, std::size_t count, std::int64_t* target, cudaStream_t stream) {
  return upload_words(values, count, target, stream);
}

cudaError_t upload(const std::int32_t* values, std::size_t count, std::int32_t* target, cudaStream_t stream) {
  return upload_words(values, count / 2, reinterpret_cast<std::int64_t*>(target), stream);
}

}  // namespace headway::cuda
