// From the sums that chunks and pieces left to results, one thread or block a result, each in one fixed order. All of
// it reads what it needs once and is bound by memory, which is little beside the walks.
#include "engines/cuda/kernels/analysis_kernels.h"
#include "engines/cuda/kernels/analysis_pieces.h"
#include "engines/cuda/kernels/launch.cuh"
#include "engines/cuda/key_range.cuh"

namespace headway::cuda {
namespace {

constexpr int sum_threads = 256;

__device__ inline std::int64_t first_result() {
  return static_cast<std::int64_t>(blockIdx.x) * sum_threads + threadIdx.x;
}
__device__ inline std::int64_t result_step() { return static_cast<std::int64_t>(gridDim.x) * sum_threads; }

template <class Real>
__global__ void __launch_bounds__(sum_threads) sum_received(const __grid_constant__ ReceivedArguments args) {
  for (std::int64_t at = first_result(); at < args.head_count * args.keys; at += result_step()) {
    const std::int64_t head = at / args.keys, j = at % args.keys;
    double sum = 0;
    for (std::int64_t chunk = 0; chunk < args.chunks; ++chunk) {
      sum += args.sums[(head * args.chunks + chunk) * args.keys + j];
    }
    static_cast<Real*>(args.received)[(args.first_head + head) * args.keys + j] = static_cast<Real>(sum);
  }
}

template <class Real>
__global__ void __launch_bounds__(sum_threads) sum_cells(const __grid_constant__ CellsArguments args) {
  const std::int64_t cells = args.cell_rows * args.columns;
  for (std::int64_t at = first_result(); at < args.head_count * cells; at += result_step()) {
    const std::int64_t head = at / cells, r = at % cells / args.columns, c = at % args.columns;
    const std::int64_t row = r * args.row_cell, row_end = smaller(row + args.row_cell, args.rows);
    const std::int64_t keys = smaller(args.key_cell, args.keys - c * args.key_cell);
    double sum = 0;
    Real highest = 0;
    for (std::int64_t tile = row / analysis_rows; tile <= (row_end - 1) / analysis_rows; ++tile) {
      const std::int64_t from = (head * args.pieces + tile + r) * args.columns + c;
      const Real other = static_cast<const Real*>(args.highest)[from];
      sum += args.sums[from];
      highest = other > highest ? other : highest;
    }
    static_cast<Real*>(args.mean)[at] = static_cast<Real>(sum / static_cast<double>((row_end - row) * keys));
    static_cast<Real*>(args.max)[at] = highest;
  }
}

// The product of two heads' maps; a block each.
template <class Real>
__global__ void __launch_bounds__(sum_threads) multiply_maps(const __grid_constant__ SimilarityArguments args) {
  __shared__ double sums[sum_threads];
  const std::int64_t pairs = args.batch * args.heads * args.heads;
  for (std::int64_t pair = blockIdx.x; pair < pairs; pair += gridDim.x) {
    const std::int64_t g = pair / args.heads, h = g / args.heads * args.heads + pair % args.heads;  // of B * H
    const Real *a = static_cast<const Real*>(args.mean) + g * args.cells,
               *b = static_cast<const Real*>(args.mean) + h * args.cells;
    double sum = 0;
    for (std::int64_t c = threadIdx.x; c < args.cells; c += sum_threads) {
      sum += static_cast<double>(a[c]) * static_cast<double>(b[c]);
    }
    sums[threadIdx.x] = sum;
    for (unsigned half = sum_threads / 2; half > 0; half /= 2) {
      __syncthreads();
      if (threadIdx.x < half) {
        sums[threadIdx.x] += sums[threadIdx.x + half];
      }
    }
    if (threadIdx.x == 0) {
      args.products[pair] = sums[0];
    }
    __syncthreads();
  }
}

template <class Real>
__global__ void __launch_bounds__(sum_threads) compare_maps(const __grid_constant__ SimilarityArguments args) {
  const std::int64_t pairs = args.batch * args.heads * args.heads;
  for (std::int64_t pair = first_result(); pair < pairs; pair += result_step()) {
    const std::int64_t b = pair / (args.heads * args.heads), g = pair / args.heads % args.heads, h = pair % args.heads;
    const double* products = args.products + b * args.heads * args.heads;
    const double scale = sqrt(products[g * args.heads + g]) * sqrt(products[h * args.heads + h]);
    static_cast<Real*>(args.similarity)[pair] =
        scale == 0 ? Real(0) : static_cast<Real>(products[g * args.heads + h] / scale);
  }
}

template <class Arguments>
cudaError_t launch_sums(void (*kernel)(Arguments), const Arguments& arguments, std::int64_t blocks_needed,
                        cudaStream_t stream) {
  if (blocks_needed == 0) {
    return cudaSuccess;
  }
  Arguments copy = arguments;
  void* parameters[] = {&copy};
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid(blocks_needed), dim3(sum_threads), parameters, 0,
                          stream);
}

}  // namespace

cudaError_t launch_received(const ReceivedArguments& arguments, bool wide, cudaStream_t stream) {
  return launch_sums(wide ? sum_received<double> : sum_received<float>, arguments,
                     blocks(arguments.head_count * arguments.keys, sum_threads), stream);
}

cudaError_t launch_cells(const CellsArguments& arguments, bool wide, cudaStream_t stream) {
  return launch_sums(wide ? sum_cells<double> : sum_cells<float>, arguments,
                     blocks(arguments.head_count * arguments.cell_rows * arguments.columns, sum_threads), stream);
}

cudaError_t launch_similarity(const SimilarityArguments& arguments, bool wide, cudaStream_t stream) {
  const std::int64_t pairs = arguments.batch * arguments.heads * arguments.heads;
  const cudaError_t multiplied =
      launch_sums(wide ? multiply_maps<double> : multiply_maps<float>, arguments, pairs, stream);
  return multiplied != cudaSuccess ? multiplied
                                   : launch_sums(wide ? compare_maps<double> : compare_maps<float>, arguments,
                                                 blocks(pairs, sum_threads), stream);
}

}  // namespace headway::cuda
